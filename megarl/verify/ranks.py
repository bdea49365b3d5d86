# SPDX-License-Identifier: Apache-2.0
"""Train at a layout on every rank, and compare with the truth."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.build import build_with
from megarl.config import ParallelConfig
from megarl.errors import UnsupportedError
from megarl.families.base import OUTPUT
from megarl.lora import load_peft_config
from megarl.lora.merge import merge_folder, write_merged
from megarl.model.trained_model import TrainedModel
from megarl.model.weights.hf_folder import WeightFolder
from megarl.parallel.device import pick_device
from megarl.parallel.groups import Groups, destroy_groups, init_groups, leave_layout
from megarl.peft.spec import AdapterSpec
from megarl.verify.bounds import ADAPTER, BASE_WEIGHTS, CHECKPOINT, UPDATE
from megarl.verify.cases import Case, Place
from megarl.verify.compare import Finding, Outcome, compare, compare_adapters, is_worse
from megarl.verify.inputs.layouts import place_name
from megarl.verify.launch import free_memory, report_progress
from megarl.verify.reference.surrogate_loss import SurrogateLoss


@dataclass(frozen=True)
class Stage:
    """Work of the ranks at one place.

    Attributes:
        place: the place.
        full: True trains here and compares everything.
        resume: place whose checkpoint is resumed here.
    """

    place: Place
    full: bool = True
    resume: Place | None = None


def run_stages(stages: Sequence[Stage]) -> dict[str, list[Finding]]:
    """Run every stage in order, on each rank. Returns this rank's findings by place."""
    findings: dict[str, list[Finding]] = {}
    for stage, groups in each_layout(stages):
        report_progress(f"{stage.place.key}: {stage.place.config.parallel.world_size} ranks")
        if stage.resume is not None:
            findings.setdefault(stage.resume.key, []).append(resume(stage.resume, stage.place, groups))
        if stage.full:
            findings.setdefault(stage.place.key, []).extend(train(stage.place, groups))
    return findings


def each_layout(stages: Sequence[Stage]) -> Iterator[tuple[Stage, Groups]]:
    """Yield each stage with its groups. Stages of one layout share them."""
    device = pick_device(stages[0].place.config.train.device)
    here: ParallelConfig | None = None
    for stage in stages:
        config = stage.place.config
        if config.parallel != here:
            leave_layout()
            groups = init_groups(config.parallel, device, seed=config.train.seed)
            here = config.parallel
        yield stage, groups
        free_memory()
    destroy_groups()


def build(place: Place, groups: Groups) -> TrainedModel:
    """Build the case's model with its adapter's layers, not yet loaded."""
    return build_with(place.config.trainer, groups, [AdapterSpec(load_peft_config(place.case.adapter))])


def train(place: Place, groups: Groups) -> list[Finding]:
    """Make all updates from the case's adapter, compare them with the truth, and save the adapter and merged models."""
    case, rule = place.case, place.case.rule
    model = build(place, groups)
    model.load_adapter(case.adapter)
    outcome = run_updates(model, case, place.folder / "checkpoint")
    findings = compare(outcome, case.read("truth"), rule)
    after = model.forward(model.pack(case.samples()))
    if groups.rank == 0:
        case.write(f"{place.layout}/after", after)
    report_progress(f"{place.key}: compared, saves for Hugging Face + PEFT")
    model.save_adapter(place.folder / "adapter")
    try:
        merged = model.export_merged()
        if groups.rank == 0:
            shutil.rmtree(place.folder / "exported", ignore_errors=True)
            merge_folder(case.model, place.folder / "adapter", place.folder / "exported")  # as ``megarl export`` does
    except UnsupportedError as error:
        report_progress(f"{place.key}: not exported, and so not compared, are merged and base weights: {error}")
        return findings
    write_merged(merged, case.model, place.folder / "merged")
    return [*findings, compare_base(model, case.model)]


def run_updates(model: TrainedModel, case: Case, checkpoint: Path) -> Outcome:
    """Train as ``reference.run_reference`` does, and save a checkpoint before the last update."""
    config, batch = model.config.train, model.pack(case.samples())
    logprobs, base_logprobs = model.forward(batch), model.forward(batch, adapter=False)
    gradients: dict[str, torch.Tensor] = {}
    norms, entropy = [], float("nan")
    for step in range(config.steps):
        if step == config.steps - 1:
            if model.groups.rank == 0:
                shutil.rmtree(checkpoint, ignore_errors=True)
            model.save_checkpoint(checkpoint)
        metrics = model.forward_backward(model.pack(case.samples(), case.weights(step)), SurrogateLoss())
        if step == 0:
            gradients, entropy = model.gradients(), metrics["entropy"]
        norms.append(model.optim_step(config.learning_rate)["grad_norm"])
        report_progress(f"{place_name(model.config)}: update {step + 1} of {config.steps} done")
    model.finish_checkpoint()
    return Outcome(logprobs, base_logprobs, entropy, gradients, norms, exported_adapter(model))


def resume(saved: Place, here: Place, groups: Groups) -> Finding:
    """Load a checkpoint of another layout into a fresh model, and repeat the last update."""
    model = build(here, groups)
    model.load_checkpoint(saved.folder / "checkpoint")
    train = here.config.train
    model.forward_backward(model.pack(here.case.samples(), here.case.weights(train.steps - 1)), SurrogateLoss())
    model.optim_step(train.learning_rate)
    rule, adapter = here.case.rule, exported_adapter(model)
    rows = {f.row: f for f in compare_adapters(adapter, here.case.read("truth"), rule)}
    finding = rows[UPDATE if rule.by_norm else ADAPTER]
    if groups.rank == 0 and rule.needs_yardstick(Finding(CHECKPOINT, finding.worst, finding.error)):
        here.case.write(saved.resumed, adapter)  # used to name the first tensor if the row fails
    return Finding(CHECKPOINT, f"at {here.layout}: {finding.worst}", finding.error)


def exported_adapter(model: TrainedModel) -> dict[str, torch.Tensor]:
    """Return the whole adapter under PEFT's names, copied to the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in model.export_weights(adapter_only=True)}


def compare_base(model: TrainedModel, folder: Path) -> Finding:
    """Compare exported base weights with the file's, bit for bit in the model's dtype; none may be missing or extra."""
    source, worst, largest = WeightFolder(folder), "", -1.0
    unseen = set(source.file_of)
    for name, tensor in model.export_weights(adapter_only=False):
        unseen.discard(name)
        error = float("inf")
        if name in source.file_of:
            original = source.get_slice(name)[:].to(tensor.dtype)
            error = _largest_difference(tensor.cpu(), original)
        if is_worse(error, largest):
            worst, largest = name, error
    if missing := sorted(name for name in unseen if not _never_exported(name, model.hf_config)):
        return Finding(BASE_WEIGHTS, f"{missing[0]} (missing)", float("inf"))
    return Finding(BASE_WEIGHTS, worst, largest)


def _largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if torch.equal(actual, expected):
        return 0.0
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual.double() - expected.double()).abs().max())


def _never_exported(name: str, hf_config: dict[str, Any]) -> bool:
    """True for tensors that are never exported: copies of tied embeddings, RoPE's frequencies, extra layers."""
    if name == OUTPUT[1]:
        return bool(hf_config.get("tie_word_embeddings"))
    prefix, _, rest = name.partition("layers.")
    beyond = prefix == "model." and int(rest.partition(".")[0]) >= hf_config["num_hidden_layers"]
    return beyond or name.endswith(".rotary_emb.inv_freq")
