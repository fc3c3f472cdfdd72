#!/usr/bin/env bash
# Trains on this host, and starts again where that makes sense. The other hosts do the
# same; the processes wait for each other (Mesh.start_timeout_s).
#
#   launch/run.sh --workdir=FOLDER [options of train]
#
# Exit codes of train: 0 done; 75 stopped by a signal after saving: again; 2 a mistake:
# never again; anything else, a crash or a lost host: again, but not for ever.
set -uo pipefail
cd "$(dirname "$0")/.."

retries=${RETRIES:-10} # after crashes; stops by a signal do not count
while true; do
  python train.py "$@"
  code=$?
  case $code in
    0 | 2) exit "$code" ;;
    75) ;;
    *)
      if ((retries-- <= 0)); then exit "$code"; fi
      ;;
  esac
  echo "launch: train ended with exit code $code, starting again" >&2
  sleep "${PAUSE_S:-10}"
done
