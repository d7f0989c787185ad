# Sourced by launch scripts: they run at the repository's root, with its own `tidegate` first on the path.

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

# needs COUNT USAGE WORDS...: ends the script with its usage where fewer words were given.
needs() {
  local count=$1 usage=$2
  shift 2
  if [ $# -lt "$count" ]; then
    echo "usage: launch.sh $usage" >&2
    exit 2
  fi
}

# given PATH: what the caller meant by it, where the caller stood.
given() {
  (cd "$called_from" && realpath -m "$1")
}
