# SPDX-License-Identifier: Apache-2.0
"""Add `megarl bench`, which measures speed and memory on the user's hardware."""

import argparse
import json
from pathlib import Path

from megarl.cli.progress import progress

MODEL = "folder, hub id, qwen3-0.6b, qwen3-8b, qwen3-30b-a3b, tiny or tiny-moe"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `bench train`, `bench sync`, `bench rollout` and `bench loop` to the command line."""
    bench = commands.add_parser("bench", help="measure training steps, weight syncs, rollouts and whole runs")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    train = kinds.add_parser("train", help="a training step, on one device or at a parallel layout")
    train.add_argument("model", metavar="MODEL_OR_SHAPE", help=MODEL)
    train.add_argument("overrides", nargs="*", metavar="key=value", help="tensor, data, length, steps, contenders, ...")
    train.add_argument("--profile", action="store_true", help="write a table of the top kernels of each contender")
    train.add_argument("--graph", action="store_true", help="write the compiler's graph of a layer, both passes in one")
    train.add_argument("--out", default="runs/bench", help="folder for logs, results and profiles")
    train.set_defaults(run=_train, online=True)
    sync = kinds.add_parser("sync", help="bring new weights from the trainer into a live engine")
    sync.add_argument("model", metavar="MODEL_OR_SHAPE", help=MODEL)
    sync.add_argument(
        "overrides", nargs="*", metavar="key=value", help="transport, contents, data, engines, tensor, r, ..."
    )
    sync.add_argument("--choose", action="store_true", help="say whether adapter or merged weights pay on this host")
    sync.add_argument("--out", default="runs/bench", help="folder for logs and results")
    sync.set_defaults(run=_sync, online=True)
    rollout = kinds.add_parser("rollout", help="tokens per second of an engine, by weights, logprobs and concurrency")
    rollout.add_argument("model", metavar="MODEL_OR_SHAPE", help="folder, hub id, qwen3-0.6b, qwen3-8b or tiny")
    rollout.add_argument("overrides", nargs="*", metavar="key=value", help="concurrency, contents, plain, samples, ...")
    rollout.add_argument("--out", default="runs/bench", help="folder for logs")
    rollout.set_defaults(run=_rollout, online=True)
    loop = kinds.add_parser("loop", help="start-up and steps of a run, sampling and training in turns and side by side")
    loop.add_argument("model", metavar="MODEL_OR_SHAPE", help=MODEL)
    loop.add_argument("overrides", nargs="*", metavar="key=value", help="ways, steps, prompts, ..., or the recipe's")
    loop.add_argument("--out", default="runs/bench", help="folder for logs, configs and metrics")
    loop.set_defaults(run=_loop, online=True)


def _train(arguments: argparse.Namespace) -> None:
    """Print the table, and the whole report as one line of JSON."""
    from megarl.bench.report import table
    from megarl.bench.training.settings import parse_settings
    from megarl.bench.training.train import bench_train

    settings = parse_settings(arguments.model, arguments.overrides)
    with progress("starting") as show:
        report = bench_train(settings, _out(arguments), profile=arguments.profile, graph=arguments.graph, report=show)
    print(table(report))
    print(json.dumps(report))


def _sync(arguments: argparse.Namespace) -> None:
    """Print the table, and the whole report as one line of JSON."""
    from megarl.bench.syncing.settings import parse_sync_settings

    chosen = ["choose=true"] if arguments.choose else []
    settings = parse_sync_settings(arguments.model, [*arguments.overrides, *chosen])
    from megarl.bench.syncing.report import sync_table
    from megarl.bench.syncing.sync import bench_sync

    with progress("starting") as show:
        report = bench_sync(settings, _out(arguments), report=show)
    print(sync_table(report))
    print(json.dumps(report))


def _rollout(arguments: argparse.Namespace) -> None:
    """Print the table, and the whole report as one line of JSON."""
    from megarl.bench.rollouts.settings import parse_rollout_settings

    settings = parse_rollout_settings(arguments.model, arguments.overrides)
    from megarl.bench.rollouts.report import rollout_table
    from megarl.bench.rollouts.rollout import bench_rollout

    with progress("starting") as show:
        report = bench_rollout(settings, _out(arguments), report=show)
    print(rollout_table(report))
    print(json.dumps(report))


def _loop(arguments: argparse.Namespace) -> None:
    """Print the table, and the whole report as one line of JSON."""
    from megarl.bench.looping.settings import parse_loop_settings

    settings, overrides = parse_loop_settings(arguments.model, arguments.overrides)
    from megarl.bench.looping.loop import bench_loop
    from megarl.bench.looping.report import loop_table

    with progress("starting") as show:
        report = bench_loop(settings, _out(arguments), overrides, report=show)
    print(loop_table(report))
    print(json.dumps(report))


def _out(arguments: argparse.Namespace) -> Path:
    """Make the folder of ``--out``.

    Raises:
        ConfigError: it is a file, or cannot be made.
    """
    from megarl.errors import ConfigError
    from megarl.files import user_path

    out = user_path("--out", arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out is '{arguments.out}', where no folder can be made: {error.strerror}") from error
    return out
