#!/usr/bin/env bash
# Transformer Engine, the Triton kernels and the speed of a training step, in one call on a CUDA host. Every stage prints
# its result at once, keeps its whole output in OUT, has a time limit, and does not stop the next one.
#
#   bash tests/gpu/te_check.sh OUT [STAGE ...]      stages: smoke kernels parity small large; default: all, in this order
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
out=$1
shift
mkdir -p "$out"
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(smoke kernels parity small large)
status=0

run() { # name, limit in seconds, pattern of the lines to show, command ...
  local name=$1 limit=$2 pattern=$3 start=$SECONDS code=0
  shift 3
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
  grep -E "$pattern" "$out/$name.log" | tail -n 40 | cut -c 1-400
  printf '%s: status %s after %s s\n\n' "$name" "$code" "$((SECONDS - start))"
  if [ "$code" -ne 0 ]; then
    status=1
    tail -n 15 "$out/$name.log" | cut -c 1-300
  fi
}

for stage in "${stages[@]}"; do
  case $stage in
    smoke) run smoke 90 '^(te|torch|attention|smoke)' python3 -m tests.gpu.te_smoke ;;
    kernels) run kernels 90 'passed|failed|skipped|^E  ' python3 -m pytest tests/gpu/test_logprobs.py -q -p no:cacheprovider ;;
    parity)
      run parity 200 'places|worst|passed|failed|skipped|^E  ' \
        python3 -m pytest tests/gpu/test_parity_cuda.py -k TE -s -q -p no:cacheprovider
      ;;
    small)
      run small 220 '.' python3 -m megarl.cli.main bench train qwen3-0.6b --profile --out "$out/small"
      ;;
    large)
      run large 220 '.' python3 -m megarl.cli.main bench train qwen3-8b steps=3 'contenders=[te,full,peft]' --profile \
        --out "$out/large"
      ;;
    *)
      printf 'unknown stage %s (known: smoke kernels parity small large)\n' "$stage"
      status=2
      ;;
  esac
done
exit "$status"
