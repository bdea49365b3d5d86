# SPDX-License-Identifier: Apache-2.0
"""Run `megarl verify`. The arguments are checked before anything heavy is imported."""

import argparse
import sys
import tempfile
from pathlib import Path

from megarl.cli.progress import progress
from megarl.errors import ConfigError, UnsupportedError
from megarl.files import write_text, writing

RANKS = 4


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `verify` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="compare a layout with one process of Hugging Face + PEFT",
        description="Compare one layout of a model, or all layouts of a tiny model, with one process of Hugging Face "
        "+ PEFT. Without --full: two AdamW updates on 4 samples (in bfloat16 80) instead of three on 10; every row "
        "stays.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder or hub id")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="of parallel, lora, model and train, as in a recipe"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    parser.add_argument("--matrix", action="store_true", help="all layouts, on a tiny random model of MODEL's family")
    parser.add_argument("--full", action="store_true", help="three updates on more samples; --matrix does it always")
    parser.add_argument("--ranks", type=int, help=f"with --matrix: layouts of at most so many ranks (default {RANKS})")
    parser.add_argument(
        "--layouts", metavar="NAMES", help="with --matrix: only these, such as 'TP2*,PP2xCP2'; * is any characters"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.set_defaults(run=_verify, online=True)


def _verify(arguments: argparse.Namespace) -> int:
    """Verify, and print the reports. Returns 0 if every row passed, else 1.

    Raises:
        ConfigError: arguments or settings are wrong; nothing was started.
        MegarlError: verifying failed.
    """
    _check(arguments)
    from rich.console import Console

    from megarl.hub import local_model
    from megarl.verify import report as output
    from megarl.verify.inputs.settings import verify_config

    full = arguments.full or arguments.matrix
    try:
        model = local_model(arguments.model, config_only=arguments.matrix)
        config = verify_config(model, arguments.overrides, full=full)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from error
    with progress("importing torch, Megatron-Core and transformers") as report:
        # Imported late: torch, mcore and transformers take seconds, here and in the processes to be started.
        from megarl.verify.launch import warm_up

        warm_up()
        from megarl.verify import command

        if arguments.matrix:
            with tempfile.TemporaryDirectory(prefix="megarl-verify-") as folder:
                tiny = command.tiny_config(config, Path(folder) / "model")
                reports, refused = command.verify_matrix(tiny, arguments.ranks or RANKS, report, _names(arguments))
                text = output.matrix_markdown(reports, refused, arguments.overrides)
        else:
            reports = command.verify_model(config, report, full=full)
            text = output.markdown(reports[0])
    if arguments.json:
        print(output.as_json(reports))
    elif not arguments.matrix:
        Console().print(output.table(reports[0]))
    else:
        print(text, end="")
    for line in [line for verified in reports for line in verified.differences]:
        print(line, file=sys.stderr)
    if arguments.out:
        with writing(arguments.out, ConfigError):
            write_text(arguments.out, text)
    return 0 if all(verified.passed for verified in reports) else 1


def _names(arguments: argparse.Namespace) -> list[str]:
    return [name.strip() for name in (arguments.layouts or "").split(",") if name.strip()]


def _check(arguments: argparse.Namespace) -> None:
    if arguments.layouts is not None and not arguments.matrix:
        raise ConfigError("--layouts is for --matrix; a single layout is given by parallel.*")
    if arguments.layouts is not None and not _names(arguments):
        raise ConfigError(f"--layouts is '{arguments.layouts}', which names none; leave it out for all layouts")
    if arguments.ranks is not None and not arguments.matrix:
        raise ConfigError("--ranks is for --matrix; a single layout's ranks follow from parallel.*")
    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError(f"--ranks is {arguments.ranks}; it must be at least 1")
    if arguments.out and arguments.out.is_dir():
        raise ConfigError(f"--out is '{arguments.out}', which is a folder; name a file")
    if arguments.out and not arguments.out.parent.is_dir():
        raise ConfigError(f"--out '{arguments.out}': the folder '{arguments.out.parent}' does not exist")
    for override in arguments.overrides if arguments.matrix else ():
        if override.startswith("parallel."):
            raise ConfigError(f"override '{override}' with --matrix, which runs all layouts; leave it out")
        if override.startswith("lora.init_from="):
            raise ConfigError(f"override '{override}' with --matrix: it does not fit a tiny model; leave it out")
