#!/usr/bin/env bash
# Starts a training run on all workers, detached, or goes on with it.
#
#   tpu_scripts/run.sh --name=NAME --zone=ZONE --run=ID --workdir=gs://BUCKET/ID
#     [--project=PROJECT] [--dry-run] -- --config=FILE [--config.key=value ...]
#
# ID and workdir name the run: with the same ones it goes on from its newest checkpoint. A slice of
# several hosts needs a workdir that all of them share.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "run workdir" "$@"
check_run
[[ -n ${OPTION[workdir]} ]] || die "--workdir is missing, such as gs://BUCKET/${OPTION[run]}"
((${#REST[@]})) || die "-- --config=FILE is missing: what the trainer is to be given"
worker all start "${OPTION[run]}" "--workdir=${OPTION[workdir]}" "${REST[@]}"
