# shellcheck shell=bash
# Source this: installs what is missing (scripts/install.sh), puts .venv first on PATH and keeps everything offline.
#
#   source scripts/env.sh

MEGARL_ROOT=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MEGARL_ROOT
bash "$MEGARL_ROOT/scripts/install.sh" || return 1

export VIRTUAL_ENV=$MEGARL_ROOT/.venv
export PATH=$VIRTUAL_ENV/bin:$PATH
unset PYTHONHOME

# No telemetry, no model hub.
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_OFFLINE=1
