# SPDX-License-Identifier: Apache-2.0
"""Keep vLLM from preparing embeddings and output heads for adapters, which no engine of megarl's samples with.

An engine would pay for it at every step: zeros are added to all logits. Worse, vLLM's second runner (0.26) computes a
prompt's logprobs 1,024 tokens at a time, and adds to as many rows as requests run. A shorter last part is written
beyond its end (vllm-project/vllm#53842). Added zeros change only bfloat16's NaNs there, such as the halves 0x7f89 of a
GPU's shuffle instructions, and negative zeros: an engine died of that when kernels lay behind the logits.
"""

from typing import Any

from vllm.lora.model_manager import LoRAModelManager

from megarl.checkpoint_engine.wire import listed
from megarl.errors import UnsupportedError
from megarl.peft.names import EMBEDDING, OUTPUT

# The last part of their names. vLLM adapts them in another layout than a linear.
EMBEDDINGS = (EMBEDDING, OUTPUT)


def install() -> None:
    """Make vLLM leave them as they are when it prepares a model for adapters."""
    create = LoRAModelManager._create_lora_modules

    def create_others(self: Any) -> None:
        self.supported_lora_modules = [name for name in self.supported_lora_modules if name not in EMBEDDINGS]
        create(self)
        if prepared := [name for name in self.modules if name.rpartition(".")[2] in EMBEDDINGS]:
            raise UnsupportedError(
                f"vLLM prepared {listed(prepared)} for adapters, which the sampler does not support; leave them out of "
                "sampler.engine_args.lora_target_modules"
            )

    LoRAModelManager._create_lora_modules = create_others
