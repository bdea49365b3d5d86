#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Find the kernel with which a run's GPU process dies, on a CUDA host that has cuda-gdb: `megarl bench loop` side by
# side, with core dumps of the GPUs. Prints what was lost, the engine's errors, and for each dump the kernel. A short run
# comes first: the engines that died had found what vLLM compiled in an earlier run.
#
#   bash tests/gpu/core_dump.sh OUT SHAPE [key=value ...]      OUT: folder for logs
# An engine of two ranks beside two trainers:
#   bash tests/gpu/core_dump.sh OUT qwen3-0.6b parallel.data=2 sampler.parallel.tensor=2 steps=30
# The run ends when an engine is lost, and after LIMIT seconds (300) at the latest. The short run takes 170 s, on a host
# that has read no file yet 300.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
out=$1
shift
limit=${LIMIT:-300}
dumps=$(mktemp -d)
mkdir -p "$out"
bench=(python3 -m megarl.cli.main bench loop "$@" --out "$out")
# Seconds that a dump takes to be written, once the engine is lost.
writing=30

"${bench[@]}" 'ways=[turns]' steps=1 >"$out/first.log" 2>&1
tail -n 6 "$out/first.log" | cut -c1-200
# Without memory, which would be as large as the GPU's.
export CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_FILE="$dumps/%p.core" CUDA_COREDUMP_SHOW_PROGRESS=1
export CUDA_COREDUMP_GENERATION_FLAGS="skip_global_memory,skip_shared_memory,skip_local_memory"
"${bench[@]}" 'ways=[side]' >"$out/bench.log" 2>&1 &
run=$!
began=$SECONDS
while kill -0 "$run" 2>/dev/null && [ $((SECONDS - began)) -lt "$limit" ]; do
  sleep 2
  if grep -q "is lost" "$out/loop-side.log" 2>/dev/null; then
    sleep "$writing"
    break
  fi
done
find "$out" -path "*/side/*" -name "sampler-*.log" -exec cp {} "$out" \;
kill "$run" 2>/dev/null
grep -E "is lost|^step" "$out/loop-side.log" | cut -c1-300 | tail -n 3
tail -n 3 "$out/bench.log" | cut -c1-200
grep -h -m 3 -A 25 -E "CUDA error|coredump" "$out"/sampler-*.log | cut -c1-200 | head -n 60
for dump in "$dumps"/*.core; do
  [ -f "$dump" ] || continue
  # shellcheck disable=SC2016  # the debugger's own variables
  timeout 60 cuda-gdb -batch -ex "target cudacore $dump" -ex "info cuda kernels" -ex "bt" -ex 'x/8i $errorpc-64' \
    -ex "info cuda warps" -ex "info registers" >"$out/$(basename "$dump").txt" 2>&1
  grep -v -i "^warning" "$out/$(basename "$dump").txt" | head -n 40
done
wait
