# SPDX-License-Identifier: Apache-2.0
"""Let vLLM keep parameters on a CPU as the checkpoint has them, and megarl write into them or borrow, as on GPUs."""

import os
import pickle
from typing import Any

import torch

# Environment variable that asks for it; engine processes inherit it.
PLAIN = "MEGARL_TEST_PLAIN_LAYOUT"


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
