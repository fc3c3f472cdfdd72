#!/usr/bin/env bash
# Trains on a GKE cluster that XPK has made.
#
#   CLUSTER=c IMAGE=gcr.io/p/jaxmoe launch/xpk.sh NAME --workdir=FOLDER [options]
#
# XPK starts again after exit code 75 (stopped by a signal after saving), 1 and crashes
# (127-255 by itself), not after 2, a mistake. FOLDER is on a volume that XPK mounts.
set -euo pipefail
if (($# < 2)); then
  sed -n '2,7p' "$0" >&2
  exit 2
fi
name=$1
shift
options=(--gin.Mesh.platform=tpu "$@")
xpk workload create --workload="$name" --cluster="$CLUSTER" \
  --tpu-type="${TPU_TYPE:-v5p-32}" --num-slices="${SLICES:-1}" \
  --docker-image="$IMAGE" \
  --max-restarts=100 --restart-on-exit-codes=1,75 \
  --termination-grace-period-seconds=300 \
  --command="cd /jaxmoe && python train.py $(printf '%q ' "${options[@]}")"
