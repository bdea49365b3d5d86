# SPDX-License-Identifier: Apache-2.0
"""The command line's own rules: `--train.steps=2` is `train.steps=2`, and a wrong command names the nearest one."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from megarl.errors import nearest

# ``section.key=value``, or ``--section.key=value``. Values of a section: the name before the first dot is a word.
OVERRIDE = re.compile(r"(?:--)?([a-z_]+(?:\.[^\s./=]+)+=.*)", re.DOTALL)
DASHED_KEY = re.compile(r"--[a-z_]+(?:\.[^\s./=]+)+")


class Parser(argparse.ArgumentParser):
    """An argument parser whose help keeps its line breaks and whose errors name the nearest command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print one message and leave with status 2, as for a wrong recipe."""
        self.exit(2, f"{self.prog}: {message}\nRun '{self.prog} --help' for usage.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is no choice; for a command, by the nearest name."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(
                f"unknown command '{value}'{nearest(value, action.choices)} (known: {', '.join(action.choices)})"
            )
        super()._check_value(action, value)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose overrides may stand anywhere after the command, with or without leading dashes.

    Args:
        parser: its commands may take ``overrides``.
        argv: without the program's name.

    Returns:
        What argparse returns; ``overrides`` hold ``section.key=value`` without dashes, in the order given.
    """
    plain, overrides = split_overrides(argv)
    arguments, rest = parser.parse_known_args(plain)
    takes = hasattr(arguments, "overrides")
    # argparse takes positionals only before the first option; here they may follow. Keys of `bench` have no dots.
    late = [text.removeprefix("--") if "=" in text else text for text in rest] if takes else rest
    if wrong := [text for text in late if text.startswith("-") or not takes] or ([] if takes else overrides):
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if takes:
        arguments.overrides = [*arguments.overrides, *late, *overrides]
    return arguments


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(other arguments, overrides)``; ``--section.key value`` and ``--section.key=value`` lose their dashes."""
    plain: list[str] = []
    overrides: list[str] = []
    rest = iter(argv)
    for text in rest:
        if match := OVERRIDE.fullmatch(text):
            overrides.append(match[1])
        elif DASHED_KEY.fullmatch(text):
            overrides.append(f"{text[2:]}={next(rest, '')}")
        else:
            plain.append(text)
    return plain, overrides
