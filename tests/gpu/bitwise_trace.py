# SPDX-License-Identifier: Apache-2.0
"""Record what vLLM's modules return for one prompt, and what the trainer's do; name the first that differs.

`python -m tests.gpu.bitwise_trace FOLDER ADAPTER OUT TOKEN,...` runs vLLM in this process and writes its trace to OUT.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# vLLM's module of a layer -> mcore's.
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attn.qkv_proj": "self_attention.linear_qkv",
    "self_attn.attn": "self_attention.core_attention",
    "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}
Trace = dict[str, torch.Tensor]


def names(layers: int) -> dict[str, str]:
    """Return vLLM's name of every traced module, and mcore's, in forward order."""
    found = {
        f"model.layers.{i}.{one}": f"decoder.layers.{i}.{two}" for i in range(layers) for one, two in LAYER.items()
    }
    return found | {"model.norm": "decoder.final_layernorm"}


def record(model: torch.nn.Module, wanted: dict[str, str], tokens: int) -> tuple[Trace, list[Any]]:
    """Keep the outputs of modules for the first tokens, by name, and the inputs of attention; return also the hooks.

    The trainer's packs are padded, so a pass may have more tokens. The last such pass is kept.
    """
    trace: Trace = {}
    modules, hooks = dict(model.named_modules()), []

    def hook(name: str) -> Callable:
        def keep(module: torch.nn.Module, given: tuple, out: Any) -> None:
            for number, state in enumerate(given[:3] if name.endswith(("attn", "core_attention")) else ()):
                if len(state) >= tokens:
                    trace[f"{name} {'qkv'[number]}"] = state[:tokens].reshape(tokens, -1).cpu().clone()
            out = out[0] if isinstance(out, tuple) else out
            if len(out) >= tokens:
                trace[name] = out[:tokens].reshape(tokens, -1).cpu().clone()

        return keep

    for name in wanted:
        if name in modules:
            hooks.append(modules[name].register_forward_hook(hook(name)))
    return trace, hooks


def vllm_trace(folder: str, adapter: str, out: str, prompt: list[int]) -> None:
    """Run vLLM on the prompt, and save its trace."""
    from megarl.sampler.environment import prepare_environment, prepare_numerics

    prepare_environment()
    prepare_numerics("bitwise")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from megarl.sampler.engine.arguments import bitwise_arguments
    from megarl.sampler.engine.settings import EXTENSION

    arguments = bitwise_arguments({"enforce_eager": True}, "bitwise")
    engine = LLM(
        folder, **arguments, dtype="bfloat16", skip_tokenizer_init=True, enable_lora=True, max_lora_rank=16,
        worker_extension_cls=EXTENSION, kv_cache_memory_bytes=2**30, max_model_len=2048, gpu_memory_utilization=0.3,
        max_num_seqs=16,
    )  # fmt: skip
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    layers = engine.llm_engine.model_config.hf_config.num_hidden_layers
    trace, _ = record(model, names(layers), len(prompt))
    sampling = SamplingParams(max_tokens=1, temperature=1.0, detokenize=False, logprobs=0)
    engine.generate({"prompt_token_ids": prompt}, sampling, lora_request=LoRARequest("a", 1, adapter), use_tqdm=False)
    torch.save(trace, out)
    print("vllm traced", len(trace), "tensors", flush=True)


def start(folder: Path, adapter: Path, out: Path, prompt: list[int]) -> subprocess.Popen:
    """Start ``vllm_trace`` in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.bitwise_trace", str(folder), str(adapter), str(out)]
    return subprocess.Popen(
        [*command, ",".join(map(str, prompt))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def compare_traces(theirs: Trace, ours: Trace, layers: int, groups: int, queries: int, width: int) -> list[str]:
    """Return a line for each of the first modules that differ; none if all are equal."""
    lines = []
    for vllm, mcore in names(layers).items():
        for part in (" q", " k", " v", ""):
            one, two = theirs.get(vllm + part), ours.get(mcore + part)
            if one is None or two is None:
                if not part:
                    lines.append(f"{vllm}: vllm {one is not None}, trainer {two is not None}")
                continue
            if vllm.endswith("qkv_proj"):
                grouped = two.view(len(two), groups, queries + 2, width)
                parts = (grouped[:, :, :queries], grouped[:, :, queries], grouped[:, :, queries + 1])
                two = torch.cat([p.flatten(1) for p in parts], 1)
            if not torch.equal(one, two):
                apart = (one.double() - two.double()).abs()
                lines.append(
                    f"{vllm}{part}: {int((one != two).sum())} of {one.numel()} differ, {float(apart.max()):.2e}"
                )
    return lines


if __name__ == "__main__":
    vllm_trace(*sys.argv[1:4], prompt=[int(token) for token in sys.argv[4].split(",")])
