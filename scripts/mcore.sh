#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks a release of megatron-core beside the installed one, and prints its folder, to be put first on PYTHONPATH:
#
#   PYTHONPATH=$(bash scripts/mcore.sh) megarl verify MODEL --matrix           the newest, of requirements/mcore-newest.txt
#   PYTHONPATH=$(bash scripts/mcore.sh 0.18.2) megarl verify MODEL --matrix    another one
#
# Newer wheels require Python 3.12. The modules that megarl imports from them are plain Python and run on 3.11 too. Only
# modules for data sets are compiled.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

release=${1:-$(sed -n 's/^megatron-core==//p' requirements/mcore-newest.txt)}
folder=$PWD/.mcore/$release
python=${MEGARL_PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3

unpack() {
  local temporary
  temporary=$(mktemp -d .mcore/unfinished.XXXXXX)
  # shellcheck disable=SC2064
  trap "rm -rf '$temporary'" EXIT
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --dest "$temporary" "megatron-core==$release"
  "$python" -m zipfile -e "$temporary"/megatron_core-*.whl "$temporary/unpacked"
  # Compile now: where PYTHONDONTWRITEBYTECODE is set, imports do not keep what they compile.
  "$python" -m compileall -q -j 2 "$temporary/unpacked/megatron/core"
  mv "$temporary/unpacked" "$folder"
}

if [ ! -d "$folder" ]; then
  mkdir -p .mcore
  exec 9>.mcore/lock
  flock 9
  [ -d "$folder" ] || unpack >&2
fi
echo "$folder"
