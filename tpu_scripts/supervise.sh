#!/usr/bin/env bash
# One command for all: a slice is asked for, set up and trained on until the run is finished. Where
# it is preempted or lost it is asked for again, and the run goes on from its newest checkpoint.
#
#   tpu_scripts/supervise.sh --name=NAME --zone=ZONE --type=TYPE --run=ID --workdir=gs://BUCKET/ID
#     [--spot] [--reserved] [--labels=KEY=VALUE,...] [--network=...] [--subnetwork=...]
#     [--service-account=EMAIL] [--secrets=FILE] [--crashes=3] [--delete]
#     [--project=PROJECT] [--dry-run] -- --config=FILE [--config.key=value ...]
#
# Runs here, and may be stopped and started again: it finds out by itself what is to be done next. It
# gives up when the trainer has ended by an error --crashes times without a new checkpoint in between;
# one that was told to stop (143) or lost another (75) has not. --delete gives the slice back when the
# run is finished, or given up.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "type run workdir spot? reserved? labels network subnetwork service-account secrets crashes=3 delete?" "$@"
check_run
[[ ${OPTION[crashes]} =~ ^[1-9][0-9]*$ ]] || die "--crashes=${OPTION[crashes]}: must be at least 1"
scripts="$ROOT/tpu_scripts"
common=("--name=$NAME" "${PLACE[@]}" ${DRY_RUN:+--dry-run})

create() {
  local more=("--type=${OPTION[type]}") key
  for key in spot reserved; do [[ -z ${OPTION[$key]} ]] || more+=("--$key"); done
  for key in labels network subnetwork service-account; do
    [[ -z ${OPTION[$key]} ]] || more+=("--$key=${OPTION[$key]}")
  done
  "$scripts/create.sh" "${common[@]}" "${more[@]}"
}

start() {
  "$scripts/sync.sh" "${common[@]}" ${OPTION[secrets]:+"--secrets=${OPTION[secrets]}"} &&
    "$scripts/setup.sh" "${common[@]}" &&
    "$scripts/run.sh" "${common[@]}" "--run=${OPTION[run]}" "--workdir=${OPTION[workdir]}" \
      -- "${REST[@]}"
}

# Gives back what is left of a slice, and waits until nothing is.
clear_away() {
  "$scripts/delete.sh" "${common[@]}" || true
  until [[ "$(resource_state || true)" == ABSENT ]]; do sleep "$POLL"; done
}

# The number of the newest checkpoint; -1 if there is none.
newest() {
  local found
  if [[ ${OPTION[workdir]} == gs://* ]]; then
    found="$(gcloud storage ls "${OPTION[workdir]}/checkpoints/state/" 2>/dev/null || true)"
  else
    found="$(worker 0 newest "${OPTION[run]}" "${OPTION[workdir]}" 2>/dev/null || true)"
  fi
  printf '%s\n-1\n' "$found" | sed -n 's|^\(.*/\)\{0,1\}\(-\{0,1\}[0-9]\{1,\}\)/\{0,1\}$|\2|p' | sort -n | tail -1
}

finish() {
  [[ -z ${OPTION[delete]} ]] || "$scripts/delete.sh" "${common[@]}"
  exit "$1"
}

if [[ -n $DRY_RUN ]]; then
  create
  start
  finish 0
fi
"$scripts/run.sh" "${common[@]}" --dry-run "--run=${OPTION[run]}" "--workdir=${OPTION[workdir]}" \
  -- "${REST[@]}" >/dev/null # its complaints before anything costs money

crashes=0 at_start=""
while true; do
  state="$(resource_state)" || { sleep "$POLL" && continue; }
  case "$state" in
    ABSENT) create || { say "asking again" && clear_away && sleep "$POLL"; } && continue ;;
    ACTIVE) ;;
    FAILED | SUSPENDING | SUSPENDED)
      say "$NAME is $state: given back, to be asked for again"
      clear_away
      continue
      ;;
    *) sleep "$POLL" && continue ;;
  esac
  node="$(node_state)" || { sleep "$POLL" && continue; }
  case "$node" in
    READY) ;;
    PREEMPTED | TERMINATED | STOPPED | ABSENT)
      say "$NAME: the node is $node: given back, to be asked for again"
      clear_away
      continue
      ;;
    *) sleep "$POLL" && continue ;;
  esac

  said="$(worker all status "${OPTION[run]}" 2>/dev/null)" || said="unreachable"
  if [[ $said == *running* ]]; then
    sleep "$POLL"
  elif [[ $said == unreachable || $said == *unknown* || $said != *exited* ]]; then
    at_start="$(newest)"
    say "${OPTION[run]}: to be started, newest checkpoint $at_start"
    start || { say "not started; once more" && sleep "$POLL"; }
  elif [[ ! $said =~ exited\ [1-9] ]]; then
    say "${OPTION[run]}: finished"
    finish 0
  else
    now="$(newest)"
    if [[ -n $at_start && $now -gt $at_start ]]; then crashes=0; fi
    bad="$(grep -o 'exited [0-9]*' <<<"$said" | grep -cvxE 'exited (0|75|143)' || true)"
    ((bad == 0)) || crashes=$((crashes + 1))
    say "$said"
    if ((crashes >= OPTION[crashes])); then
      say "${OPTION[run]}: ended by an error $crashes times without a checkpoint after $now: given up; logs.sh shows why, and the same command tries again"
      finish 1
    fi
    at_start="$now"
    say "${OPTION[run]}: to be started again, newest checkpoint $now"
    start || sleep "$POLL"
  fi
done
