#!/usr/bin/env bash
# launch-cluster.sh DATA INDEX [settings]: like launch.sh, on a Ray cluster: SGLang with the policy, the trainer and
# the agents run on its nodes; the retrieval server and the helper (which condenses results and judges answers) run
# on this node, at an address that the other nodes can reach. DATA is on a shared disk. Further settings may follow,
# including --dry-run.
#   CLUSTER           auto (this machine is a node of the cluster, the default), or ray://HOST:10001
#   SGLANG            the Python interpreter of an environment with SGLang, at the same path on all nodes
#   MODEL, HELPER     Hugging Face directories (default: models/Qwen3-0.6B, models/Qwen3-4B)
#   HELPER_GPU        a GPU of this node, which Ray must not assign (default: 0)
#   NODE_HOST         this node's address in the cluster (default: the system's first address)
#   RAG_URLS, HELPER_URLS   addresses of running servers
#   TIDEGATE_RAG_KEY  the retrieval servers' key (default: a new key for the server started here)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
source examples/services.sh
needs 2 "DATA INDEX [settings]" "$@"
data=$(given "$1") index=$(given "$2")
shift 2
host=${NODE_HOST:-$(this_node)} sglang=${SGLANG:-/opt/sglang/bin/python} helper=${HELPER:-models/Qwen3-4B}
export TIDEGATE_RAG_KEY=${TIDEGATE_RAG_KEY:-$(new_key)}
read -ra rag_urls <<<"${RAG_URLS:-http://$host:8100}"
read -ra helper_urls <<<"${HELPER_URLS:-http://$host:30001/v1}"
if ! is_dry "$@"; then
  [ -n "${RAG_URLS:-}" ] ||
    start rag "http://$host:8100/ready" tidegate rag serve "$index" --host "$host" --port 8100 --threads 8
  [ -n "${HELPER_URLS:-}" ] ||
    CUDA_VISIBLE_DEVICES=${HELPER_GPU:-0} start helper "http://$host:30001/health" \
      "$sglang" -m sglang.launch_server --model-path "$helper" --served-model-name helper \
      --host "$host" --port 30001 --context-length 16384
fi
tidegate train examples/deepresearch/config.toml --cluster "${CLUSTER:-auto}" \
  --model.path "${MODEL:-models/Qwen3-0.6B}" \
  --engine.urls '[]' --engine.kind sglang --engine.python "$sglang" \
  --engine.arguments '["--context-length", "16384"]' --agent.workers 2 \
  --env.options.path "$data/train.jsonl" --env.options.eval_path "$data/test.jsonl" \
  --env.options.judge.url "${helper_urls[0]}" \
  --agent.options.urls "$(as_list "${rag_urls[@]}")" --agent.options.api_key_env TIDEGATE_RAG_KEY \
  --agent.options.refine.urls "$(as_list "${helper_urls[@]}")" "$@"
