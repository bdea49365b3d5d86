# SPDX-License-Identifier: Apache-2.0
"""Let vLLM keep parameters on a CPU as the checkpoint has them, and megarl write into them or borrow, as on GPUs."""

import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from megarl.checkpoint_engine.receiver.writers.jobs import Begun, Write
from megarl.checkpoint_engine.wire import Places

# Environment variable that asks for it; engine processes inherit it.
PLAIN = "MEGARL_TEST_PLAIN_LAYOUT"
# Triton's own, which decides when a process imports it: the kernels of GPUs then write and compare here too.
INTERPRET = "TRITON_INTERPRET"


def keep_plain_if_asked() -> None:
    """Change this process's vLLM. Called in every process of an engine, before it builds the model."""
    if PLAIN not in os.environ:
        return
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from megarl.checkpoint_engine.receiver import extension
    from megarl.checkpoint_engine.receiver.weights import borrowed
    from megarl.checkpoint_engine.receiver.weights.direct import takes_direct_writes

    def leave(self: Any, layer: torch.nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights went through vLLM's reload")

    UnquantizedLinearMethod.process_weights_after_loading = leave
    UnquantizedEmbeddingMethod.process_weights_after_loading = leave
    extension.takes_direct_writes = lambda model: takes_direct_writes(model, "cpu")
    extension.load_weights = refuse
    borrowed.opened = pickle.loads  # as ``sampler_shared`` exports it
    if INTERPRET in os.environ:
        _write_by_kernels()


def _write_by_kernels() -> None:
    """Give BucketWrites what it has on a GPU. Only the digests stay those of a CPU, because its senders make those."""
    from megarl.checkpoint_engine.buckets.digests import begin_digests
    from megarl.checkpoint_engine.receiver.weights import bucket_writes
    from megarl.checkpoint_engine.receiver.weights.gpu_copies import Copies
    from megarl.checkpoint_engine.receiver.writers.gpu import GpuWrites

    class Interpreted(Copies):
        def __init__(self, places: Places, writes: Sequence[Sequence[Write]]) -> None:
            super().__init__(places, writes)
            self._places = places

        def run(self, payload: torch.Tensor) -> Begun:
            return Begun(begin_digests(payload, self._places), super().run(payload).found)

    bucket_writes._copies, bucket_writes.prepare = Interpreted, GpuWrites
