#!/usr/bin/env bash
# Stops a run: its step is finished, its state saved. Waits for it; run.sh goes on with it.
#
#   tpu_scripts/stop.sh --name=NAME --zone=ZONE --run=ID [--project=PROJECT] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "run" "$@"
check_run
worker all stop "${OPTION[run]}"
