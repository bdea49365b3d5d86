# SPDX-License-Identifier: Apache-2.0
"""Names in PEFT's weights file."""

# Before every module name, and after the name of a base weight.
PREFIX = "base_model.model."
BASE_WEIGHT = ".base_layer.weight"
# Last components of the vocabulary's modules. PEFT names the matrices of an embedding in another way.
EMBEDDING, OUTPUT = "embed_tokens", "lm_head"
# Parameters of a layer's stacked experts in transformers 5.
GATE_UP, DOWN = "gate_up_proj", "down_proj"


def matrix_name(module: str, side: str) -> str:
    """Name a module's matrix.

    Args:
        module: full Hugging Face name.
        side: ``"A"`` or ``"B"``.
    """
    if module.rpartition(".")[2] == EMBEDDING:
        return f"{PREFIX}{module}.lora_embedding_{side}"
    return f"{PREFIX}{module}.lora_{side}.weight"
