#!/usr/bin/env bash
# launch.sh DATA INDEX [settings]: DATA is the output of prepare.py, INDEX the index that `tidegate rag build` made
# of its corpus. Further settings may follow, including --dry-run.
#   SGLANG          the Python interpreter of an environment with SGLang (default: python)
#   MODEL           the policy, a Hugging Face directory (default: models/Qwen3-0.6B)
#   HELPER          the model that condenses results and judges answers (default: models/Qwen3-4B)
#   HELPER_REASONING   SGLang's reasoning parser for it (default: qwen3)
#   ENGINE_GPU, HELPER_GPU, TRAINER_GPU   the GPU of each process (default: 0, 1, 2)
#   RAG_URLS, ENGINE_URLS, HELPER_URLS    addresses of running servers, on this machine or others
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
needs 2 "DATA INDEX [settings]" "$@"
data=$(given "$1") index=$(given "$2")
shift 2
source examples/services.sh
model=${MODEL:-models/Qwen3-0.6B} helper=${HELPER:-models/Qwen3-4B}
read -ra rag_urls <<<"${RAG_URLS:-http://127.0.0.1:8100}"
read -ra engine_urls <<<"${ENGINE_URLS:-http://127.0.0.1:30000}"
read -ra helper_urls <<<"${HELPER_URLS:-http://127.0.0.1:30001/v1}"

# sglang NAME GPU PORT MODEL [options]: starts one SGLang server.
sglang() {
  CUDA_VISIBLE_DEVICES=$2 start "$1" "http://127.0.0.1:$3/health" \
    "${SGLANG:-python}" -m sglang.launch_server --model-path "$4" --served-model-name helper --port "$3" \
    --context-length 16384 "${@:5}"
}

if ! is_dry "$@"; then
  [ -n "${RAG_URLS:-}" ] ||
    start rag http://127.0.0.1:8100/ready tidegate rag serve "$index" --port 8100 --threads 8
  [ -n "${HELPER_URLS:-}" ] || sglang helper "${HELPER_GPU:-1}" 30001 "$helper" --reasoning-parser "${HELPER_REASONING:-qwen3}"
  [ -n "${ENGINE_URLS:-}" ] || sglang engine "${ENGINE_GPU:-0}" 30000 "$model"
fi
CUDA_VISIBLE_DEVICES=${TRAINER_GPU:-2} tidegate train examples/deepresearch/config.toml \
  --model.path "$model" --engine.urls "$(as_list "${engine_urls[@]}")" \
  --env.options.path "$data/train.jsonl" --env.options.eval_path "$data/test.jsonl" \
  --env.options.judge.url "${helper_urls[0]}" \
  --agent.options.urls "$(as_list "${rag_urls[@]}")" \
  --agent.options.refine.urls "$(as_list "${helper_urls[@]}")" "$@"
