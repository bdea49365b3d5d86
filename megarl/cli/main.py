# SPDX-License-Identifier: Apache-2.0
"""Define the command `megarl` and call the function of each command. An error prints one message, no traceback."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import megarl
from megarl.cli import bench, completion, evaluate, report, sample, serve, verify
from megarl.cli.arguments import Parser, parse
from megarl.errors import ConfigError, MegarlError

if TYPE_CHECKING:
    from megarl.config import RunConfig

INTERRUPTED = 130
EXAMPLES = """\
examples:
  megarl train examples/arithmetic/run.yaml model.path=MODEL  train a recipe
  megarl train RECIPE.yaml train.steps=50 --lora.r=8          change settings, with or without --
  megarl config RECIPE.yaml lora.r=8                          all settings; marks what you changed
  megarl resume runs/RUN                                      go on from the last checkpoint
  megarl export runs/RUN --format peft --out adapter          the adapter, for PEFT and vLLM
  megarl export runs/RUN --format merged --out model          the model with the adapter merged
  megarl eval runs/RUN MODEL --task arithmetic                a run beside its base model
  megarl sample runs/RUN "What is 3 + 4?"                     talk to what was trained
  megarl serve runs/RUN                                       vLLM's OpenAI server with the adapter
  megarl report runs/RUN runs/OTHER --out page.html           curves and completions, as one page
  megarl verify MODEL parallel.tensor=2                       a layout against Hugging Face + PEFT
  megarl bench train qwen3-0.6b                               the speed of a training step
  eval "$(megarl completion bash)"                            complete commands and settings

`megarl COMMAND --help` tells more of each. Settings are documented in megarl/config/sections/."""
OVERRIDES = "values that replace the recipe's; `--section.key=value` means the same"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = parse(parser(), sys.argv[1:] if argv is None else argv)
    run: Callable[[argparse.Namespace], int | None] = arguments.run
    if not arguments.online:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported late, so that --help imports nothing slow.
    from megarl.launch.processes import stop_on_sigterm

    try:
        with stop_on_sigterm():
            return run(arguments) or 0
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as error:
        print(f"megarl: interrupted{f' by {error}' if str(error) else ''}", file=sys.stderr)
        return INTERRUPTED


def parser() -> Parser:
    """Build the command line's parser."""
    top = Parser(
        prog="megarl",
        description="LoRA reinforcement learning: a Megatron-Core trainer, a vLLM sampler.",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    # Commands that are online may download the model and the data that the user names.
    top.set_defaults(online=False)
    commands = top.add_subparsers(required=True, metavar="COMMAND", title="commands")
    train = commands.add_parser("train", help="train a recipe", description="Train a recipe; prints the run folder.")
    train.add_argument("recipe", metavar="RECIPE", help="YAML recipe")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    train.set_defaults(run=_train, online=True)
    resume = commands.add_parser("resume", help="go on with a run from its last checkpoint, with its own settings")
    resume.add_argument("source", metavar="RUN", help="run folder")
    resume.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the run's")
    resume.set_defaults(run=_resume, online=True)
    show = commands.add_parser("config", help="show a recipe's settings, and which differ from the defaults")
    show.add_argument("source", metavar="RECIPE_OR_RUN", help="YAML recipe or run folder")
    show.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    show.add_argument("--changed", action="store_true", help="only the settings that differ")
    show.set_defaults(run=_config, online=True)
    export = commands.add_parser("export", help="write a run's adapter or merged model")
    export.add_argument("source", metavar="RUN", help="run folder")
    export.add_argument(
        "--format", choices=["peft", "merged"], required=True, help="PEFT directory or Hugging Face folder"
    )
    export.add_argument("--out", required=True, help="folder to write; must not exist")
    export.set_defaults(run=_export)
    evaluate.add_parser(commands)
    sample.add_parser(commands)
    serve.add_parser(commands)
    report.add_parser(commands)
    bench.add_parser(commands)
    verify.add_parser(commands)
    completion.add_parser(commands, parser)
    return top


def _train(arguments: argparse.Namespace) -> None:
    from megarl.cli.resume import load_run_config
    from megarl.files import user_path

    recipe = Path(arguments.recipe)
    config = load_run_config(recipe, arguments.overrides)
    _start(config, user_path("recipe", recipe).resolve().parent)


def _resume(arguments: argparse.Namespace) -> None:
    from megarl.cli.resume import load_resumed_config

    config = load_resumed_config(arguments.source, arguments.overrides)
    _start(config, Path.cwd())


def _start(config: "RunConfig", recipe_dir: Path) -> None:
    """Run, and print the run folder as the last line."""
    print("importing torch, Ray and transformers", file=sys.stderr, flush=True)
    if not sys.warnoptions:  # warnings of libraries, in this process only
        warnings.simplefilter("ignore")
    from megarl.launch.run import train

    print(train(config, recipe_dir))


def _config(arguments: argparse.Namespace) -> None:
    from megarl.cli.resume import load_resumed_config, load_run_config
    from megarl.config.changes import annotate, changed_yaml

    source = Path(arguments.source)
    if source.is_dir():
        config = load_resumed_config(arguments.source, arguments.overrides)
    else:
        config = load_run_config(source, arguments.overrides)
    print((changed_yaml if arguments.changed else annotate)(config), end="")


def _export(arguments: argparse.Namespace) -> None:
    from megarl.cli.export import export_run
    from megarl.files import user_path

    export_run(user_path("RUN", arguments.source), arguments.format, user_path("--out", arguments.out))
    print(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
