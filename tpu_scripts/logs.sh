#!/usr/bin/env bash
# Shows the end of what a run has printed, of one worker or all.
#
#   tpu_scripts/logs.sh --name=NAME --zone=ZONE --run=ID [--worker=0] [--lines=50] [--follow]
#     [--project=PROJECT] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "run worker=0 lines=50 follow?" "$@"
check_run
[[ ${OPTION[lines]} =~ ^[0-9]+$ ]] || die "--lines=${OPTION[lines]}: must be a number"
worker "${OPTION[worker]}" logs "${OPTION[run]}" "${OPTION[lines]}" ${OPTION[follow]:+--follow}
