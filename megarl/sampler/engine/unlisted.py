# SPDX-License-Identifier: Apache-2.0
"""List what vLLM computes differently in architectures that only ``model.backend=transformers`` trains.

An architecture that is not listed is left to vLLM. Before the first step the canary compares the two on one sequence,
so a run does not begin if they disagree.
"""

from megarl.families.base import SamplerSupport

DIFFERENCES = {
    # vLLM's sliding layers see one token more than those of transformers (vllm/model_executor/models/commandr.py).
    "cohere2": SamplerSupport(window=lambda raw: raw.get("sliding_window")),
    # vLLM holds adapters of these experts in buffers of another layout, which the weight path does not fill. Its own
    # loader writes experts and sinks past the reload's count.
    "gpt_oss": SamplerSupport(adapted=("q_proj", "k_proj", "v_proj", "o_proj"), reads_base=True),
}


def support_of(model_type: str) -> SamplerSupport:
    """Return the cases in which vLLM samples as transformers computes."""
    return DIFFERENCES.get(model_type, SamplerSupport())
