#!/usr/bin/env bash
# Train this agent. More settings may follow: launch.sh --trainer.steps 10, or launch.sh --dry-run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"
exec tidegate train examples/custom_agent/config.toml "$@"
