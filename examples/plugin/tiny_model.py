# SPDX-License-Identifier: Apache-2.0
"""Write a random Llama of 4 layers, 4 heads and 132 tokens as a Hugging Face folder: python tiny_model.py FOLDER."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write(folder: Path) -> Path:
    """Write the model that ``tiny_model.args`` describes to Megatron."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=132,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    write(Path(sys.argv[1]))
