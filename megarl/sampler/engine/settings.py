# SPDX-License-Identifier: Apache-2.0
"""Turn an EngineConfig into vLLM's settings. Pure dictionaries and numbers, no vLLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import EngineConfig
from megarl.config.back_ends import TRANSFORMERS
from megarl.config.checks import read_model_shape
from megarl.config.numerics import check_engine_numerics
from megarl.config.sections.eval import Sampling
from megarl.errors import ConfigError, UnsupportedError
from megarl.families import FAMILIES
from megarl.families.base import SamplerSupport
from megarl.files import read_json
from megarl.sampler.engine.adapters import check_adapter, max_lora_rank
from megarl.sampler.engine.arguments import bitwise_arguments, check_engine_args
from megarl.sampler.engine.device_checks import head_dim
from megarl.sampler.engine.graph_sizes import graph_sizes
from megarl.sampler.engine.unlisted import support_of

# Policy versions that an engine holds at once, each in a slot: the old one may still decode while the new one is added;
# with ``in_flight: overlap`` two that decode while a third is added. One version more than slots would evict an adapter
# in use, which kills the engine.
LIVE_VERSIONS, OVERLAPPING_VERSIONS = 2, 3
# Tokens of one engine step. On CPU chunked prefill is off, because it crashes with per-request seeds (vLLM 0.32).
BATCHED_TOKENS = {"cpu": 4096, "cuda": 8192}
EXTENSION = "megarl.sampler.worker.extension.EngineExtension"
# ``checkpoint_engine.receiver.weights.borrowed.LOAD_FORMAT``, which only a process with vLLM can import.
BORROWED = "megarl_borrowed"


def engine_arguments(config: EngineConfig, engine_index: int, device: str, loan: str = "") -> dict[str, Any]:
    """Return keyword arguments of vLLM's ``AsyncEngineArgs``.

    Args:
        config: the engine's config.
        engine_index: index of the engine, 0 .. sampler.engines - 1; shifts the seed.
        device: ``"cpu"`` or ``"cuda"``.
        loan: file that holds the ``Loan`` of the trainer whose base the engine reads.
    """
    sampler = config.sampler
    length = longest_sequence(config)
    eager = sampler.enforce_eager if sampler.enforce_eager is not None else device == "cpu"
    arguments: dict[str, Any] = {
        "model": str(Path(config.model.path).expanduser()),
        "dtype": config.model.dtype,
        "tensor_parallel_size": sampler.parallel.tensor,
        # With dummy weights, an engine whose base never arrives samples noise, and no version check lets it through.
        "load_format": "dummy" if config.checkpoint_engine.base_weights == "send" else "auto",
        "skip_tokenizer_init": not sampler.stop,  # only stop strings need text
        "generation_config": "vllm",  # keeps the model's own top_p, top_k and penalties out
        "seed": sampler.seed + engine_index,
        "max_model_len": length,
        "max_num_seqs": sampler.max_num_seqs,
        "max_num_batched_tokens": max(BATCHED_TOKENS[device], length),
        "enable_prefix_caching": True,  # the samples of a prompt share its prefill
        "enforce_eager": eager,
        "enable_sleep_mode": sampler.sleep,
        "kv_cache_memory_bytes": int(sampler.kv_cache_gib * 2**30),
        "gpu_memory_utilization": sampler.gpu_memory_utilization,
        "scheduling_policy": "priority",  # lets the canary in first
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "enable_lora": config.checkpoint_engine.content == "adapter",
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
    }
    if loan:
        arguments |= {"load_format": BORROWED, "model_loader_extra_config": {"loan": loan}}
    if sampler.parallel.tensor > 1:
        # In an actor vLLM would make further actors, in bundles that `megarl train` does not reserve for it.
        arguments["distributed_executor_backend"] = "mp"
    if arguments["enable_lora"]:
        arguments |= {
            "max_lora_rank": max_lora_rank(config),
            "max_loras": live_versions(config),
            "max_cpu_loras": 2 * live_versions(config),  # evicting an adapter in use would kill the engine
        }
        if adapted := _adapted(config):
            arguments["lora_target_modules"] = list(adapted)
    if device == "cpu":
        arguments |= {"enable_chunked_prefill": False, "block_size": 32}
    owned = bitwise_arguments(arguments, config.model.numerics)
    check_engine_args(sampler.engine_args, owned)
    if not eager:
        sizes = graph_sizes(sampler.max_num_seqs, config.most_requests)
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return bitwise_arguments(arguments, config.model.numerics) | sampler.engine_args


def _adapted(config: EngineConfig) -> tuple[str, ...]:
    """Return the linears that vLLM takes adapters of; none if it takes all that it knows."""
    if config.model.backend != TRANSFORMERS:
        return ()
    return support_of(str(read_model_shape(config.model.path).get("model_type"))).adapted


def live_versions(config: EngineConfig) -> int:
    """Return the number of policy versions that an engine holds at once."""
    return OVERLAPPING_VERSIONS if config.checkpoint_engine.in_flight == "overlap" else LIVE_VERSIONS


def longest_sequence(config: EngineConfig) -> int:
    """Return the tokens of the longest prompt and completion, in training or in an evaluation."""
    return config.sampler.max_prompt_tokens + (config.longest_response or config.sampler.max_response_tokens)


def sampling_arguments(
    config: EngineConfig, stop: tuple[int, ...], seed: int, sampling: Sampling | None = None
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's ``SamplingParams``, all that change the distribution; none about logprobs.

    Args:
        config: the engine's config.
        stop: ids of the tokens that end a completion.
        seed: 31 bits.
        sampling: of an evaluation; None: as in training.
    """
    sampler = config.sampler
    drawn = sampling or Sampling(sampler.samples_per_prompt, sampler.temperature, 1.0, sampler.max_response_tokens)
    return {
        "n": drawn.samples,
        "temperature": drawn.temperature,
        "top_p": drawn.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "bad_words": None,
        "min_tokens": 0,
        "max_tokens": drawn.max_tokens,
        "stop": list(sampler.stop) or None,
        "stop_token_ids": list(stop),
        # The tokenizer's EOS, which vLLM knows if it loads one for the stop strings. It may be no stop token.
        "ignore_eos": True,
        "seed": seed,
        "detokenize": bool(sampler.stop),
    }


