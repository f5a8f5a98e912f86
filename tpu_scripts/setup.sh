#!/usr/bin/env bash
# Installs Python 3.12, the pinned packages and the runtime for TPU on every worker, after sync.sh.
#
#   tpu_scripts/setup.sh --name=NAME --zone=ZONE [--project=PROJECT] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parse "" "$@"
worker all setup
