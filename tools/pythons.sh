#!/usr/bin/env bash
# Lists the other Pythons from 3.12 on that work on this machine, one "version path" for each minor version.
# The argument is the interpreter that is left out, because `make test` has run on it: python3 unless given.
set -euo pipefail
shopt -s nullglob

probe='import ensurepip, sqlite3, ssl, sys, venv; print(*sys.version_info[:2], sep="."); print(sys.version.split()[0], sys.executable)'
declare -A seen
used=$("${1:-python3}" -c "$probe" | head -n 1)
seen[$used]=1

# A shim of a version manager is on the PATH and fails unless its version is chosen: what does not run is passed over.
for candidate in python3.{12..19} ~/.pyenv/versions/3.*/bin/python3 ~/.local/share/uv/python/*/bin/python3 \
    ~/.local/share/mise/installs/python/3.*/bin/python3 ~/.asdf/installs/python/3.*/bin/python3 /opt/python*/bin/python3; do
  answer=$("$candidate" -c "$probe" 2>/dev/null) || continue
  minor=${answer%%$'\n'*}
  if [[ ${minor#3.} -ge 12 && -z ${seen[$minor]:-} ]]; then
    seen[$minor]=1
    echo "${answer#*$'\n'}"
  fi
done
