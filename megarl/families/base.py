# SPDX-License-Identifier: Apache-2.0
"""Define the data types that map a family's Hugging Face names to mcore's, in both directions.

For each mcore tensor a mapping names the Hugging Face tensors that it holds, and how they are fused and split over
ranks. Loading, export, placing LoRA and naming adapters all follow from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Order of a linear's fused parts along its output dimension in mcore:
#     single: one part.  gated: gate, then up.  qkv: for each query group [its queries, its k, its v].
Fusion = Literal["single", "gated", "qkv"]
# Dimension that is split over tensor-parallel ranks. column: the output; row: the input; replicated: none.
Split = Literal["column", "row", "replicated"]
# mcore's path of a router, below the layer.
ROUTER = "mlp.router"
# A test of a layer: (config.json, layer index from 0) -> bool.
LayerTest = Callable[[Mapping[str, Any], int], bool]


def everywhere(hf: Mapping[str, Any], layer: int) -> bool:
    """True for every layer of every model of the family; default of ``in_layer``."""
    return True


def nowhere(hf: Mapping[str, Any], layer: int) -> bool:
    """False for every layer; default of ``bias``."""
    return False


@dataclass(frozen=True)
class LinearMap:
    """One linear of a transformer layer.

    Attributes:
        mcore: module path below ``decoder.layers.N.``. In an expert's path ``{}`` stands for the expert's index on its
            rank.
        hf: module paths below ``model.layers.N.``, in the order in which they are fused. In a template of experts
            ``{}`` stands for the expert's index in the model.
        split: the dimension that is split; an expert's over the expert-tensor-parallel ranks.
        fusion: how the parts lie along the output dimension.
        expert: index of the expert that the linear belongs to, or None.
        in_layer: tests whether a layer has the linear.
        bias: tests whether the linear has a bias in a layer.
    """

    mcore: str
    hf: tuple[str, ...]
    split: Split
    fusion: Fusion = "single"
    expert: int | None = None
    in_layer: LayerTest = everywhere
    bias: LayerTest = nowhere

    @property
    def is_router(self) -> bool:
        """True if the linear chooses a token's experts."""
        return self.mcore == ROUTER


@dataclass(frozen=True)
class VectorMap:
    """A replicated tensor, such as a norm's weight. ``mcore`` lists its possible names: TE fuses norms into linears."""

    mcore: tuple[str, ...]
    hf: str
    in_layer: LayerTest = everywhere


@dataclass(frozen=True)
class MoeMap:
    """The mixture of experts that replaces the MLP in some layers.

    Attributes:
        linears: linears of the layer besides the experts: the router, shared experts and their gate.
        experts: templates of the linears of one expert.
        sparse: tests whether a layer has experts.
        count_keys: keys of config.json for the number of routed experts; a file has one of them.
        inner_key: key of config.json for the inner size of an expert.
        says_dense: tests whether a config.json, not completed, gives some layers an MLP instead.
        by_module: True if PEFT (0.21) accepts the names of experts' linears and of the router, as in transformers 4, in
            ``target_modules``. Else they can be named in ``target_parameters`` only.
    """

    linears: tuple[LinearMap, ...]
    experts: tuple[LinearMap, ...]
    sparse: LayerTest
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    inner_key: str = "moe_intermediate_size"
    says_dense: Callable[[Mapping[str, Any]], bool] = lambda raw: False
    by_module: bool = True

    def count_key(self, hf: Mapping[str, Any]) -> str:
        """Return the key by which this config.json gives the number of routed experts."""
        return next((key for key in self.count_keys if hf.get(key)), self.count_keys[0])

    def count(self, hf: Mapping[str, Any]) -> int:
        """Return the number of routed experts of a layer.

        Args:
            hf: config.json, completed.
        """
        return hf[self.count_key(hf)]


def refuse_nothing(raw: Mapping[str, Any]) -> str | None:
    """Refuse nothing; default of ``SamplerSupport.refused``."""
    return None


def no_window(raw: Mapping[str, Any]) -> int | None:
    """Return no window; default of ``SamplerSupport.window``."""
    return None


@dataclass(frozen=True)
class SamplerSupport:
    """The cases in which vLLM is known to sample with the trainer's logprobs. Both functions take config.json as it is.

    Attributes:
        refused: describes a setting that vLLM computes differently from transformers; None if there is none.
        window: window of attention in tokens; no sequence may be longer. None without a window.
        adapted: names of the linears that vLLM takes adapters of; empty if it takes all that it knows.
        reads_base: True if vLLM fills all of its tensors only when it reads the model's files.
    """

    refused: Callable[[Mapping[str, Any]], str | None] = refuse_nothing
    window: Callable[[Mapping[str, Any]], int | None] = no_window
    adapted: tuple[str, ...] = ()
    reads_base: bool = False


def no_splits(hf: Mapping[str, Any]) -> dict[str, int | None]:
    """Return no further sizes; default of ``Family.splits``."""
    return {}


# Keys of config.json that must be whole numbers above 0 in any family. Those in NULLABLE may be null where the family's
# class in transformers allows it.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group",
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "sliding_window",
    "decoder_sparse_step", "shared_expert_intermediate_size",
)  # fmt: skip
NULLABLE = {"head_dim", "q_lora_rank", "n_group", "topk_group", "sliding_window"}
# Keys that may also be 0 or null.
COUNTS = ("num_nextn_predict_layers", "first_k_dense_replace")

# Sizes of a tiny model (``megarl verify --matrix``). The vocabulary is odd, so tensor parallelism pads it; two ranks
# can split the other sizes. RoPE's original length is shorter than the sequences, so its scaling has an effect.
TINY = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 256,
    "original_max_position_embeddings": 8,
}  # fmt: skip


# Keys of config.json that decide what a model of any supported family computes.
READ_BY_ALL = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
})  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_types: the ``model_type`` values of its config.json.
        reads: keys of config.json that decide what the model computes. Any other key must have its default value.
        attention: linears of every transformer layer.
        mlp: linears of the layers without experts.
        vectors: replicated tensors of every transformer layer.
        settings: maps config.json to further ``PackedConfig`` keyword arguments. If they include ``kv_lora_rank``, they
            are those of ``MLATransformerConfig``.
        moe: the mixture of experts; None for dense families.
        window: maps (config.json, layer index from 0) to the number of tokens a token attends to, itself included; None
            for all.
        splits: maps config.json, complete or not, to further sizes that tensor ranks split, under their names in
            messages.
        sampler: the cases that vLLM can sample from; None if there are none.
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


# Names outside the transformer layers; all supported families agree on them.
EMBEDDING = ("embedding.word_embeddings.weight", "model.embed_tokens.weight")
OUTPUT = ("output_layer.weight", "lm_head.weight")
FINAL_NORM = VectorMap(("decoder.final_layernorm.weight", "decoder.final_norm.weight"), "model.norm.weight")
MCORE_LAYER = "decoder.layers.{}."
HF_LAYER = "model.layers.{}."
# transformers 5's names below a layer: the router, and the parameters that stack the linears of all experts, one for
# each template of ``MoeMap.experts``. Weight files keep the names of ``MoeMap``.
STACKED_ROUTER = "mlp.gate"
GATE_UP, DOWN = "gate_up_proj", "down_proj"
STACKED_EXPERTS = (f"mlp.experts.{GATE_UP}", f"mlp.experts.{DOWN}")
