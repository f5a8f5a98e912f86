#!/usr/bin/env bash
# Asks for a TPU slice by a queued resource, and waits until it is there.
#
#   tpu_scripts/create.sh --name=NAME --zone=ZONE --type=TYPE [--spot] [--reserved]
#     [--labels=KEY=VALUE,...] [--network=NETWORK] [--subnetwork=SUBNETWORK]
#     [--service-account=EMAIL] [--no-wait] [--project=PROJECT] [--dry-run]
#
# TYPE: v4-N and v5p-N (N cores, two a chip), v5litepod-N and v6e-N (N chips).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "type spot? reserved? labels network subnetwork service-account no-wait?" "$@"

type="${OPTION[type]:-${TPU_TYPE:-}}"
[[ $type != tpu7x* && $type != v7* && $type != 7x* ]] ||
  die "--type=$type: TPU7x is not given out by queued resources but by GKE; see tpu_scripts/gke.md"
[[ $type =~ ^(v4|v5litepod|v5p|v6e)-([1-9][0-9]*)$ ]] ||
  die "--type=$type: must be v4-N, v5litepod-N, v5p-N or v6e-N, such as v5p-128 (or set TPU_TYPE)"
generation="${BASH_REMATCH[1]}" size="${BASH_REMATCH[2]}"
case "$generation" in # runtime version, chips of N, list price of a chip and hour in the US, 2025
  v4) runtime=tpu-ubuntu2204-base chips=$((size / 2)) cents=322 ;;
  v5litepod) runtime=v2-alpha-tpuv5-lite chips=$size cents=120 ;;
  v5p) runtime=v2-alpha-tpuv5 chips=$((size / 2)) cents=420 ;;
  v6e) runtime=v2-alpha-tpuv6e chips=$size cents=270 ;;
esac
((chips > 0)) || die "--type=$type: has no whole chip; N counts cores, two a chip"

labels="app=gspo-jax${OPTION[labels]:+,${OPTION[labels]}}"
more=()
[[ -z ${OPTION[spot]} ]] || more+=(--spot)
[[ -z ${OPTION[reserved]} ]] || more+=(--reserved)
for key in network subnetwork service-account; do
  [[ -z ${OPTION[$key]} ]] || more+=("--$key=${OPTION[$key]}")
done
say "$chips chips: \$$((chips * cents / 100)) an hour at the list price of 2025 (\$$((cents / 100)).$((cents % 100)) a chip)${OPTION[spot]:+, less as spot}; until delete.sh"
act gcloud compute tpus queued-resources create "$NAME" "${PLACE[@]}" "--node-id=$NAME" \
  "--accelerator-type=$type" "--runtime-version=$runtime" "--labels=$labels" "${more[@]}"
[[ -z ${OPTION[no-wait]} && -z $DRY_RUN ]] || exit 0

before=""
while true; do
  state="$(resource_state)" || state="UNKNOWN" # the network, say: look again
  [[ $state == "$before" ]] || say "$NAME: $state"
  before="$state"
  case "$state" in
    ACTIVE) exit 0 ;;
    FAILED | SUSPENDING | SUSPENDED | ABSENT)
      die "$NAME is $state: see \`gcloud compute tpus queued-resources describe $NAME ${PLACE[*]}\`, then delete.sh and try again"
      ;;
  esac
  sleep "$POLL"
done
