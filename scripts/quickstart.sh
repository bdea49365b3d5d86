#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains an adapter from a fresh clone: installs, prepares SmolLM2-135M-Instruct, trains it on arithmetic. The last line
# printed is the run folder.
#
#   bash scripts/quickstart.sh [key=value ...]      overrides of examples/arithmetic/run.yaml, such as train.steps=5
set -euo pipefail

# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Later values win, so the user's model.path replaces this one.
model=$("$MEGARL_INTERPRETER" -m megarl.cli.prepare | tail -n 1)
exec "$MEGARL_INTERPRETER" -m megarl.cli.main train "$MEGARL_ROOT/examples/arithmetic/run.yaml" "model.path=$model" "$@"
