#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, and runs every check: format, lint, types, shell scripts, tests. Fails if any check fails. Two test files
# run at a time, because many tests wait for processes to start; `-n 0` runs them one after the other.
#
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail

export MEGARL_DEV=1
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$MEGARL_ROOT"

# The ranks of a test share the cores with each other and with another test, so more threads would only wait.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Hundreds of processes import megarl; none of them should compile it again.
unset PYTHONDONTWRITEBYTECODE
# A rank that crashes prints its stack.
export PYTHONFAULTHANDLER=1

failed=()
# Continue after a failure, so that one run shows all failures.
check() {
  printf '\n== %s\n' "$*"
  "$@" || failed+=("$*")
}

check ruff check .
check ruff format --check .
check python -m mypy megarl
check shellcheck --external-sources scripts/*.sh scripts/slurm.sbatch .ci/run
# By name, the files that take long come first. By number of tests, xdist's default, some of them would come last.
check python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed:\n'
  printf '  %s\n' "${failed[@]}"
  exit 1
fi
