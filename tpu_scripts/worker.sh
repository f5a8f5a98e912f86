#!/usr/bin/env bash
# What runs on a worker; the other scripts call it there.
#
#   worker.sh setup
#   worker.sh start ID ARGUMENT...    the trainer, detached; its log, pids and exit code in .runs/ID
#   worker.sh status ID               one line: running, exited CODE, or unknown
#   worker.sh stop ID                 SIGTERM, and waits
#   worker.sh logs ID LINES [--follow]
#   worker.sh newest ID WORKDIR       the names of its checkpoints
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
verb="$1" id="${2:-}" folder=".runs/${2:-}" # what is noted of a run on this worker

alive() { [[ -f $folder/parent ]] && kill -0 "$(cat "$folder/parent")" 2>/dev/null; }

case "$verb" in
  setup)
    if ! { command -v make && command -v gcc; } >/dev/null; then
      sudo apt-get install --yes --quiet make gcc
    fi
    make .venv/installed
    .uv/bin/uv pip install --quiet --python .venv --editable '.[tpu]'
    ;;
  start)
    shift 2
    if alive; then
      echo "$(hostname): $id is running already"
      exit 0
    fi
    mkdir -p "$folder"
    rm -f "$folder/exit"
    setsid nohup bash tpu_scripts/worker.sh main "$id" "$@" >>"$folder/log" 2>&1 </dev/null &
    echo $! >"$folder/parent"
    echo "$(hostname): $id started"
    ;;
  main) # the trainer's parent: outlives the connection, notes how it ends
    shift 2
    if [[ -f ~/.gspo_secrets ]]; then
      set -a
      # shellcheck disable=SC1090
      source ~/.gspo_secrets
      set +a
    fi
    trap : TERM # when the machine is shut down, the trainer has a signal of its own
    .venv/bin/python -m gspo_jax.train "$@" &
    child=$! code=0
    echo "$child" >"$folder/pid"
    while true; do
      wait "$child" && code=0 || code=$?
      kill -0 "$child" 2>/dev/null || break
    done
    echo "$code" >"$folder/exit.new"
    mv "$folder/exit.new" "$folder/exit"
    ;;
  status)
    if alive; then
      echo "$(hostname): $id running, pid $(cat "$folder/pid")"
    elif [[ -f $folder/exit ]]; then
      echo "$(hostname): $id exited $(cat "$folder/exit")"
    else
      echo "$(hostname): $id unknown"
    fi
    ;;
  stop)
    if alive; then
      kill -TERM "$(cat "$folder/pid")" || true
      while alive; do sleep 0.2; done
    fi
    echo "$(hostname): $id stopped"
    ;;
  logs)
    tail --lines="$3" ${4:+"$4"} "$folder/log"
    ;;
  newest)
    ls "$3/checkpoints/state"
    ;;
  *)
    echo "error: $verb: unknown" >&2
    exit 2
    ;;
esac
