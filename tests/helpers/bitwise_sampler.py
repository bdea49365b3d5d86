# SPDX-License-Identifier: Apache-2.0
"""Stand in for vLLM's model: compute logprobs with the functions that ``bitwise_hooks`` puts in vLLM's place.

Every function gets the arguments that vLLM gives it: fused projections, a cache in pages, chunks of prompts and steps
of several requests in one batch, an adapter in the second of two slots. ``tests.gpu.bitwise_model`` uses vLLM itself.
"""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megarl.sampler.engine.arguments import PAGE
from megarl.sampler.worker import bitwise_hooks

Work = list[tuple[int, int, int]]  # of one step: a request, its first new token, and the token after its last new one
PARTS = {
    "qkv": [f"self_attn.{part}_proj" for part in "qkv"], "o": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"],
}  # fmt: skip


class RotaryEmbedding(SimpleNamespace):
    """The attributes of vLLM's class of this name."""


class Llama3RotaryEmbedding(SimpleNamespace):
    """The attributes of vLLM's class of this name."""


class Sampler:
    """A model with one adapter.

    Args:
        config: the model's config.
        folder: its weights.
        adapter: a PEFT folder.
        temperature: divides the logits.
        device: to compute on.
    """

    def __init__(self, config: Any, folder: Path, adapter: Path, temperature: float, device: str) -> None:
        self.config, self.temperature, self.device = config, temperature, device
        self.weights = load_file(folder / "model.safetensors", device=device)
        self.matrices = load_file(adapter / "adapter_model.safetensors", device=device)
        settings = json.loads((adapter / "adapter_config.json").read_text())
        self.rank, self.scaling = settings["r"], settings["lora_alpha"] / settings["r"]
        self.rotary = _rotary(config)

    def logprobs(self, requests: list[np.ndarray], steps: list[Work]) -> list[np.ndarray]:
        """Return the logprob of every token but the first of each request.

        Args:
            requests: token ids.
            steps: together they compute each token but the last of every request.
        """
        pages = [-(-len(tokens) // PAGE) for tokens in requests]
        config = self.config
        shape = (config.num_hidden_layers, sum(pages), PAGE, config.num_key_value_heads, 2 * config.head_dim)
        cache = torch.full(shape, float("nan"), dtype=self._weight("embed_tokens").dtype, device=self.device)
        table = torch.zeros(len(requests), max(pages), dtype=torch.int32, device=self.device)
        numbers = torch.arange(sum(pages), dtype=torch.int32, device=self.device).flip(0).split(pages)
        for row, part in zip(table, numbers, strict=True):
            row[: len(part)] = part
        found = [np.zeros(len(tokens) - 1, np.float32) for tokens in requests]
        for work in steps:
            start = 0
            values = self._step(requests, work, cache, table)
            for request, begin, end in work:
                found[request][begin:end] = values[start : start + end - begin]
                start += end - begin
        return found

    @torch.no_grad()
    def _step(self, requests: list[np.ndarray], work: Work, cache: torch.Tensor, table: torch.Tensor) -> np.ndarray:
        """Compute a batch of new tokens; return the logprob of the token after each."""
        tokens = self._put(np.concatenate([requests[r][begin:end] for r, begin, end in work]))
        labels = self._put(np.concatenate([requests[r][begin + 1 : end + 1] for r, begin, end in work]))
        positions = torch.cat([torch.arange(begin, end, device=self.device) for _, begin, end in work])
        starts = np.cumsum([0, *(end - begin for _, begin, end in work)])
        here = SimpleNamespace(
            table=table[[r for r, _, _ in work]],
            starts=self._put(starts.astype(np.int32)),
            lengths=self._put(np.array([end for _, _, end in work], np.int32)),
            positions=positions,
            pages=torch.cat([table[r][positions[a:b] // PAGE] for (r, _, _), (a, b) in _spans(work, starts)]).long(),
        )
        hidden, residual = self._weight("embed_tokens")[tokens], None
        for layer in range(self.config.num_hidden_layers):
            hidden, residual = self._layer(layer, hidden, residual, here, cache[layer])
        hidden, _ = self._norm("norm", hidden, residual)
        head = self.weights.get("lm_head.weight", self._weight("embed_tokens"))
        logits = _run("logits", None, SimpleNamespace(weight=head), hidden, None)
        index = torch.zeros(len(tokens), dtype=torch.int32, device=self.device)
        _run("temperature", logits, index, torch.tensor([self.temperature], device=self.device))
        return _run("logprobs", logits, labels[:, None])[:, 0].float().cpu().numpy()

    def _layer(self, layer: int, hidden: torch.Tensor, residual: Any, here: Any, cache: torch.Tensor) -> Any:
        config, prefix = self.config, f"layers.{layer}."
        if residual is None:
            residual, hidden = hidden, self._norm(f"{prefix}input_layernorm", hidden)
        else:
            hidden, residual = self._norm(f"{prefix}input_layernorm", hidden, residual)
        width, groups = config.head_dim, config.num_key_value_heads
        fused = self._linear(prefix, "qkv", hidden)
        query, key, value = fused.split([config.num_attention_heads * width, groups * width, groups * width], -1)
        if f"model.{prefix}self_attn.q_norm.weight" in self.weights:
            query, key = (
                self._norm(f"{prefix}self_attn.{name}", part.view(len(part), -1, width)).reshape(part.shape)
                for name, part in (("q_norm", query), ("k_norm", key))
            )
        query, key = _run("rotary", self.rotary, here.positions, query, key)
        keys, values = cache.split(width, -1)
        keys[here.pages, here.positions % PAGE] = key.view(-1, groups, width)
        values[here.pages, here.positions % PAGE] = value.reshape(-1, groups, width)
        heads = query.view(len(query), -1, width)
        out = torch.empty_like(heads)
        _run(
            "attention", q=heads, k=keys, v=values, out=out, cu_seqlens_q=here.starts, seqused_k=here.lengths,
            softmax_scale=width**-0.5, causal=True, window_size=(-1, -1), block_table=here.table, softcap=0,
        )  # fmt: skip
        hidden = self._linear(prefix, "o", out.flatten(1))
        hidden, residual = self._norm(f"{prefix}post_attention_layernorm", hidden, residual)
        hidden = _run("swiglu", None, self._linear(prefix, "gate_up", hidden))
        return self._linear(prefix, "down", hidden), residual

    def _linear(self, prefix: str, name: str, hidden: torch.Tensor) -> torch.Tensor:
        parts = [self._weight(f"{prefix}{part}") for part in PARTS[name]]
        out = _run("linear", None, SimpleNamespace(weight=torch.cat(parts)), hidden, None)
        stacked_a, stacked_b = [], []
        for part, weight in zip(PARTS[name], parts, strict=True):
            key = f"base_model.model.model.{prefix}{part}.lora_"
            if f"{key}A.weight" in self.matrices:
                a, b = (self.matrices[f"{key}{side}.weight"].to(weight.dtype) for side in "AB")
                b = b * self.scaling  # rounded again, as vLLM does
            else:  # vLLM's slot stays zero
                a, b = (weight.new_zeros(size) for size in ((self.rank, weight.shape[1]), (len(weight), self.rank)))
            a, b = (torch.stack([torch.ones_like(m), m])[:, None].to(hidden.dtype) for m in (a, b))
            stacked_a.append(a)
            stacked_b.append(b)
        widths = tuple(len(weight) for weight in parts)
        if f"base_model.model.model.{prefix}{PARTS[name][0]}.lora_A.weight" in self.matrices:
            _run("lora", _wrapper(hidden), out, hidden, tuple(stacked_a), tuple(stacked_b), 1.0, widths)
        return out

    def _norm(self, name: str, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        norm = SimpleNamespace(weight=self._weight(name), variance_epsilon=self.config.rms_norm_eps)
        return _run("norm", norm, hidden, residual)

    def _weight(self, name: str) -> torch.Tensor:
        return self.weights[f"model.{name}.weight"]

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _run(name: str, *given: Any, **named: Any) -> Any:
    return bitwise_hooks.OPERATIONS[name].run(*given, **named)


def _spans(work: Work, starts: np.ndarray) -> Any:
    return zip(work, pairwise(starts.tolist()), strict=True)


def _wrapper(hidden: torch.Tensor) -> Any:
    """Return what the hook reads of vLLM's wrapper: every token has the second slot's adapter."""
    count = len(hidden)

    def meta_args(tokens: int, specialize: bool) -> tuple[torch.Tensor, ...]:
        numbers = [[count, 0], [0, count, count], [1, -1]]
        counts, starts, slots = (torch.tensor(n, dtype=torch.int32, device=hidden.device) for n in numbers)
        order = torch.arange(count, dtype=torch.int32, device=hidden.device)
        return torch.ones_like(order), order, counts, starts, slots, torch.tensor([False]), torch.tensor([1])

    return SimpleNamespace(
        token_mapping_meta=SimpleNamespace(meta_args=meta_args),
        lora_config=SimpleNamespace(specialize_active_lora=False),
    )


def _rotary(config: Any) -> Any:
    rope, width = config.rope_parameters, config.head_dim
    plain = {"base": rope["rope_theta"], "rotary_dim": width, "head_size": width, "is_neox_style": True}
    if rope["rope_type"] == "default":
        return RotaryEmbedding(**plain)
    return Llama3RotaryEmbedding(
        **plain,
        scaling_factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        orig_max_position=rope["original_max_position_embeddings"],
    )
