#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that a CPU cannot show, in one call on a CUDA host: the tests of tests/gpu, then the arithmetic recipe
# unchanged, with CUDA vLLM. Prints the run's table and summary last.
#
#   bash tests/gpu/check.sh OUT [key=value ...]      OUT: folder for logs and the run
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
out=$1
shift
status=0

python3 -m pytest tests/gpu -s -p no:cacheprovider >"$out/pytest.log" 2>&1 || status=1
grep -E "comparisons|error|passed|failed|skipped|^E  " "$out/pytest.log" | grep -v -i warn | tail -n 25

model=$(python3 -m megarl.cli.prepare 2>"$out/prepare.log" | tail -n 1)
start=$(date +%s)
python3 -m megarl.cli.main train examples/arithmetic/run.yaml "model.path=$model" "train.output=$out/runs" "$@" \
  >"$out/train.log" 2>&1 || status=1
grep -vE "^ |^[a-z_]+:$" "$out/train.log" | tail -n 45
run=$(tail -n 1 "$out/train.log")
for file in metrics.jsonl summary.json plot.png; do
  cp "$run/$file" "$out/" 2>/dev/null
done
printf 'recipe: %s s, status %s\n' "$(($(date +%s) - start))" "$status"
exit "$status"
