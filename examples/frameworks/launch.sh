#!/usr/bin/env bash
# Train an agent of a framework. More settings may follow, such as which one:
#   launch.sh --agent.use examples/frameworks/langgraph_agent.py:agent
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
exec tidegate train examples/frameworks/config.toml "$@"
