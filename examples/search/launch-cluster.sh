#!/usr/bin/env bash
# launch-cluster.sh DATA INDEX [settings]: as launch.sh, with engine, trainer and agents on a Ray cluster and the
# retrieval server on this node of it, under an address that the others reach. DATA and INDEX as there; DATA is on
# a disk that all nodes share. More settings may follow, --dry-run too.
#   CLUSTER           auto (this machine is a node of it, the default), or ray://HOST:10001
#   RAG_HOST          this node's address in the cluster (default: the first that the system knows)
#   RAG_URLS          retrieval servers that run already
#   TIDEGATE_RAG_KEY  the retrieval servers' key; without one a new one is made for the server started here
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
source examples/services.sh
needs 2 "DATA INDEX [settings]" "$@"
data=$(given "$1") index=$(given "$2")
shift 2
host=${RAG_HOST:-$(this_node)}
export TIDEGATE_RAG_KEY=${TIDEGATE_RAG_KEY:-$(new_key)}
read -ra urls <<<"${RAG_URLS:-http://$host:8100}"
if [ -z "${RAG_URLS:-}" ] && ! is_dry "$@"; then
  start rag "http://$host:8100/ready" tidegate rag serve "$index" --host "$host" --port 8100 --threads 8
fi
tidegate train examples/search/config-qwen3-0.6b.toml --cluster "${CLUSTER:-auto}" \
  --env.options.path "$data/train.jsonl" --env.options.eval_path "$data/test.jsonl" \
  --agent.options.urls "$(as_list "${urls[@]}")" --agent.options.api_key_env TIDEGATE_RAG_KEY "$@"
