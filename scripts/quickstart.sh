#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains an adapter from a fresh clone: installs, prepares SmolLM2-135M-Instruct, trains it on arithmetic. The last line
# printed is the run folder.
#
#   bash scripts/quickstart.sh [key=value ...]      overrides of examples/arithmetic/run.yaml, such as train.steps=5
set -euo pipefail

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# A CPU without instructions for bfloat16 trains in it some 15 times slower than in float32.
dtype=()
if ! command -v nvidia-smi >/dev/null && ! grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo; then
  echo "this CPU has no instructions for bfloat16, so model.dtype is float32"
  dtype=(model.dtype=float32)
fi

# Later values win, so the user's model.path replaces this one.
model=$("$MEGARL_INTERPRETER" -m megarl.cli.prepare | tail -n 1)
exec "$MEGARL_INTERPRETER" -m megarl.cli.main train "$MEGARL_ROOT/examples/arithmetic/run.yaml" "model.path=$model" "${dtype[@]}" "$@"
