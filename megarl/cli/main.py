"""`megarl train|resume|export|bench|verify`: thin; errors are one message, no traceback."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.cli import bench, verify
from megarl.errors import ConfigError, MegarlError
from megarl.files import user_path
from megarl.launch.processes import stop_on_sigterm

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = _parse(argv)
    run: Callable[[argparse.Namespace], int | None] = arguments.run
    try:
        with stop_on_sigterm():
            return run(arguments) or 0
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as error:
        print(f"megarl: interrupted{f' by {error}' if str(error) else ''}", file=sys.stderr)
        return INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes overrides only before the first option; here they may follow it too."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(text.startswith("-") for text in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="megarl", description="LoRA reinforcement learning on Megatron-Core.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train a recipe")
    train.add_argument("recipe", help="YAML recipe")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    train.set_defaults(run=_train)
    resume = commands.add_parser("resume", help="go on with a run from its last checkpoint, with its own settings")
    resume.add_argument("source", metavar="RUN", help="run folder")
    resume.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the run's")
    resume.set_defaults(run=_resume)
    export = commands.add_parser("export", help="write a run's adapter or merged model")
    export.add_argument("source", metavar="RUN", help="run folder")
    export.add_argument(
        "--format", choices=["peft", "merged"], required=True, help="PEFT directory or Hugging Face folder"
    )
    export.add_argument("--out", required=True, help="folder to write; must not exist")
    export.set_defaults(run=_export)
    bench.add_parser(commands)
    verify.add_parser(commands)
    return top


def _train(arguments: argparse.Namespace) -> None:
    from megarl.cli.resume import load_run_config

    recipe = Path(arguments.recipe)
    config = load_run_config(recipe, arguments.overrides)
    # Only now: torch, Ray and transformers take seconds to import.
    from megarl.launch.run import train

    print(train(config, user_path("recipe", recipe).resolve().parent))


def _resume(arguments: argparse.Namespace) -> None:
    from megarl.cli.resume import load_resumed_config

    config = load_resumed_config(arguments.source, arguments.overrides)
    from megarl.launch.run import train

    print(train(config, Path.cwd()))


def _export(arguments: argparse.Namespace) -> None:
    from megarl.cli.export import export_run

    export_run(user_path("RUN", arguments.source), arguments.format, user_path("--out", arguments.out))
    print(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
