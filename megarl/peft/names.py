# SPDX-License-Identifier: Apache-2.0
"""Name the tensors of PEFT's weights file."""

# Prefix of every module name, and suffix of a base weight's name.
PREFIX = "base_model.model."
BASE_WEIGHT = ".base_layer.weight"
# Last components of the vocabulary's modules. PEFT names the matrices of an embedding differently.
EMBEDDING, OUTPUT = "embed_tokens", "lm_head"


def matrix_name(module: str, side: str) -> str:
    """Return the name of a module's A or B in PEFT's weights file.

    Args:
        module: full Hugging Face name.
        side: ``"A"`` or ``"B"``.
    """
    if module.rpartition(".")[2] == EMBEDDING:
        return f"{PREFIX}{module}.lora_embedding_{side}"
    return f"{PREFIX}{module}.lora_{side}.weight"
