# SPDX-License-Identifier: Apache-2.0
"""Sample with an adapter that was synced in memory, recompute the logprobs in the trainer, and count what differs.

`python -m tests.gpu.bitwise_model [NAME] [key=value ...]`: NAME is a shape of `megarl.bench.shapes`, or `llama`. Keys
are those of ``DEFAULTS``. Prints the first module that differs (`trace=1`), then for each policy version the tokens
that differ and the seconds of sampling and of a training step. `numerics=fast` measures what bitwise costs.
`prefill_chunk=96` lets a prompt bring at most 96 tokens to a batch that has other requests too. `engines=2` gives every
other prompt to a second engine, on a GPU of its own.
"""

import contextlib
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, LlamaConfig

DEFAULTS = {"numerics": "bitwise", "layers": 0, "versions": 3, "prompts": 64, "samples": 8, "response": 256,
            "trace": 1, "eager": 0, "temperature": 1.0, "prefill_chunk": 0, "cuda_graphs": 0, "engines": 1}  # fmt: skip
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
LLAMA = {
    "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 2048},
}  # fmt: skip


def config_of(name: str, layers: int) -> Any:
    """Return a model's config, with fewer layers if ``layers`` is not 0."""
    from megarl.bench.shapes import SHAPES

    config = LlamaConfig(**LLAMA) if name == "llama" else AutoConfig.for_model(**SHAPES[name].config())
    if layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    config.eos_token_id = 7
    return config


