#!/usr/bin/env bash
# launch-cluster.sh DATA [settings]: Qwen3-4B on eight GPUs of a Ray cluster. DATA is a directory with GSM8K's
# train.jsonl and test.jsonl on a shared disk, or its id on the hub. Further settings may follow, including --dry-run.
#   CLUSTER   auto (this machine is a node of the cluster, the default), or ray://HOST:10001
#   SGLANG    the Python interpreter of an environment with SGLang, at the same path on all nodes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
needs 1 "DATA [settings]" "$@"
data=$1
if [ -d "$(given "$data")" ]; then data=$(given "$data"); fi
shift
exec tidegate train examples/gsm8k/config-qwen3-4b-cluster.toml --cluster "${CLUSTER:-auto}" \
  --engine.python "${SGLANG:-/opt/sglang/bin/python}" --env.options.path "$data" "$@"
