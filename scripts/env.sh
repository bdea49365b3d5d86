# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Prepares the environment of a shell; source it. Installs missing packages (scripts/install.sh), puts .venv first on
# PATH, and keeps everything offline.
#
#   source scripts/env.sh
#
#   MEGARL_PYTHON=/path/to/python   an interpreter (of a container, say) with all packages; nothing is installed

MEGARL_ROOT=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MEGARL_ROOT
if [ -z "${MEGARL_PYTHON:-}" ]; then
  bash "$MEGARL_ROOT/scripts/install.sh" || return 1
  export VIRTUAL_ENV=$MEGARL_ROOT/.venv
elif ! "$MEGARL_PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' \
  ray torch vllm peft megatron.core; then
  printf "megarl: MEGARL_PYTHON is '%s', which does not run or lacks ray, torch, vllm, peft or megatron.core\n" \
    "$MEGARL_PYTHON" >&2
  return 1
fi
MEGARL_INTERPRETER=${MEGARL_PYTHON:-$VIRTUAL_ENV/bin/python}
PATH=$(dirname "$MEGARL_INTERPRETER"):$PATH
export PATH
unset PYTHONHOME
# Import megarl from this checkout, whatever its path on this host.
export PYTHONPATH=$MEGARL_ROOT${PYTHONPATH:+:$PYTHONPATH}
megarl() { "$MEGARL_INTERPRETER" -m megarl.cli.main "$@"; }

# No telemetry, no model hub.
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_OFFLINE=1
