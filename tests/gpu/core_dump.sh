#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Find the kernel with which a run's GPU process dies, on a CUDA host that has cuda-gdb: `megarl bench loop` side by
# side, with core dumps of the GPUs. Prints what was lost, the engine's errors, and for each dump the kernel. A short run
# comes first: the engine that died had found what vLLM compiled in an earlier run.
#
#   bash tests/gpu/core_dump.sh OUT SHAPE [key=value ...]      OUT: folder for logs
# An engine of two ranks beside two trainers:
#   bash tests/gpu/core_dump.sh OUT qwen3-0.6b parallel.data=2 sampler.parallel.tensor=2 steps=15
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
out=$1
shift
dumps=$(mktemp -d)
mkdir -p "$out"
python3 -m megarl.cli.main bench loop "$@" 'ways=[turns]' steps=1 --out "$out" >"$out/first.log" 2>&1
tail -n 6 "$out/first.log" | cut -c1-200
# Without memory, which would be as large as the GPU's.
export CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_FILE="$dumps/%p.core"
export CUDA_COREDUMP_GENERATION_FLAGS="skip_global_memory,skip_shared_memory,skip_local_memory"
status=0

python3 -m megarl.cli.main bench loop "$@" 'ways=[side]' --out "$out" >"$out/bench.log" 2>&1 || status=1
tail -n 12 "$out/bench.log"
grep -E "is lost|^step" "$out/loop-side.log" | cut -c1-240
find "$out" -name "sampler-*.log" -exec grep -h -m 3 -A 25 -E "CUDA error" {} \; | cut -c1-200 | head -n 90
for dump in "$dumps"/*.core; do
  [ -f "$dump" ] || continue
  # shellcheck disable=SC2016  # the debugger's own variable
  timeout 90 cuda-gdb -batch -ex "target cudacore $dump" -ex "info cuda kernels" -ex "bt" -ex 'x/8i $pc-64' 2>&1 |
    grep -v -i "^warning" | head -n 60
done
exit "$status"
