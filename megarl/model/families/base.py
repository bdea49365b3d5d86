"""How a model family's Hugging Face names map to mcore's, in both directions, as data.

A mapping names, for each mcore tensor, the Hugging Face tensors it holds and how they are fused and split over
tensor-parallel ranks. Loading, export, LoRA placement and adapter names all follow from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# How mcore lays the fused parts of a linear out along its output dimension:
#   single: one part.  gated: parts one after the other (gate, up).  qkv: per query group [its queries, its k, its v].
Fusion = Literal["single", "gated", "qkv"]


@dataclass(frozen=True)
class LinearMap:
    """A linear layer of a transformer layer.

    Attributes:
        mcore: module path below ``decoder.layers.N.``.
        hf: module paths below ``model.layers.N.``, in the order they are fused.
        split: ``column`` splits the output dimension over tensor-parallel ranks, ``row`` the input dimension.
        fusion: how the parts interleave along the output dimension.
    """

    mcore: str
    hf: tuple[str, ...]
    split: Literal["column", "row"]
    fusion: Fusion = "single"


@dataclass(frozen=True)
class VectorMap:
    """A replicated tensor (a norm's weight). ``mcore`` lists the names it may have: TE fuses norms into linears."""

    mcore: tuple[str, ...]
    hf: str


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_types: ``model_type`` values in config.json.
        linears: per transformer layer.
        vectors: per transformer layer.
        settings: config.json -> further ``TransformerConfig`` keyword arguments.
    """

    model_types: tuple[str, ...]
    linears: tuple[LinearMap, ...]
    vectors: tuple[VectorMap, ...]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]


# Outside the transformer layers all supported families agree.
EMBEDDING = ("embedding.word_embeddings.weight", "model.embed_tokens.weight")
OUTPUT = ("output_layer.weight", "lm_head.weight")
FINAL_NORM = VectorMap(("decoder.final_layernorm.weight", "decoder.final_norm.weight"), "model.norm.weight")
MCORE_LAYER = "decoder.layers.{}."
HF_LAYER = "model.layers.{}."
