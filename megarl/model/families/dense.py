"""The layer of Llama, Mistral, Qwen2 and Qwen3: grouped-query attention and a gated MLP, each behind an RMSNorm."""

from megarl.model.families.base import LinearMap, VectorMap

QKV = LinearMap(
    "self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "column", "qkv"
)
OUT = LinearMap("self_attention.linear_proj", ("self_attn.o_proj",), "row")
ATTENTION = (QKV, OUT)

MLP = (
    LinearMap("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), "column", "gated"),
    LinearMap("mlp.linear_fc2", ("mlp.down_proj",), "row"),
)

NORMS = (
    VectorMap(("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), "input_layernorm.weight"),
    VectorMap(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), "post_attention_layernorm.weight"),
)
