"""The truth: one process of Hugging Face + PEFT, sequence by sequence, no packing, no padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from megarl.lora.targets import short_names
from megarl.model.families import names_of
from megarl.model.hf_folder import read_config
from megarl.types import Sample
from tests.helpers.experts import hold_zeros, unstack, write_adapter


@dataclass
class Truth:
    """What the reference computed: logprobs per sample, gradients of step 1 and adapter before and after the steps."""

    logprobs: list[np.ndarray]
    base_logprobs: list[np.ndarray]
    gradients: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor]
    norms: list[float]
    entropy: float


def make_samples(count: int, vocab: int, *, seed: int = 0, longest: int = 40) -> list[Sample]:
    """Random sequences of different lengths with prompt and response, and advantages of both signs."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        prompt, response = int(rng.integers(1, longest // 2)), int(rng.integers(1, longest // 2))
        mask = np.zeros(prompt + response, dtype=bool)
        mask[prompt:] = True
        if response > 4:
            mask[prompt + 2] = False  # a token the policy did not choose, in the middle
        samples.append(Sample(rng.integers(0, vocab, prompt + response), mask, advantage=float(rng.normal())))
    return samples


def load_reference(model: Path, adapter: Path | None, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The Hugging Face model, with a trainable PEFT adapter if one is given."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    if adapter is None:
        return base
    return PeftModel.from_pretrained(base, adapter, is_trainable=True, autocast_adapter_dtype=False).to(dtype)


def logprobs_of(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs ``[R]`` of the response tokens of one sample."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(sample.tokens)[None].to(device)
    logits = model(input_ids=tokens).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(sample.response_mask[1:]).to(device)]


def entropy_of(model: torch.nn.Module, samples: Sequence[Sample]) -> float:
    """Mean entropy of the policy at the response tokens of all samples, nats."""
    found = []
    for sample in samples:
        logits = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0, :-1].double()
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        found.append(entropy[torch.from_numpy(sample.response_mask[1:])])
    return float(torch.cat(found).mean())


def run_reference(
    model_path: Path,
    adapter_path: Path,
    samples: Sequence[Sample],
    weights_S: np.ndarray,
    steps: int,
    lr: float,
    dtype: torch.dtype = torch.float32,
) -> Truth:
    """Logprobs, gradients of ``-sum(weight * advantage * logprob)``, and ``steps`` AdamW updates clipped to norm 1."""
    model = load_reference(model_path, adapter_path, dtype)
    hold_zeros(model)
    names = names_of(model.config.to_dict())
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=lr, weight_decay=0.0)
    with torch.no_grad():
        logprobs = [logprobs_of(model, s).numpy() for s in samples]
        entropy = entropy_of(model, samples)
        with model.disable_adapter():
            base_logprobs = [logprobs_of(model, s).numpy() for s in samples]
    gradients: dict[str, torch.Tensor] = {}
    start = unstack(
        {n: t.detach().clone() for n, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()}, names
    )
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for sample, weight in zip(samples, weights_S, strict=True):
            (-weight * sample.advantage * logprobs_of(model, sample).sum()).backward()
        if step == 0:
            gradients = unstack({n.replace(".default", ""): p.grad.clone() for n, p in trainable.items()}, names)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable.values(), 1.0)))
        optimizer.step()
    adapter = unstack(
        {n: t.detach().clone() for n, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()}, names
    )
    return Truth(logprobs, base_logprobs, gradients, start, adapter, norms, entropy)


def make_adapter(model_path: Path, folder: Path, *, seed: int = 1, **config: object) -> Path:
    """A PEFT adapter with random A and B (B is not zero, so that A has gradients too), saved by PEFT."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    names = names_of(read_config(model_path))
    if names.num_experts:
        if settings["target_modules"] == "all-linear":
            settings["target_modules"] = short_names(names.target_names())
        return write_adapter(model_path, folder, names, LoraConfig(**settings), seed=seed)
    model = get_peft_model(load_reference(model_path, None), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest magnitude."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))
