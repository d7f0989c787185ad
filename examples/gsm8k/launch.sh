#!/usr/bin/env bash
# launch.sh tiny|qwen3-0.6b DATA [settings]: DATA is a directory with GSM8K's train.jsonl and test.jsonl,
# or its id on the hub. Further settings may follow, including --dry-run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launching.sh"
needs 2 "tiny|qwen3-0.6b DATA [settings]" "$@"
model=$1 data=$2
if [ -d "$(given "$data")" ]; then data=$(given "$data"); fi
shift 2
exec tidegate train "examples/gsm8k/config-$model.toml" --env.options.path "$data" "$@"
