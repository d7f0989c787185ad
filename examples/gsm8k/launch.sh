#!/usr/bin/env bash
# launch.sh tiny|qwen3-0.6b DATA [settings]: DATA is a directory with GSM8K's train.jsonl and test.jsonl,
# or its id on the hub. More settings may follow, --dry-run too.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: launch.sh tiny|qwen3-0.6b DATA [settings]" >&2
  exit 2
fi
model=$1 data=$2
shift 2
if [ -d "$data" ]; then data=$(realpath "$data"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"
exec tidegate train "examples/gsm8k/config-$model.toml" --env.options.path "$data" "$@"
