# SPDX-License-Identifier: Apache-2.0
"""How a model family's Hugging Face names map to mcore's, in both directions, as data.

A mapping names, for each mcore tensor, the Hugging Face tensors it holds and how they are fused and split over
ranks. Loading, export, LoRA placement and adapter names all follow from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.peft.names import DOWN, GATE_UP

# How mcore lays the fused parts of a linear out along its output dimension:
#   single: one part.  gated: parts one after the other (gate, up).  qkv: per query group [its queries, its k, its v].
Fusion = Literal["single", "gated", "qkv"]
# column: the output dimension is split over tensor-parallel ranks; row: the input dimension; replicated: neither.
Split = Literal["column", "row", "replicated"]
# mcore's path of a router below the layer.
ROUTER = "mlp.router"
# (config.json, layer index from 0) -> whether the layer has it.
Where = Callable[[Mapping[str, Any], int], bool]


def everywhere(hf: Mapping[str, Any], layer: int) -> bool:
    """The usual ``where``: every layer of every model of the family."""
    return True


def nowhere(hf: Mapping[str, Any], layer: int) -> bool:
    """The usual ``bias``."""
    return False


@dataclass(frozen=True)
class LinearMap:
    """A linear layer of a transformer layer.

    Attributes:
        mcore: module path below ``decoder.layers.N.``; of an expert, ``{}`` stands for its index on its rank.
        hf: module paths below ``model.layers.N.``, in the order they are fused; in a template of experts, ``{}`` stands
            for the expert's index in the model.
        split: which dimension is split; an expert's over the expert-tensor-parallel ranks.
        fusion: how the parts interleave along the output dimension.
        expert: index of the expert it belongs to, or None.
        where: the layers that have it.
        bias: the layers where it has a bias.
    """

    mcore: str
    hf: tuple[str, ...]
    split: Split
    fusion: Fusion = "single"
    expert: int | None = None
    where: Where = everywhere
    bias: Where = nowhere

    @property
    def is_router(self) -> bool:
        """Whether it chooses a token's experts."""
        return self.mcore == ROUTER


@dataclass(frozen=True)
class VectorMap:
    """A replicated tensor (a norm's weight). ``mcore`` lists the names it may have: TE fuses norms into linears."""

    mcore: tuple[str, ...]
    hf: str
    where: Where = everywhere


@dataclass(frozen=True)
class MoeMap:
    """The mixture of experts that takes the place of the MLP in some layers.

    Attributes:
        linears: of the layer: the router, shared experts and their gate.
        experts: templates of one expert's linears.
        sparse: the layers that have experts.
        count_keys: config.json's names of the number of routed experts; a file has one of them.
        inner_key: its name of an expert's inner size.
        says_dense: whether a config.json, as it stands, says that some layers have an MLP instead.
        by_module: whether PEFT (0.21) takes names of experts' linears and of the router among ``target_modules``, as
            transformers 4 had them; else they are ``target_parameters`` only.
    """

    linears: tuple[LinearMap, ...]
    experts: tuple[LinearMap, ...]
    sparse: Where
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    inner_key: str = "moe_intermediate_size"
    says_dense: Callable[[Mapping[str, Any]], bool] = lambda raw: False
    by_module: bool = True

    def count_key(self, hf: Mapping[str, Any]) -> str:
        """The name that this config.json has for the number of routed experts."""
        return next((key for key in self.count_keys if hf.get(key)), self.count_keys[0])

    def count(self, hf: Mapping[str, Any]) -> int:
        """Routed experts of a layer.

        Args:
            hf: config.json, completed.
        """
        return hf[self.count_key(hf)]


def no_reason(raw: Mapping[str, Any]) -> str | None:
    """The usual ``SamplerSupport.refused``."""
    return None


def no_window(raw: Mapping[str, Any]) -> int | None:
    """The usual ``SamplerSupport.window``."""
    return None


@dataclass(frozen=True)
class SamplerSupport:
    """What vLLM has been shown to sample with the trainer's logprobs. Both functions take config.json as it stands.

    Attributes:
        refused: a setting that vLLM computes otherwise than transformers, in words; None if there is none.
        window: tokens that a token attends to, where layers have a window: no sequence may be longer.
    """

    refused: Callable[[Mapping[str, Any]], str | None] = no_reason
    window: Callable[[Mapping[str, Any]], int | None] = no_window


def no_splits(hf: Mapping[str, Any]) -> dict[str, int | None]:
    """The usual ``Family.splits``."""
    return {}


# Keys of config.json that must be whole numbers above 0, in any family; those of ``NULLABLE`` may be null where the
# family's class of transformers allows it.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "sliding_window",
    "decoder_sparse_step", "shared_expert_intermediate_size",
)  # fmt: skip
NULLABLE = {"head_dim", "q_lora_rank", "n_group", "topk_group", "sliding_window"}
# Those that may be 0 or null.
COUNTS = ("num_nextn_predict_layers", "first_k_dense_replace")

# Sizes of a tiny model (``megarl verify --matrix``). The vocabulary is odd, so that tensor parallelism pads it; two
# ranks can share the others. RoPE's original length is below that of the sequences, so that its scaling shows.
TINY = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 256,
    "original_max_position_embeddings": 8,
}  # fmt: skip


# Keys of config.json that decide what any model of the supported families computes.
READ_BY_ALL = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
})  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_types: ``model_type`` values in config.json.
        reads: keys of config.json that decide what the model computes; of any other, only the default is supported.
        attention: linears of every transformer layer.
        mlp: linears of the layers without experts.
        vectors: of every transformer layer.
        settings: config.json -> further ``PackedConfig`` keyword arguments; with ``kv_lora_rank`` among them those
            of ``MLATransformerConfig``.
        moe: None for dense families.
        window: (config.json, layer index from 0) -> how many tokens a token attends to, itself included; None for all.
        splits: config.json, complete or not -> further sizes that tensor ranks split, by their names in messages.
        sampler: what vLLM may do with it; None if it is not sampled from.
        tiny: sizes of a tiny model.
    """

    model_types: tuple[str, ...]
    reads: frozenset[str]
    attention: tuple[LinearMap, ...]
    mlp: tuple[LinearMap, ...]
    vectors: tuple[VectorMap, ...]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    moe: MoeMap | None = None
    window: Callable[[Mapping[str, Any], int], int | None] = lambda hf, layer: None
    splits: Callable[[Mapping[str, Any]], dict[str, int | None]] = no_splits
    sampler: SamplerSupport | None = None
    tiny: Mapping[str, int] = field(default_factory=lambda: TINY)


# Outside the transformer layers all supported families agree.
EMBEDDING = ("embedding.word_embeddings.weight", "model.embed_tokens.weight")
OUTPUT = ("output_layer.weight", "lm_head.weight")
FINAL_NORM = VectorMap(("decoder.final_layernorm.weight", "decoder.final_norm.weight"), "model.norm.weight")
MCORE_LAYER = "decoder.layers.{}."
HF_LAYER = "model.layers.{}."
# transformers 5's names below a layer: of the router, and of the parameters that stack the linears of all experts, one
# for each template of ``MoeMap.experts``. Files of weights keep the names of ``MoeMap``.
STACKED_ROUTER = "mlp.gate"
STACKED_EXPERTS = (f"mlp.experts.{GATE_UP}", f"mlp.experts.{DOWN}")
