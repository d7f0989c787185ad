#!/bin/sh
# Codex with the environment's shell beside its own, which acts on its empty working folder only. The agent
# `command` runs it; the first argument is the program `codex`.
set -eu
export CODEX_HOME="$PWD/.codex"
mkdir "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<END
model = "policy"
model_provider = "tidegate"
web_search = "disabled"
[model_providers.tidegate]
name = "tidegate"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
[mcp_servers.env]
url = "$TIDEGATE_MCP_URL"
bearer_token_env_var = "OPENAI_API_KEY"
END
exec "$1" exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox
