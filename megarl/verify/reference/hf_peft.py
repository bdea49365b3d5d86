# SPDX-License-Identifier: Apache-2.0
"""Compute the truth with Hugging Face + PEFT in one process, sequence by sequence, without packing and padding."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from megarl.config import RunConfig
from megarl.lora import load_peft_config
from megarl.model.weights.full_config import names_of
from megarl.types import Sample
from megarl.verify.bounds import SLACK
from megarl.verify.compare import Outcome, relative_error
from megarl.verify.inputs.model_facts import is_listed
from megarl.verify.launch import report_progress
from megarl.verify.reference.experts import hold_zeros, unstack

# Least rounding error of a float32 gradient, relative to its tensor's largest element: that of a sum of some hundred
# terms.
ROUNDING = 1e-6


class Update(NamedTuple):
    """One update of the reference.

    Attributes:
        gradients: copies of the gradients before clipping, by parameter.
        norm: norm of all gradients together.
        optimizer: the optimizer that made the update. The parameters still hold the clipped gradient.
        logprobs: logprobs of each sample before the update, ``[R]``.
        entropy: mean over the response tokens of all samples before the update, in nats.
    """

    gradients: dict[str, torch.Tensor]
    norm: float
    optimizer: torch.optim.AdamW
    logprobs: list[np.ndarray]
    entropy: float


def load_reference(
    model: Path, adapter: Path | None, dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> torch.nn.Module:
    """Load the Hugging Face model, with a trainable PEFT adapter if one is given."""
    # transformers' other kernels for experts refuse float64.
    base = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    )
    if adapter is None:
        return base
    adapted = PeftModel.from_pretrained(base, adapter, is_trainable=True, autocast_adapter_dtype=False).to(dtype)
    adapted.experts_apart = not load_peft_config(adapter).target_parameters and is_listed(model)
    if adapted.experts_apart:
        hold_zeros(adapted)
    return adapted.eval()  # evaluation mode switches off dropout, whatever the adapter was trained with


def response_logits(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Return the logits that predict the response tokens of one sample, at least float32: ``[R, vocabulary]``."""
    device = next(model.parameters()).device
    logits = model(input_ids=torch.from_numpy(sample.tokens)[None].to(device)).logits[0, :-1]
    logits = logits[torch.from_numpy(sample.response_mask[1:]).to(device)]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def logprobs_of(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs of one sample's response tokens, ``[R]``."""
    return _chosen(response_logits(model, sample, temperature), sample)


def _chosen(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    labels = torch.from_numpy(sample.tokens[sample.response_mask]).to(logits.device)
    return torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]


@torch.no_grad()
def all_logprobs(model: torch.nn.Module, samples: Sequence[Sample], temperature: float) -> list[np.ndarray]:
    """Return ``logprobs_of`` every sample as NumPy arrays."""
    return [logprobs_of(model, sample, temperature).cpu().numpy() for sample in samples]


def run_reference(
    model: torch.nn.Module,
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    config: RunConfig,
    rounded: Sequence[Mapping[str, torch.Tensor]] = (),
    keep: list[dict[str, torch.Tensor]] | None = None,
) -> Outcome:
    """Compute logprobs, gradients of ``-sum(weight * advantage * logprob)``, and AdamW updates with clipped gradients.

    Args:
        model: the reference, from ``load_reference``, with an adapter; trained in place.
        samples: the batch. Gradients are added up in this order.
        weights: for each update, the loss weight of each sample's tokens, ``[S]``.
        config: the run config; ``sampler.temperature``, and of ``train`` the learning rate, AdamW's settings and
            ``max_grad_norm``.
        rounded: each update's gradient in the dtype under test. ``leeway`` allows ``SLACK`` times its error. In later
            updates that is more than rounding, because Adam has magnified the earlier rounding.
        keep: list to which each update's gradients are appended, by parameter, on the CPU.
    """
    trainable = _trainable(model)
    with model.disable_adapter():
        base_logprobs = all_logprobs(model, samples, config.sampler.temperature)
    start = _in_our_file(adapter_tensors(model), model)
    leeway = {name: torch.zeros_like(parameter) for name, parameter in trainable.items()}
    norms = []
    for step, update in enumerate(each_update(model, samples, weights, config)):
        report_progress(f"Hugging Face + PEFT: update {step + 1} of {len(weights)} done")
        norms.append(update.norm)
        if keep is not None:
            keep.append({name: gradient.cpu() for name, gradient in update.gradients.items()})
        if step == 0:
            logprobs, entropy = update.logprobs, update.entropy
            gradients = _in_our_file({_in_file(n): value.cpu() for n, value in update.gradients.items()}, model)
        theirs = rounded[step] if rounded else {}
        for name, parameter in trainable.items():
            exact = update.gradients[name]
            off = relative_error(theirs[name].to(parameter.device), exact) if name in theirs else 0.0
            leeway[name] += sensitivity(parameter, max(ROUNDING, SLACK * off), update.optimizer, step + 1)
    adapter = _in_our_file(adapter_tensors(model), model)
    leeway = _in_our_file({_in_file(name): tensor.cpu() for name, tensor in leeway.items()}, model)
    return Outcome(logprobs, base_logprobs, entropy, gradients, norms, adapter, start, leeway)


def each_update(
    model: torch.nn.Module, samples: Sequence[Sample], weights: Sequence[np.ndarray], config: RunConfig
) -> Iterator[Update]:
    """Train in place as ``run_reference`` does; yield after each update."""
    trainable, train = _trainable(model), config.train
    optimizer = torch.optim.AdamW(
        trainable.values(),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )
    for weights_S in weights:
        logprobs, entropy = _add_gradients(model, samples, weights_S, config.sampler.temperature)
        gradients = {name: parameter.grad.clone() for name, parameter in trainable.items()}
        limit = train.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(trainable.values(), limit))
        optimizer.step()
        yield Update(gradients, norm, optimizer, logprobs, entropy)


def gradient_norm(
    model: torch.nn.Module, samples: Sequence[Sample], weights_S: np.ndarray, temperature: float
) -> float:
    """Return the global norm of the gradient of ``run_reference``'s loss. The model is not changed."""
    _add_gradients(model, samples, weights_S, temperature)
    norm = torch.nn.utils.get_total_norm([p.grad for p in _trainable(model).values()])
    model.zero_grad()
    return float(norm)


def _add_gradients(
    model: torch.nn.Module, samples: Sequence[Sample], weights_S: np.ndarray, temperature: float
) -> tuple[list[np.ndarray], float]:
    """Leave the gradients of ``run_reference``'s loss in ``grad``; return logprobs and mean entropy."""
    model.zero_grad()
    logprobs, entropies = [], []
    for sample, weight in zip(samples, weights_S, strict=True):
        logits = response_logits(model, sample, temperature)
        logprobs_R = _chosen(logits, sample)
        (-weight * sample.advantage * logprobs_R.sum()).backward()
        logprobs.append(logprobs_R.detach().cpu().numpy())
        entropies.append(torch.distributions.Categorical(logits=logits.detach().double()).entropy())
    return logprobs, float(torch.cat(entropies).mean())


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _in_our_file(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Convert PEFT's tensors to megarl's file: experts one by one, unless they are ``target_parameters``."""
    return unstack(tensors, names_of(model.config.to_dict())) if model.experts_apart else dict(tensors)


def _in_file(name: str) -> str:
    """Return a parameter's name in PEFT's file."""
    return name.replace(".default", "")


def sensitivity(
    parameter: torch.nn.Parameter, rounding: float, optimizer: torch.optim.AdamW, step: int
) -> torch.Tensor:
    """Return how far AdamW's update of each element may differ if the gradient is off by ``rounding``.

    The update is ``lr * m / (sqrt(v) + eps)`` (Kingma & Ba, arXiv:1412.6980), at most ``lr`` in either direction.

    Args:
        parameter: the parameter after the update, with the gradient that made it.
        rounding: error of the gradient, relative to its largest element.
        optimizer: the optimizer that made the update.
        step: number of the update, from 1.
    """
    [group] = optimizer.param_groups
    second = optimizer.state[parameter]["exp_avg_sq"] / (1 - group["betas"][1] ** step)
    off = rounding * parameter.grad.abs().max()
    return group["lr"] * (off / (second.sqrt() + group["eps"])).clamp_max(2.0)


def adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of PEFT's adapter matrices under the names of its file, on the CPU."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
