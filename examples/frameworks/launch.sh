#!/usr/bin/env bash
# Trains an agent of a framework. Further settings may follow, such as the choice of the agent:
#   launch.sh --agent.use examples/frameworks/langgraph_agent.py:agent
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
exec tidegate train examples/frameworks/config.toml "$@"
