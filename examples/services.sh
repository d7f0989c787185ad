# shellcheck shell=bash
# Sourced by launch scripts: starts servers that run until the script ends.

services=()
stop_services() {
  if [ ${#services[@]} -gt 0 ]; then
    kill "${services[@]}" 2>/dev/null || true
    wait "${services[@]}" 2>/dev/null || true
  fi
}
trap stop_services EXIT

# launch NAME COMMAND...: starts a server with its log in runs/logs.
launch() {
  local name=$1
  shift
  mkdir -p runs/logs
  "$@" >"runs/logs/$name.log" 2>&1 &
  services+=($!)
  echo "$name: starting (log: runs/logs/$name.log)"
}

# until_ready NAME PROCESS READY_URL: returns when READY_URL responds; exits if the process has ended.
until_ready() {
  until python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$3" 2>/dev/null; do
    if ! kill -0 "$2" 2>/dev/null; then
      echo "$1 did not start; the end of its log:" >&2
      tail -5 "runs/logs/$1.log" >&2
      exit 3
    fi
    sleep 1
  done
}

# start NAME READY_URL COMMAND...: starts a server, and returns when READY_URL responds.
start() {
  launch "$1" "${@:3}"
  until_ready "$1" "${services[-1]}" "$2"
}

# as_list URL...: formats a list of strings as a setting.
as_list() {
  printf '["%s"' "$1"
  printf ', "%s"' "${@:2}" | sed 's/^, ""$//'
  printf ']'
}

# is_dry WORDS...: whether --dry-run is among them.
is_dry() {
  local word
  for word in "$@"; do
    if [ "$word" = --dry-run ]; then return 0; fi
  done
  return 1
}

# this_node: an address at which other machines can reach this one.
this_node() {
  hostname -I | cut -d ' ' -f 1
}

# new_key: a new random key.
new_key() {
  python -c 'import secrets; print(secrets.token_urlsafe(24))'
}
