# SPDX-License-Identifier: Apache-2.0
"""Compare the frequencies of rotary embeddings with transformers' own."""

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.bitwise.frequencies import inverse_frequencies, llama3_frequencies
from megarl.bitwise.kernels.attention import TILE
from megarl.sampler.engine.arguments import PAGE


def test_plain_frequencies_are_transformers() -> None:
    exact = 1.0 / (1e6 ** (torch.arange(0, 128, 2).double() / 128))
    assert torch.equal(inverse_frequencies(1e6, 128), exact.float())


def test_llama3s_frequencies_are_transformers() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = llama3_frequencies(5e5, 128, factor=8.0, low=1.0, high=4.0, original=8192)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0.0)


def test_a_page_holds_whole_tiles() -> None:
    assert PAGE % TILE == 0
