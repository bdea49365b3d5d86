# SPDX-License-Identifier: Apache-2.0
"""Write the models that `tests.gpu.prove` verifies: `python3 -m tests.gpu.models FOLDER`."""

import argparse
from pathlib import Path

import transformers
from transformers import AutoConfig

from megarl.bench.shapes import SHAPES
from megarl.verify.inputs.tiny_model import write_random

# For the matrix, which shrinks them: only a config.json.
FAMILIES = {
    "qwen3": transformers.Qwen3Config(num_key_value_heads=8),
    "qwen2_moe": transformers.Qwen2MoeConfig(num_key_value_heads=8),
    "qwen3_moe": transformers.Qwen3MoeConfig(),
    "llama": transformers.LlamaConfig(num_key_value_heads=8),
    "mixtral": transformers.MixtralConfig(),
    # transformers' default of None makes no model.
    "deepseek_v2": transformers.DeepseekV2Config(num_experts_per_tok=6),
    "deepseek_v3": transformers.DeepseekV3Config(),
}
# Qwen3-30B-A3B's layers at half its widths, with few layers and experts, so that a float64 reference fits beside it.
SMALL_MOE = transformers.Qwen3MoeConfig(
    vocab_size=32003,
    hidden_size=1024,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=3072,
    moe_intermediate_size=384,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    max_position_embeddings=4096,
)


def main(folder: str) -> None:
    """Write each family's config, and the two models with weights."""
    root = Path(folder)
    for name, config in FAMILIES.items():
        config.save_pretrained(root / name)
    dense = AutoConfig.for_model(**SHAPES["qwen3-0.6b"].config())
    for name, config in {"qwen3-0.6b": dense, "small-moe": SMALL_MOE}.items():
        print(write_random(config, root / name, dtype="bfloat16"), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER")
    main(parser.parse_args().folder)
