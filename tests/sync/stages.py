# SPDX-License-Identifier: Apache-2.0
"""Run the stages of a rig on the trainer's ranks; rank 0 has the engines too."""

import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import transformers

from megarl.checkpoint_engine.choice import Memory, Receiver, Sender
from megarl.checkpoint_engine.weight_sync import WeightSync
from megarl.config import ParallelConfig
from megarl.futures import done
from megarl.lora import attach, load_peft_config
from megarl.model.megatron_model import MegatronModel
from megarl.parallel.device import pick_device
from megarl.parallel.groups import destroy_groups, init_groups, leave_layout
from megarl.sampler.process import SamplerProcess
from megarl.types import Sample
from megarl.verify.launch import free_memory, report_progress
from megarl.verify.reference.hf_peft import load_reference, logprobs_of
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.cases import make_config
from tests.sync.cases import ENGINES, LAYOUTS, Rig, Stage

# Bounds of float32 logprobs.
AGREEMENT, EFFECT = 1e-4, 1e-1
VERSIONS = 3
PROMPTS, GROUP, RESPONSE = 4, 2, 12
# Large, so that a version is far from the one before.
LEARNING_RATE = 2e-2
# The rank on whose GPU each engine is, where they are near one.
NEAR = (1, 3)
SAMPLER = {
    "samples_per_prompt": GROUP,
    "max_prompt_tokens": 64,
    "max_response_tokens": RESPONSE,
    "kv_cache_gib": 0.05,
    "max_num_seqs": 16,
}


class Row(NamedTuple):
    """The result of a stage, as the largest |difference| of logprobs over all versions and engines.

    Attributes:
        rig, layout, transport: the stage.
        trainer: sampler and trainer.
        peft: sampler and Hugging Face + PEFT, from the saved adapter.
        base: engines' scores and Hugging Face's of the model without adapter, under a version without one; NaN if the
            engines hold merged weights.
        effect: least over the versions: sampler and PEFT with the adapter of the version before.
        seconds: mean of a sync of the policy.
    """

    rig: str
    layout: str
    transport: str
    trainer: float
    peft: float
    base: float
    effect: float
    seconds: float

    @property
    def problem(self) -> str:
        """The first bound that the row is outside of; empty if there is none."""
        checks = {
            "sampler and trainer differ": self.trainer < AGREEMENT,
            "sampler and PEFT differ": self.peft < AGREEMENT,
            "the base differs": math.isnan(self.base) or self.base < AGREEMENT,
            "a version equals the one before": self.effect > EFFECT,
        }
        return next((name for name, good in checks.items() if not good), "")


def run_rig(rig: Rig, folder: str) -> list[Row]:
    """Run all stages on each rank; rank 0 returns the rows."""
    transformers.utils.logging.disable_progress_bar()
    device = pick_device("auto")
    model_folder, log = Path(folder) / "model", Path(folder) / "engines.log"
    rows = []
    with ExitStack() as stack:
        engines: list[SamplerProcess] = []
        here = None
        for stage in rig.stages:
            if stage.layout != here:
                leave_layout()
                groups = init_groups(ParallelConfig(**LAYOUTS[stage.layout]), device, seed=3)
                here = stage.layout
            if groups.rank == 0 and not engines:
                engines = start_engines(rig, model_folder, log, stack)
            report_progress(f"{rig.name}: {stage.layout}, {stage.way}")
            row = run_stage(rig, stage, groups, engines, Path(folder))
            rows.append(row)
            free_memory()
        destroy_groups()
    return rows


def start_engines(rig: Rig, model: Path, log: Path, stack: ExitStack) -> list[SamplerProcess]:
    """Start the rig's engines at the same time."""
    count, tensor = ENGINES[rig.engines]
    settings = {
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},  # make_adapter's default
        "sampler": SAMPLER | {"parallel": {"tensor": tensor}},
        "checkpoint_engine": {"content": rig.content},
    }
    engines = [
        stack.enter_context(
            SamplerProcess({"path": str(model), "dtype": "float32"}, **settings, index=index, log=log, threads=1)
        )
        for index in range(count)
    ]
    return [engine.wait() for engine in engines]


