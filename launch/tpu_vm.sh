#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice: one command to all workers.
#
#   ZONE=us-east5-a launch/tpu_vm.sh TPU --workdir=FOLDER [options of train]
#
# FOLDER is on a file system that all hosts have mounted. The repository is at
# ~/jaxmoe on every host, installed with jax[tpu]: see docs/launch.md.
set -euo pipefail
if (($# < 2)); then
  sed -n '2,7p' "$0" >&2
  exit 2
fi
tpu=$1
shift
options=(--gin.Mesh.platform=tpu "$@")
gcloud compute tpus tpu-vm ssh "$tpu" --zone="$ZONE" --worker=all \
  --command="~/jaxmoe/launch/run.sh $(printf '%q ' "${options[@]}")"
