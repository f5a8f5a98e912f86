#!/usr/bin/env bash
# Gives the slice back: with it goes what lies on its disks, and its cost ends.
#
#   tpu_scripts/delete.sh --name=NAME --zone=ZONE [--project=PROJECT] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "" "$@"
act gcloud compute tpus queued-resources delete "$NAME" "${PLACE[@]}" --force --quiet
