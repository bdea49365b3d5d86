# SPDX-License-Identifier: Apache-2.0
"""Parse the command line: `--train.steps=2` means `train.steps=2`, and a wrong command names the nearest one."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from megarl.errors import nearest

# ``section.key=value`` or ``--section.key=value``. The part before the first dot is a section's name.
OVERRIDE = re.compile(r"(?:--)?([a-z_]+(?:\.[^\s./=]+)+=.*)", re.DOTALL)
DASHED_KEY = re.compile(r"--[a-z_]+(?:\.[^\s./=]+)+")


class Parser(argparse.ArgumentParser):
    """An argument parser that keeps line breaks in its help and names the nearest command in its errors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Print one message and exit with status 2, as for a wrong recipe."""
        self.exit(2, f"{self.prog}: {message}\nRun '{self.prog} --help' for usage.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices; for a command, name the nearest one."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(
                f"unknown command '{value}'{nearest(value, action.choices)} (known: {', '.join(action.choices)})"
            )
        super()._check_value(action, value)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose overrides may stand anywhere after the command, with or without leading dashes.

    Args:
        parser: the parser. Its commands may take ``overrides``.
        argv: without the program's name.

    Returns:
        The result of argparse. ``overrides`` holds ``section.key=value`` without dashes, in the order given. A command
        whose defaults name a list in ``late`` gets what else follows an option there.
    """
    plain, overrides = split_overrides(argv)
    arguments, rest = parser.parse_known_args(plain)
    takes = hasattr(arguments, "overrides")
    # argparse takes positionals only before the first option; here they may follow it. Keys of `bench` have no dots.
    if words := getattr(arguments, "late", ""):
        setattr(arguments, words, [*getattr(arguments, words), *(text for text in rest if not text.startswith("-"))])
        rest = [text for text in rest if text.startswith("-")]
    late = [text.removeprefix("--") if "=" in text and not words else text for text in rest] if takes else rest
    if wrong := [text for text in late if text.startswith("-") or not takes] or ([] if takes else overrides):
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if takes:
        arguments.overrides = [*arguments.overrides, *late, *overrides]
    return arguments


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return ``(other arguments, overrides)``; ``--section.key value`` is an override too, without its dashes."""
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
