#!/bin/sh
# Claude Code with the environment's shell as its only tool. The agent `command` runs it; the first argument is
# the program `claude`.
set -eu
cat > mcp.json <<END
{"mcpServers": {"env": {"type": "http", "url": "$TIDEGATE_MCP_URL",
  "headers": {"Authorization": "Bearer $ANTHROPIC_API_KEY"}}}}
END
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
exec "$1" --print --model "$MODEL" --mcp-config mcp.json --strict-mcp-config --tools "" \
  --allowedTools mcp__env__bash -- "$(cat)"