def run_stage(rig: Rig, stage: Stage, groups: Any, engines: list[SamplerProcess], folder: Path) -> Row | None:
    """Bring several versions of one model to the engines, and compare what they draw."""
    adapter = folder / "adapter"
    config = make_config(folder / "model", LAYOUTS[stage.layout])
    model = MegatronModel(config.trainer, groups, attach(load_peft_config(adapter), seed=3))
    model.load_adapter(adapter)
    place(model, groups.rank, engines, near=stage.near)
    section = {"transport": stage.transport, "content": rig.content, "bucket_mib": 1, "timeout_seconds": 60}
    weights = WeightSync(model, engines, section)
    weights.sync("base")
    if stage.near:
        sends = model._outbox is not None and len(model._outbox.sender._link.indices) > 0
        assert sends == (groups.rank in NEAR), f"rank {groups.rank} is {'' if sends else 'not '}a sender"
    random = np.random.default_rng(5)
    errors: dict[str, list[float]] = {"trainer": [], "peft": [], "effect": []}
    seconds, before = [], None
    for version in range(VERSIONS):
        report = weights.sync()
        seconds.append(sum(report.seconds.values()))
        samples = on_every_rank(draw(engines, version, random) if groups.rank == 0 else None)
        batch = model.pack(samples, np.full(len(samples), 1.0 / len(samples) / RESPONSE))
        errors["trainer"].append(largest(model.forward(batch), samples))
        saved = folder / f"saved-{version}"
        if groups.rank == 0:
            shutil.rmtree(saved, ignore_errors=True)
        model.save_adapter(saved)
        if groups.rank == 0:
            reference = load_reference(folder / "model", saved)
            errors["peft"].append(distance(reference, samples))
            if before is not None:
                errors["effect"].append(distance(before, samples))
            before = reference
        model.forward_backward(batch, SurrogateLoss())
        model.optim_step(LEARNING_RATE)
    base = base_error(engines, folder / "model", samples) if rig.content == "adapter" else float("nan")
    model.finish_sync()
    if groups.rank != 0:
        return None
    worst = (max(errors["trainer"]), max(errors["peft"]), base, min(errors["effect"]))
    return Row(rig.name, stage.layout, stage.way, *worst, float(np.mean(seconds[1:])))


def place(model: MegatronModel, rank: int, engines: list[SamplerProcess], *, near: bool) -> None:
    """Let each rank have a GPU, as far as a sync knows, and each engine that of a rank other than 0; or undo it."""
    for index, engine in enumerate(engines):
        vars(engine).pop("places", None)
        if near:
            gpu = Memory("here", f"GPU-{NEAR[index]}")
            engine.places = lambda sender, gpu=gpu: done(lambda: [Receiver(gpu)])
    if near:
        model.place = lambda: Sender(Memory("here", f"GPU-{rank}"))


def draw(engines: list[SamplerProcess], version: int, random: np.random.Generator) -> list[Sample]:
    """Draw completions of random prompts from every engine."""
    prompts = [random.integers(10, 300, random.integers(5, 60)) for _ in range(PROMPTS)]
    answers = [one for engine in engines for group in engine.generate(prompts, version) for one in group]
    samples = []
    for answer in answers:
        tokens = np.concatenate([answer.prompt_ids, answer.response_ids])
        mask = np.arange(len(tokens)) >= len(answer.prompt_ids)
        samples.append(Sample(tokens, mask, float(random.normal()), sampler_logprobs=answer.logprobs))
    return samples


def largest(logprobs: list[np.ndarray], samples: list[Sample]) -> float:
    """Return the largest |difference| from the samplers' logprobs."""
    return max(float(np.abs(ours - one.sampler_logprobs).max()) for ours, one in zip(logprobs, samples, strict=True))


@torch.no_grad()
def distance(model: torch.nn.Module, samples: list[Sample]) -> float:
    """Return the largest |difference| of a Hugging Face model's logprobs from the samplers'."""
    return largest([logprobs_of(model, one).numpy() for one in samples], samples)


@torch.no_grad()
def base_error(engines: list[SamplerProcess], model: Path, samples: list[Sample]) -> float:
    """Compare the engines' base weights with Hugging Face's, after all versions."""
    reference, tokens = load_reference(model, None), samples[0].tokens[:64]
    whole = Sample(tokens, np.arange(len(tokens)) > 0)
    expected = logprobs_of(reference, whole).numpy()
    errors = [0.0]
    for engine in engines:
        engine.use_base(10_000)
        errors.append(float(np.abs(engine.score(tokens, 10_000) - expected).max()))
    return max(errors)


def on_every_rank(value: Any) -> Any:
    """Return rank 0's value."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]
