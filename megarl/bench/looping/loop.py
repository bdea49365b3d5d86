# SPDX-License-Identifier: Apache-2.0
"""Run `megarl bench loop`: start-up and steps of `megarl train`, sampling and training in turns and side by side."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.bench.character_tokenizer import make_tokenizer
from megarl.bench.looping.recipe import write_recipe
from megarl.bench.looping.rows import measured, rows_of
from megarl.bench.looping.settings import LoopBenchSettings, Way
from megarl.bench.random_weights import TMPFS, model_folder, save_weights
from megarl.bench.shapes import SHAPES
from megarl.errors import ConfigError, WorkerError
from megarl.launch import processes
from megarl.run_folder import CONFIG, LOGS, METRICS, SUMMARY
from megarl.sampler.environment import resolve_device

# Name of a link to the model, in the folder of the logs.
LINK = "loop-model"
TRAIN = [sys.executable, "-m", "megarl.cli.main", "train"]
# Seconds between two looks at a run, and those in which a run that is ended may save.
LOOK_SECONDS, END_SECONDS = 0.5, 60
# Of a failed run's log, for the error.
TAIL_LINES = 15


def bench_loop(
    settings: LoopBenchSettings,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train once in each way, one after the other. The later runs find what the first one compiled.

    Args:
        settings: what to measure.
        out: folder for logs, configs and metrics of the runs.
        overrides: settings of the recipe, ``"section.key=value"``.
        report: called with a line before each part and after each step.

    Returns:
        ``settings``; ``overrides``; ``ways``: way -> what ``measured`` returns.

    Raises:
        ConfigError: a setting of the recipe is wrong, or another file has the link's name.
        WorkerError: a run failed; the message has the end of its log.
    """
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"settings": settings.model_dump(), "overrides": list(overrides), "ways": {}}
    # A bench that is killed leaves the runs' logs behind.
    with (
        tempfile.TemporaryDirectory(dir=out.absolute(), prefix="runs-") as runs,
        tempfile.TemporaryDirectory(dir=TMPFS) as scratch,
    ):
        folder = model_folder(settings.model, Path(scratch), settings.layers).absolute()
        path = out.absolute() / LINK if settings.model in SHAPES else folder
        recipes = {way: out / f"loop-{way}.yaml" for way in settings.ways}
        for way, recipe in recipes.items():
            write_recipe(settings, overrides, way, path, Path(runs) / way, recipe)
        if settings.model in SHAPES:
            _link(path, folder)
            report("the weights are written")
            save_weights(folder, settings.dtype, resolve_device(settings.device), settings.seed)
            make_tokenizer(folder)
        for way, recipe in recipes.items():
            report(f"{way}: a run starts; log: {out / f'loop-{way}.log'}")
            command = [*TRAIN, str(recipe), *overrides]
            result["ways"][way] = _run(command, settings, way, Path(runs) / way, out, report)
    return result


def _link(link: Path, folder: Path) -> None:
    """Give the model a path that is the same each time: what vLLM compiles, it keeps by the model's path.

    Raises:
        ConfigError: something else has the link's name.
    """
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise ConfigError(f"--out: '{link}' is not a link of this bench, which needs the name; move it, or use another")
    link.symlink_to(folder)


def _run(
    command: list[str],
    settings: LoopBenchSettings,
    way: Way,
    output: Path,
    out: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Run one training to its end, keep its logs, and return what it took. ``output`` gets its folder, and no other."""
    log, seen = out / f"loop-{way}.log", 0
    with log.open("w") as handle:
        child = processes.start(command, os.environ, handle)
        try:
            while child.poll() is None:
                time.sleep(LOOK_SECONDS)
                if len(rows := _rows(output)) > seen:
                    seen = len(rows)
                    report(f"{way}: step {seen} of {settings.steps_of(way)}: {rows[-1]['seconds']:.2f} s")
        finally:
            processes.stop(child, signal.SIGTERM, END_SECONDS)
            _keep(output, out / f"loop-{way}")
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise WorkerError(f"bench loop: the run '{way}' ended with status {child.returncode}; its log: {log}\n{tail}")
    rows = _rows(output)
    summary = json.loads((next(output.iterdir()) / SUMMARY).read_text())
    begin = settings.warmup_of(way)
    return measured(rows[begin : begin + settings.steps]) | {"start_seconds": summary["start_seconds"], "steps": rows}


def _rows(output: Path) -> list[dict[str, Any]]:
    return [row for file in output.glob(f"*/{METRICS}") for row in rows_of(file)]


def _keep(output: Path, kept: Path) -> None:
    """Copy a run's logs, config and metrics; not its completions, which are large."""
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for folder in output.glob("*"):
        for name in (CONFIG, METRICS, SUMMARY):
            if (folder / name).is_file():
                shutil.copy(folder / name, kept / name)
        if (folder / LOGS).is_dir():
            shutil.copytree(folder / LOGS, kept / LOGS)
