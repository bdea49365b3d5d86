# SPDX-License-Identifier: Apache-2.0
"""Complete ``config.json`` with transformers' defaults, and refuse keys that would change the model unread."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig

from megarl.errors import ModelError, UnsupportedError
from megarl.families import WeightMap, family_of
from megarl.families.base import COUNTS, NULLABLE, SIZES, Family

# Keys that change no logits: bookkeeping, generation, settings of pre-training, heads that no causal model has.
HARMLESS = frozenset(GenerationConfig().to_dict()) | {
    "architectures", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward", "classifier_dropout", "dtype", "ep_size",
    "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range", "is_decoder", "is_llama_config",
    "label2id", "max_sequence_length", "model_max_length", "model_name", "num_labels", "output_router_logits",
    "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef", "sep_token_id", "seq_aux",
    "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "use_bfloat16", "use_cache",
}  # fmt: skip
HARMLESS_PREFIXES = ("_", "unsloth_")
# Keys that transformers' class of a family may not know, each with the value at which it has no effect.
NEUTRAL = {
    "add_cross_attention": False,
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_dropout": 0.0,
    "is_causal": True,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "qkv_bias": False,
    "resid_pdrop": 0.0,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
}
# Advice for keys whose name does not say it.
REASONS = {
    "attention_dropout": "set it to 0 to train without it",
    "quantization_config": "write the model out in bfloat16, dequantised, and take that folder",
}
# Keys of rope_parameters that transformers' functions read, over all types of RoPE.
ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor",
    "long_factor", "partial_rotary_factor",
}  # fmt: skip
# transformers' classes build a list of this length, so a damaged number would fill the memory.
MOST_LAYERS = 10_000
# Above the sizes of all models (the longest contexts are 10 million tokens), and small enough not to fill the memory.
LARGEST = 2**24


class FullConfig(dict[str, Any]):
    """A ``config.json`` in which every key of its family's class has a value, and every value is understood."""


def full_config(hf_config: Mapping[str, Any]) -> FullConfig:
    """Return a parsed ``config.json`` with transformers' defaults for the keys it leaves out; see ``complete``.

    Raises:
        ModelError: transformers rejects a value, or a size is not a possible size.
        UnsupportedError: the ``model_type`` is not registered, or megarl reads a key nowhere.
    """
    return complete(hf_config, family_of(hf_config))


def names_of(hf_config: Mapping[str, Any]) -> WeightMap:
    """Return the tensor names of the model of a parsed ``config.json``.

    Raises:
        ModelError, UnsupportedError: as for ``full_config``.
    """
    return WeightMap(family_of(hf_config), full_config(hf_config))


def complete(raw: Mapping[str, Any], family: Family) -> FullConfig:
    """Fill in the defaults of transformers' config class, and check all values.

    Args:
        raw: parsed ``config.json``; not changed.
        family: family of its ``model_type``.

    Raises:
        ModelError: transformers rejects a value or does not know the ``model_type``, or a size is not a possible size.
        UnsupportedError: megarl reads a key nowhere, and its value is not transformers' default.
    """
    if isinstance(raw, FullConfig):
        return raw
    if raw["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"config.json: transformers has no config class for model_type '{raw['model_type']}'; call "
            "AutoConfig.register for it in the file that model.family names"
        )
    config_class = CONFIG_MAPPING[raw["model_type"]]
    aliases: dict[str, str] = config_class.attribute_map
    read = {key: copy.deepcopy(value) for key, value in raw.items() if key in family.reads and key != "model_type"}
    for alias, name in aliases.items():
        if alias in read and name in read and read[alias] != read[name]:
            raise ModelError(f"config.json: {alias} is {read[alias]!r} and {name} {read[name]!r}; they are one setting")
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers is {layers}; it must be at most {MOST_LAYERS}")
    try:
        full = config_class(**read).to_dict()
    except Exception as error:  # transformers may raise anything on unexpected values
        reason = " ".join(str(error).split())
        raise ModelError(f"config.json: transformers rejects it: {reason or type(error).__name__}") from error
    for key, value in raw.items():
        if key in family.reads:
            continue
        if key in HARMLESS or key.startswith(HARMLESS_PREFIXES):
            full[key] = copy.deepcopy(value)
            continue
        _check_unread(key, value, full.get(aliases.get(key, key), NEUTRAL.get(key)))
    _check_rope_keys(raw)
    _check_values(full)
    return FullConfig(full)


def _check_unread(key: str, value: Any, default: Any) -> None:
    if value is None and key == "head_dim" and default is not None:
        raise ModelError("config.json: head_dim is null, with which transformers fails in this family; delete it")
    if value is None or (value == default and isinstance(value, bool) == isinstance(default, bool)):
        return
    known = f"transformers' default is {default!r}" if default is not None else "transformers has no such key"
    fix = REASONS.get(key, "delete it if the model does not depend on it; else the model is not supported")
    raise UnsupportedError(f"config.json: {key} is {_short(value)}, which megarl does not read ({known}); {fix}")


def _check_rope_keys(raw: Mapping[str, Any]) -> None:
    for field in ("rope_parameters", "rope_scaling"):
        given = raw.get(field)
        if given is not None and not isinstance(given, Mapping):
            raise ModelError(f"config.json: {field} is {given!r}; it must be an object or null")
        for key, value in (given or {}).items():
            if key not in ROPE_KEYS and value is not None and not isinstance(value, Mapping):
                raise UnsupportedError(f"config.json: {field}.{key} is {_short(value)}, which megarl does not read")


def _check_values(full: Mapping[str, Any]) -> None:
    """Refuse values that transformers' class accepts and no model can have."""
    for key in SIZES:
        value = full.get(key)
        if value is None and (key not in full or key in NULLABLE):
            continue
        if key == "sliding_window" and value == 0 and full.get("use_sliding_window") is False:
            continue  # transformers' way to switch the window off in a qwen2_moe
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise ModelError(f"config.json: {key} is {value!r}; it must be a whole number from 1 to {LARGEST}")
    for key in COUNTS:
        value = full.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise ModelError(f"config.json: {key} is {value!r}; it must be a whole number or null")
    if full["hidden_act"] != "silu":
        raise UnsupportedError(f"config.json: hidden_act is '{full['hidden_act']}'; supported is 'silu'")
    padding, vocab = full.get("pad_token_id"), full["vocab_size"]
    if isinstance(padding, int) and not -vocab <= padding < vocab:  # as torch's Embedding has it
        raise ModelError(f"config.json: pad_token_id is {padding}, but vocab_size is {vocab}; set it to null")
    eps = full["rms_norm_eps"]
    if not 0.0 < eps < math.inf:
        raise ModelError(f"config.json: rms_norm_eps is {eps!r}; it must be a number above 0")
    heads, kv_heads = full["num_attention_heads"], full["num_key_value_heads"]
    if heads % kv_heads:
        raise ModelError(f"config.json: num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")
    if (full.get("head_dim") or full["hidden_size"] // heads) % 2:
        raise ModelError(f"config.json: head_dim is {full.get('head_dim')}; RoPE needs an even number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