def trace(model: Any, folder: Path, scratch: Path, config: Any) -> None:
    """Print the first modules whose outputs differ between vLLM and the trainer."""
    import megarl
    from tests.gpu.bitwise_trace import compare_traces, names, record, start

    adapter, out = scratch / "adapter", scratch / "trace.pt"
    model.save_adapter(adapter)
    prompt = np.random.default_rng(3).integers(10, config.vocab_size, 300)
    process = start(folder, adapter, out, prompt.tolist())
    log = process.communicate(timeout=240)[0]
    print("\n".join(log.splitlines()[-3:] if out.exists() else log.splitlines()[-25:]), flush=True)
    wanted = dict.fromkeys(names(config.num_hidden_layers).values(), "")
    ours, hooks = record(model.chunks[0], wanted, 300)
    sample = megarl.Sample(prompt, np.arange(300) >= 1)
    model.forward(model.pack([sample]))
    for hook in hooks:
        hook.remove()
    groups, width = config.num_key_value_heads, config.head_dim
    lines = compare_traces(torch.load(out), ours, config.num_hidden_layers, groups,
                           config.num_attention_heads // groups, width)  # fmt: skip
    print(f"trace: {len(lines)} modules differ", *lines[:8], sep="\n  ", flush=True)


def rollout(engines: list[Any], version: int, options: dict[str, Any], vocabulary: int) -> tuple[list[Any], float]:
    """Sample groups with prompts and completions of random lengths, some at once, some one after the other."""
    from megarl.config.sections.eval import Sampling

    draw = np.random.default_rng(version)
    prompts = [draw.integers(10, vocabulary, int(n)) for n in draw.integers(1, 200, options["prompts"])]
    prompts[1] = np.concatenate([prompts[0], prompts[0], prompts[0]])[:400]  # shares a prefix with the first
    began, futures = time.perf_counter(), []
    limits = draw.integers(1, options["response"] + 1, len(prompts))
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        sampling = Sampling(options["samples"], options["temperature"], 1.0, int(limit))
        engine = engines[number % len(engines)]
        futures.append(engine.start_generate([prompt], version, [number], sampling))
        if number % 16 == 3:
            futures[-1].result()
    groups = [group for future in futures for group in future.result()]
    return [completion for group in groups for completion in group], time.perf_counter() - began


def compare_logprobs(model: Any, completions: list[Any], version: int) -> list[Any]:
    """Print how many tokens' logprobs differ; return samples for training."""
    import megarl

    samples = []
    for number, answer in enumerate(completions):
        tokens = np.concatenate([answer.prompt_ids, answer.response_ids])
        mask = np.arange(len(tokens)) >= len(answer.prompt_ids)
        samples.append(megarl.Sample(tokens, mask, float(number % 3 - 1), sampler_logprobs=answer.logprobs))
    ours = np.concatenate(model.forward(model.pack(samples)))
    theirs = np.concatenate([np.asarray(answer.logprobs, np.float32) for answer in completions])
    apart = np.abs(ours - theirs)
    first = np.cumsum([0, *(len(answer.logprobs) for answer in completions)])[:-1]
    print(
        f"version {version}: {len(completions)} completions, {int((ours != theirs).sum())} of {len(ours)} tokens "
        f"DIFFER, largest {apart.max():.3g}, mean {apart.mean():.3g}; of first tokens "
        f"{int((ours != theirs)[first].sum())} of {len(first)}",
        flush=True,
    )
    return samples


def run(name: str, options: dict[str, Any], scratch: Path) -> None:
    import megarl
    from megarl.verify.inputs.tiny_model import write_random

    config = config_of(name, options["layers"])
    folder = write_random(config, scratch / "model", dtype="bfloat16")
    settings = {"path": str(folder), "numerics": options["numerics"]}
    train = {"micro_batch_tokens": 16384, "cuda_graphs": bool(options["cuda_graphs"])}
    model = megarl.build_model(settings, lora=LORA, train=train, temperature=options["temperature"])
    loss = megarl.build_loss({"name": "grpo", "importance_cap": None})
    step(model, [megarl.Sample(np.arange(10, 700), np.arange(690) >= 5, 1.0)], loss)
    if options["trace"]:
        try:
            trace(model, folder, scratch, config)
        except Exception:
            print("trace FAILED", " | ".join(traceback.format_exc().splitlines()[-3:]), flush=True)
    sampler = {"samples_per_prompt": options["samples"], "max_prompt_tokens": 512, "kv_cache_gib": 12.0,
               "max_response_tokens": options["response"], "max_num_seqs": 256, "gpu_memory_utilization": 0.3,
               "enforce_eager": bool(options["eager"]), "temperature": options["temperature"]}  # fmt: skip
    if options["prefill_chunk"]:
        sampler["engine_args"] = {"long_prefill_token_threshold": options["prefill_chunk"]}
    logs = [scratch / f"engine-{index}.log" for index in range(options["engines"])]
    began = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            engines = [
                stack.enter_context(
                    megarl.SamplerProcess(settings, lora=LORA, sampler=sampler, gpus=[index], log=log, index=index)
                )
                for index, log in enumerate(logs)
            ]
            weights = megarl.WeightSync(model, engines)
            weights.sync("base")
            weights.sync("adapter")
            print(f"engines started in {time.perf_counter() - began:.0f} s", flush=True)
            for _ in range(options["versions"]):
                completions, seconds = rollout(engines, model.version, options, config.vocab_size)
                tokens = sum(len(answer.response_ids) for answer in completions)
                samples = compare_logprobs(model, completions, model.version)
                trained = step(model, samples, loss)
                print(f"  sampling {tokens} tokens {seconds:.2f} s, training step {trained:.2f} s", flush=True)
                weights.sync("adapter")
    except Exception:
        for log in filter(Path.exists, logs):
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
        raise


def step(model: Any, samples: list[Any], loss: Any) -> float:
    """Take an optimizer step; return its seconds."""
    import megarl

    counts = np.array([sample.response_mask.sum() for sample in samples])
    batch = model.pack(samples, megarl.sequence_weights(counts, "token_mean", max_response_tokens=1024))
    torch.cuda.synchronize()
    began = time.perf_counter()
    metrics = model.forward_backward(batch, loss)
    model.optim_step(1e-3)
    torch.cuda.synchronize()
    if "mismatch_max" in metrics:
        print(f"  mismatch_max {float(metrics['mismatch_max']):.3g}", flush=True)
    return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    given = [argument for argument in arguments if "=" not in argument]
    options: dict[str, Any] = dict(DEFAULTS)
    for key, value in (argument.split("=") for argument in arguments if "=" in argument):
        options[key] = type(DEFAULTS[key])(value)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        run(given[0] if given else "qwen3-0.6b", options, Path(scratch))


if __name__ == "__main__":
    main(sys.argv[1:])
