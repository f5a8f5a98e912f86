# shellcheck shell=bash disable=SC2034
# What the scripts share; sourced by them.
#
# Every script takes --name, --zone and --project (or TPU_NAME, TPU_ZONE, TPU_PROJECT) and --dry-run,
# which prints what would be run, quoted for a shell, and runs nothing.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NAME="${TPU_NAME:-}" ZONE="${TPU_ZONE:-}" PROJECT="${TPU_PROJECT:-}" DRY_RUN=""
POLL="${TPU_POLL:-30}" # seconds between two looks at a state
declare -A OPTION=()   # the script's own, by name
REST=()                # what follows --

say() { printf '%s\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# The words, each quoted so that a shell reads them back as they are.
quoted() {
  local out
  printf -v out '%q ' "$@"
  printf '%s' "${out% }"
}

# Runs a command that changes something, or prints it in a dry run.
act() {
  if [[ -n $DRY_RUN ]]; then
    printf '%s\n' "$(quoted "$@")"
  else
    "$@"
  fi
}

# parse "OPTION OPTION=default FLAG? ..." ARGUMENT...: fills OPTION and REST; others are errors.
parse() {
  local spec="$1" known="" word key
  shift
  for word in $spec; do
    key="${word%%[=?]*}"
    known+=" $key"
    if [[ $word == *=* ]]; then OPTION[$key]="${word#*=}"; else OPTION[$key]=""; fi
  done
  while (($#)); do
    case "$1" in
      --) shift; REST=("$@"); break ;;
      --help) usage; exit 0 ;;
      --dry-run) DRY_RUN=1 ;;
      --name=*) NAME="${1#*=}" ;;
      --zone=*) ZONE="${1#*=}" ;;
      --project=*) PROJECT="${1#*=}" ;;
      --*)
        key="${1#--}"
        key="${key%%=*}"
        [[ " $known " == *" $key "* ]] || die "$1: unknown option; --help lists them"
        if [[ $1 == *=* ]]; then
          OPTION[$key]="${1#*=}"
        elif [[ " $spec " == *" $key? "* ]]; then
          OPTION[$key]=1
        else
          die "$1: give a value, --$key=VALUE"
        fi
        ;;
      *) die "$1: unknown argument; options are --KEY=VALUE, the trainer's arguments follow --" ;;
    esac
    shift
  done
  [[ $NAME =~ ^[a-z]([a-z0-9-]{0,60}[a-z0-9])?$ ]] ||
    die "--name=$NAME: must be lower-case letters, digits and dashes, such as gspo-1 (or set TPU_NAME)"
  [[ -n $ZONE ]] || die "--zone is missing, such as --zone=us-east5-a (or set TPU_ZONE)"
  PLACE=("--zone=$ZONE")
  [[ -z $PROJECT ]] || PLACE+=("--project=$PROJECT")
}

# The usage of a script: its comment at the top.
usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; }

# look COMMAND...: the last line that it prints; "ABSENT" if it finds nothing of that name.
look() {
  local out
  if out="$("$@" 2>&1)"; then
    printf '%s' "${out##*$'\n'}"
  elif [[ $out == *NOT_FOUND* || $out == *"not found"* ]]; then
    printf 'ABSENT'
  else
    printf '%s\n' "$out" >&2
    return 1
  fi
}

# The states of the queued resource, and of the node: READY, PREEMPTED and others.
resource_state() {
  look gcloud compute tpus queued-resources describe "$NAME" "${PLACE[@]}" '--format=value(state.state)'
}

node_state() {
  look gcloud compute tpus tpu-vm describe "$NAME" "${PLACE[@]}" '--format=value(state)'
}

# on_workers WORKER COMMAND...: runs it in the home of a worker, or of "all".
on_workers() {
  local worker="$1"
  shift
  act gcloud compute tpus tpu-vm ssh "$NAME" "${PLACE[@]}" "--worker=$worker" \
    "--command=$(quoted "$@")"
}

# to_workers FILE PLACE: copies a file to every worker.
to_workers() {
  act gcloud compute tpus tpu-vm scp "$1" "$NAME:$2" "${PLACE[@]}" --worker=all
}

# worker WORKER VERB ARGUMENT...: worker.sh there.
worker() {
  local which="$1"
  shift
  on_workers "$which" bash gspo_jax/tpu_scripts/worker.sh "$@"
}

check_run() {
  [[ ${OPTION[run]} =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
    die "--run=${OPTION[run]}: must name the run, in letters, digits, dots, dashes and underscores"
}
