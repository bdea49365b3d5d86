# SPDX-License-Identifier: Apache-2.0
"""Run every layout of four Megatron ranks, transport and kind of engines, and compare logprobs."""

import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import transformers

from megarl.verify.inputs.adapters import make_adapter
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks
from tests.sync.cases import RANKS, Rig, all_rigs
from tests.sync.stages import Row, run_rig

SIZES = {"vocab_size": 320, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2, "initializer_range": 0.05}


def chosen(words: Sequence[str]) -> list[Rig]:
    """Return the rigs with the stages whose name has all words."""
    rigs = []
    for rig in all_rigs():
        names = {stage: f"{rig.name}, {stage.layout}, {stage.way}" for stage in rig.stages}
        stages = tuple(stage for stage, name in names.items() if all(word in name for word in words))
        if stages:
            rigs.append(dataclasses.replace(rig, stages=stages))
    return rigs


def rows(words: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of all stages whose names have all words."""
    for rig in chosen(words):
        yield from run(rig)


def run(rig: Rig) -> list[Row]:
    """Run a rig in a folder of its own."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="megarl-sync-") as folder:
        model = make_model(Path(folder) / "model", rig.family, tied=False, **SIZES)
        make_adapter(model, Path(folder) / "adapter", seed=1)
        return run_ranks(run_rig, RANKS, rig, folder, report=lambda line: print(line, file=sys.stderr, flush=True))[0]


def table(found: Sequence[Row]) -> str:
    """Return the rows as Markdown; those outside of the bounds are marked."""
    lines = [
        "| engines | trainer | transport | trainer - sampler | PEFT - sampler | base | one version apart | sync, ms |",
        "| --- | --- | --- | --: | --: | --: | --: | --: |",
    ]
    for row in found:
        base = "-" if math.isnan(row.base) else f"{row.base:.1e}"
        errors = f"{row.trainer:.1e} | {row.peft:.1e} | {base} | {row.effect:.2f}"
        mark = f" **{row.problem}**" if row.problem else ""
        lines.append(f"| {row.rig} | {row.layout} | {row.transport} | {errors} | {1e3 * row.seconds:.0f}{mark} |")
    return "\n".join(lines)
