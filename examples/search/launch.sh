#!/usr/bin/env bash
# launch.sh DATA INDEX [settings]: DATA is a directory with train.jsonl and test.jsonl (questions), INDEX the
# output of `tidegate rag build`. Further settings may follow, including --dry-run. With
# RAG_URLS="http://a:8100 http://b:8100", these retrieval servers are used and none is started.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
needs 2 "DATA INDEX [settings]" "$@"
data=$(given "$1") index=$(given "$2")
shift 2
source examples/services.sh
read -ra urls <<<"${RAG_URLS:-http://127.0.0.1:8100}"
if [ -z "${RAG_URLS:-}" ] && ! is_dry "$@"; then
  start rag http://127.0.0.1:8100/ready tidegate rag serve "$index" --port 8100 --threads 8
fi
tidegate train examples/search/config-qwen3-0.6b.toml \
  --env.options.path "$data/train.jsonl" --env.options.eval_path "$data/test.jsonl" \
  --agent.options.urls "$(as_list "${urls[@]}")" "$@"
