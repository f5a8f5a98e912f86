#!/usr/bin/env bash
# Says in what state the slice is and, of every worker, the run.
#
#   tpu_scripts/status.sh --name=NAME --zone=ZONE [--run=ID] [--project=PROJECT] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "run" "$@"
if [[ -n $DRY_RUN ]]; then
  act gcloud compute tpus queued-resources describe "$NAME" "${PLACE[@]}" '--format=value(state.state)'
  act gcloud compute tpus tpu-vm describe "$NAME" "${PLACE[@]}" '--format=value(state)'
else
  printf 'queued resource: %s\n' "$(resource_state)"
  node="$(node_state)"
  printf 'node: %s\n' "$node"
  [[ $node == READY ]] || exit 0
fi
[[ -z ${OPTION[run]} ]] || { check_run && worker all status "${OPTION[run]}"; }