def check_sampled(config: EngineConfig) -> None:
    """Refuse models and settings that the sampler is not known to compute correctly, before anything is started.

    Raises:
        ConfigError: the folder has no readable config.json, the model cannot draw a stop token, the KV cache cannot
            hold one sequence, or merged weights are to overlap.
        UnsupportedError: the model's family or attention, or an adapter of the embedding or lm_head, is not supported;
            or stop texts with requests that go on under a new version.
    """
    if config.checkpoint_engine.in_flight == "continue" and config.sampler.stop:
        raise UnsupportedError(
            f"checkpoint_engine.in_flight is 'continue' with sampler.stop {config.sampler.stop}: a stop text could "
            "begin under one version and end under the next, where vLLM would not find it; use abort or drain, or end "
            "completions by the model's eos_token_id"
        )
    if config.checkpoint_engine.in_flight == "overlap" and config.checkpoint_engine.content == "merged":
        raise ConfigError(
            "checkpoint_engine.in_flight is 'overlap' with checkpoint_engine.content 'merged': merged weights replace "
            "each other in place, so an engine holds one version; use content: adapter, or in_flight: drain, abort or "
            "continue"
        )
    if config.sampler.engine_args:
        engine_arguments(config, 0, "cuda")  # refuses arguments that megarl sets
    shape = read_model_shape(config.model.path)
    check_engine_numerics(config, shape)
    support = _support(config, shape)
    _check_attention(shape, support, longest_sequence(config))
    check_adapter(config, shape, support)
    _check_cache(config, shape)
    for token in stop_tokens(config.model.path):
        if not 0 <= token < shape.get("vocab_size", token + 1):
            raise ConfigError(
                f"model.path: eos_token_id {token} is outside the model's vocabulary of {shape['vocab_size']}; no "
                "completion would ever end"
            )


def _support(config: EngineConfig, shape: Mapping[str, Any]) -> SamplerSupport:
    """Return the cases in which vLLM samples as the trainer computes."""
    model_type = str(shape.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is not None and family.sampler is not None:
        return family.sampler
    if family is None and config.model.backend == TRANSFORMERS:
        return support_of(model_type)
    sampled = sorted(name for name, family in FAMILIES.items() if family.sampler)
    raise UnsupportedError(
        f"model.path: the sampler does not support model_type '{model_type}'; supported are {', '.join(sampled)}, and "
        "with model.backend=transformers those that Megatron-Core has not here"
    )


def _check_attention(shape: Mapping[str, Any], support: SamplerSupport, length: int) -> None:
    """Refuse attention that vLLM computes differently from transformers, or that is not tested."""
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind in ("dynamic", "longrope"):
        # vLLM scales "dynamic" frequencies at every length, transformers only beyond max_position_embeddings.
        raise UnsupportedError(f"model.path: the sampler does not support rope_type '{kind}' of its config.json")
    if reason := support.refused(shape):
        raise UnsupportedError(f"model.path: the sampler does not support {reason} of its config.json")
    window = support.window(shape)
    if window and length > window:
        raise UnsupportedError(
            f"model.path: sliding_window is {window} in its config.json, but sampler.max_prompt_tokens + "
            f"sampler.max_response_tokens is {length}; the sampler supports a window that no sequence exceeds"
        )


def _check_cache(config: EngineConfig, shape: Mapping[str, Any]) -> None:
    """Refuse a KV cache that cannot hold one sequence; vLLM reports that only after it has loaded the model."""
    sampler, heads = config.sampler, shape.get("num_attention_heads") or 1
    if "kv_cache_dtype" in sampler.engine_args:
        return
    kv_heads = max(1, (shape.get("num_key_value_heads") or heads) // sampler.parallel.tensor)
    size = kv_heads * head_dim(shape) * (4 if config.model.dtype == "float32" else 2)
    length = longest_sequence(config)
    needed = 2 * shape.get("num_hidden_layers", 0) * size * length / 2**30
    if needed > sampler.kv_cache_gib:
        raise ConfigError(
            f"sampler.kv_cache_gib is {sampler.kv_cache_gib:g}, but one sequence of sampler.max_prompt_tokens + "
            f"sampler.max_response_tokens = {length} tokens needs {needed:.2g} GiB on each rank of an engine"
        )


def stop_tokens(model_path: str) -> tuple[int, ...]:
    """Return the ids that end a completion: ``eos_token_id`` of generation_config.json, else of config.json.

    Returns:
        Sorted ids; empty if the model names none (completions then end at their maximal length).

    Raises:
        ConfigError: ``eos_token_id`` is neither an integer nor a list of integers.
    """
    folder = Path(model_path).expanduser()
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        value = read_json(folder / name, "model.path", ConfigError).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise ConfigError(f"{folder / name}: eos_token_id is {value!r}; it must be an integer or a list of them")
        if ids:
            return tuple(sorted(set(ids)))
    return ()
