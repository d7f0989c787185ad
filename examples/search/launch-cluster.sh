#!/usr/bin/env bash
# launch-cluster.sh DATA INDEX [settings]: like launch.sh, with engine, trainer and agents on a Ray cluster and the
# retrieval server on this node, at an address that the other nodes can reach. DATA is on a shared disk. Further
# settings may follow, including --dry-run.
#   CLUSTER           auto (this machine is a node of the cluster, the default), or ray://HOST:10001
#   RAG_HOST          this node's address in the cluster (default: the system's first address)
#   RAG_URLS          addresses of running retrieval servers
#   TIDEGATE_RAG_KEY  the retrieval servers' key (default: a new key for the server started here)
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
