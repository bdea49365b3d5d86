# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.sync [--out FILE] [WORD ...]``: every layout, transport and kind of engine; prints a table.

Four Megatron ranks and up to two real vLLM engines run on CPUs. WORDs keep the stages whose name has all of them. The
exit status is 1 if a row is outside its bounds.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import transformers

from megarl.verify.inputs.adapters import make_adapter
from tests.helpers.models import make_model
from tests.helpers.ranks import run_ranks
from tests.sync.cases import RANKS, Rig, all_rigs
from tests.sync.stages import Row, run_rig

SIZES = {"vocab_size": 320, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2, "initializer_range": 0.05}
# Bounds of float32 logprobs: the engines agree with the trainer and with PEFT, and no version is the one before.
AGREEMENT, EFFECT = 1e-4, 1e-1


def is_good(row: Row) -> bool:
    """Return True if a row is within its bounds; NaN in ``base`` means that there is none."""
    base = row.base != row.base or row.base < AGREEMENT
    return row.trainer < AGREEMENT and row.peft < AGREEMENT and base and row.effect > EFFECT


def chosen(words: Sequence[str]) -> list[Rig]:
    """Return the rigs with the stages whose name has all words."""
    rigs = []
    for rig in all_rigs():
        names = {stage: f"{rig.name}, {stage.layout}, {stage.transport}" for stage in rig.stages}
        stages = tuple(stage for stage, name in names.items() if all(word in name for word in words))
        if stages:
            rigs.append(dataclasses.replace(rig, stages=stages))
    return rigs


def run(rig: Rig) -> list[Row]:
    """Run a rig in a folder of its own."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="megarl-sync-") as folder:
        model = make_model(Path(folder) / "model", rig.family, tied=False, **SIZES)
        make_adapter(model, Path(folder) / "adapter", seed=1)
        return run_ranks(run_rig, RANKS, rig, folder, report=lambda line: print(line, file=sys.stderr, flush=True))[0]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown; those outside of the bounds are marked."""
    lines = [
        "| engines | trainer | transport | trainer - sampler | PEFT - sampler | base | one version apart | sync, ms |",
        "| --- | --- | --- | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        errors = f"{row.trainer:.1e} | {row.peft:.1e} | {row.base:.1e} | {row.effect:.2f}"
        mark = "" if is_good(row) else " **outside**"
        lines.append(f"| {row.rig} | {row.layout} | {row.transport} | {errors} | {1e3 * row.seconds:.0f}{mark} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sync", description=__doc__)
    parser.add_argument("--out", type=Path, help="file that gets the table too")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for rig in chosen(given.words):
        rows += run(rig)
        print(table(rows[-len(rig.stages) :]), flush=True)
        if given.out:
            given.out.write_text(table(rows) + "\n")
    bad = [row for row in rows if not is_good(row)]
    print(f"{len(rows)} stages, {len(bad)} outside their bounds")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
