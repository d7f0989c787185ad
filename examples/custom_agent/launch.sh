#!/usr/bin/env bash
# Trains this agent. Further settings may follow: launch.sh --trainer.steps 10, or launch.sh --dry-run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
exec tidegate train examples/custom_agent/config.toml "$@"
