#!/usr/bin/env bash
# Copies the project, as it lies here, to every worker: what git tracks or does not ignore.
#
#   tpu_scripts/sync.sh --name=NAME --zone=ZONE [--project=PROJECT] [--secrets=FILE] [--dry-run]
#
# FILE has lines KEY=VALUE, such as WANDB_API_KEY=...; it lies on the workers, for their user alone,
# and its variables are in the environment of the trainer. No secret is ever part of a command.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "secrets" "$@"
[[ -z ${OPTION[secrets]} || -r ${OPTION[secrets]} ]] ||
  die "--secrets=${OPTION[secrets]}: cannot be read"

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$ROOT"
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do [[ ! -e $file ]] || printf '%s\0' "$file"; done >"$folder/files"
tar --create --gzip --null --files-from="$folder/files" --file="$folder/gspo_jax.tgz"
to_workers "$folder/gspo_jax.tgz" gspo_jax.tgz
to_workers "$folder/files" gspo_jax.files
# Files that are gone here go there as well.
# shellcheck disable=SC2016
on_workers all bash -euc 'mkdir -p gspo_jax
if [ -f gspo_jax/.synced ]; then (cd gspo_jax && xargs -0 rm -f <.synced); fi
tar --extract --gzip --file=gspo_jax.tgz --directory=gspo_jax
mv gspo_jax.files gspo_jax/.synced
rm gspo_jax.tgz'
if [[ -n ${OPTION[secrets]} ]]; then
  on_workers all bash -c 'umask 077 && touch .gspo_secrets && chmod 600 .gspo_secrets'
  to_workers "${OPTION[secrets]}" .gspo_secrets
  on_workers all chmod 600 .gspo_secrets
fi
