# SPDX-License-Identifier: Apache-2.0
"""Let an engine with LoRA capture its CUDA graphs only for batches with LoRA, which is half of them.

vLLM (0.26's second runner) captures each size twice, so that a batch without LoRA skips its kernels. An engine of a run
has no such batch but those of its own warm-up. One that comes nevertheless takes the graphs with LoRA: no adapter is
active in it, and its kernels then return at once.
"""

from typing import Any


def install() -> None:
    """Replace two functions of the runner. A release without them captures as it always does."""
    try:
        from vllm.v1.worker.gpu import cudagraph_utils, model_runner

        cases, manager = model_runner.get_lora_capture_cases, cudagraph_utils.CudaGraphManager
        resolve = manager._resolve_effective_loras
    except (ImportError, AttributeError):
        return

    def with_lora(*arguments: Any, **named: Any) -> list[int]:
        found = cases(*arguments, **named)
        return [case for case in found if case] or found

    def effective(self: Any, active: int) -> int:
        largest: int = self._max_lora_case
        return resolve(self, active) if active or 0 in self.lora_capture_cases else largest

    model_runner.get_lora_capture_cases = with_lora
    manager._resolve_effective_loras = effective
