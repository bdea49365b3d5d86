# SPDX-License-Identifier: Apache-2.0
"""Build this rank's GPTModel chunks from a Hugging Face config. Weights are not loaded here."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import ModelType

from megarl.config import ModelConfig, ParallelConfig, TrainConfig, back_ends, checks
from megarl.families import Family, family_of
from megarl.model.layers.attention.rope import Rope, bitwise_rope, rope_of
from megarl.model.layers.backends import BlockSpec, backend_settings, block_spec
from megarl.model.layers.gpt import PackedGPTModel
from megarl.model.layers.packed_config import PackedConfig
from megarl.model.layers.recompute import recompute_settings
from megarl.model.layers.stages import stage_settings
from megarl.model.weights.full_config import full_config
from megarl.parallel.device import cuda_names
from megarl.parallel.groups import Groups

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def architecture(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the ``TransformerConfig`` arguments that follow from a completed ``config.json`` alone.

    Raises:
        UnsupportedError: a setting changes the computation and has no tested counterpart here.
    """
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    settings: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    }
    return settings | rope_of(hf).attention_settings(head_dim) | family.settings(hf)


def transformer_config(
    hf: Mapping[str, Any],
    family: Family,
    model: ModelConfig,
    parallel: ParallelConfig,
    device: torch.device,
    recompute: dict[str, Any],
) -> TransformerConfig:
    """Return mcore's config for a completed ``config.json``.

    Raises:
        UnsupportedError: a setting changes the computation and has no tested counterpart here.
    """
    dtype = DTYPES[model.dtype]
    settings: dict[str, Any] = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        **_interleaving(parallel),
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # Micro-batches differ in length. mcore accepts that only together with this dispatcher, even in a dense model.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # The loss arrives normalised over the whole step, so mcore must not divide it.
        "calculate_per_token_loss": True,
        # Every weight is read from the model's files.
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        # mcore's fusions need Apex or compile on a CPU too; the back ends bring their own.
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    settings |= architecture(hf, family) | recompute | stage_settings(hf, parallel)
    copies = max(1, parallel.tensor // hf["num_key_value_heads"])
    windows = tuple(family.window(hf, layer) for layer in range(hf["num_hidden_layers"]))
    settings |= backend_settings(model, dtype, device, experts="num_moe_experts" in settings)
    if "kv_lora_rank" not in settings:
        settings["num_query_groups"] *= copies
        own = {"windows": windows if any(windows) else (), "kv_copies": copies}
        return PackedConfig(**settings, **own, bitwise=model.numerics == "bitwise")
    # mcore's flag would make each layer compute its own RoPE. LatentAttention takes the model's angles, as all
    # attention does here.
    without_yarn = {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    return MLATransformerConfig(**(without_yarn | settings), multi_latent_attention=False, rope_type="rope")


def _interleaving(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the settings of the interleaved schedule."""
    if parallel.virtual_pipeline == 1:
        return {}
    # With two stages both neighbours are the same rank, and mcore then needs the sends and receives unbatched.
    return {
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def padded_vocab(vocab: int, tensor: int) -> int:
    """Return the smallest multiple of the tensor-parallel size that holds the vocabulary."""
    return -(-vocab // tensor) * tensor


def build_chunks(
    hf: Mapping[str, Any],
    model: ModelConfig,
    parallel: ParallelConfig,
    groups: Groups,
    train: TrainConfig,
    spec: BlockSpec | None = None,
) -> list[PackedGPTModel]:
    """Build this rank's model chunks with uninitialised, frozen weights.

    ``train`` says which activations are recomputed; ``spec`` describes other layers than the back end's.

    Returns:
        One chunk per virtual pipeline stage.

    Raises:
        ConfigError: the layout does not divide the model.
        ModelError, UnsupportedError: the family or a setting is wrong or not supported.
    """
    hf = full_config(hf)
    # Check again: full_config has filled in the values that config.json leaves out.
    checks.check_layout_fits_model(parallel, hf)
    back_ends.check_te(model, hf)
    config = transformer_config(hf, family_of(hf), model, parallel, groups.device, recompute_settings(train))
    stages = range(parallel.virtual_pipeline)
    spec = spec or block_spec(model)
    rope = bitwise_rope(hf) if model.numerics == "bitwise" else rope_of(hf)
    return [_build_chunk(hf, config, spec, rope, groups, stage if len(stages) > 1 else None) for stage in stages]


def _build_chunk(
    hf: Mapping[str, Any], config: TransformerConfig, spec: BlockSpec, rope: Rope, groups: Groups, vp_stage: int | None
) -> PackedGPTModel:
    first, last = vp_stage in (None, 0), vp_stage in (None, groups.topology.virtual_pipeline - 1)
    with cuda_names():
        chunk = PackedGPTModel(
            config=config,
            transformer_layer_spec=spec(config, vp_stage),
            vocab_size=padded_vocab(hf["vocab_size"], groups.topology.tensor),
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=groups.first_stage and first,
            post_process=groups.last_stage and last,
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            vp_stage=vp_stage,
            **rope.model_settings(),
        )
    rope.install(chunk)
    chunk.model_type = ModelType.encoder_or_decoder
    chunk.to(groups.device)
    chunk.requires_grad_(False)
    return chunk
