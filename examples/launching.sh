# shellcheck shell=bash
# Sourced by launch scripts: changes to the repository's root and puts its own `tidegate` first on the path.

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export PATH="$PWD/.venv/bin:$PATH"

# needs COUNT USAGE WORDS...: exits with the usage message if there are fewer than COUNT words.
needs() {
  local count=$1 usage=$2
  shift 2
  if [ $# -lt "$count" ]; then
    echo "usage: launch.sh $usage" >&2
    exit 2
  fi
}

# given PATH: resolves a path relative to the caller's directory.
given() {
  (cd "$called_from" && realpath -m "$1")
}
