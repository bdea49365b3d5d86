# SPDX-License-Identifier: Apache-2.0
"""Print a shell script that completes commands, files and the names of settings (`megarl completion`)."""

import argparse
from collections.abc import Callable

from megarl.errors import ConfigError

SHELLS = ("bash", "zsh")
# Shell functions that offer ``section.key=``.
PREAMBLE = {
    "bash": '_megarl_keys() {{ compopt -o nospace; compgen -W "{keys}" -- "$1"; }}',
    "zsh": "_megarl_keys() {{ compadd -S '' -- {keys} }}",
}
FOLDERS = {"RUN", "TARGET"}
FILES = {"RECIPE", "RECIPE_OR_RUN", "MODEL", "MODEL_OR_SHAPE", "FILE"}


def add_parser(commands: argparse._SubParsersAction, build: Callable[[], argparse.ArgumentParser]) -> None:
    """Add `completion` to the command line that ``build`` makes."""
    parser = commands.add_parser(
        "completion",
        help="print a shell script that completes what is typed",
        description='Print a completion script. bash: eval "$(megarl completion bash)"; zsh, in a folder of fpath: '
        "megarl completion zsh > _megarl.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=lambda arguments: print(script(build(), arguments.shell)))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of a command line.

    Raises:
        ConfigError: the package ``shtab`` is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("`megarl completion` needs the package 'shtab'; install it: pip install shtab") from error
    from megarl.config import RunConfig
    from megarl.config.changes import setting_names

    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for action in [action for command in commands.choices.values() for action in command._actions]:
        if action.metavar in FOLDERS or action.dest == "out":
            action.complete = shtab.DIRECTORY
        elif action.metavar in FILES:
            action.complete = shtab.FILE
        elif action.metavar == "section.key=value":
            action.complete = dict.fromkeys(SHELLS, "_megarl_keys")
    keys = " ".join(f"{name}=" for name in setting_names(RunConfig))
    return shtab.complete(parser, shell, preamble=PREAMBLE[shell].format(keys=keys))
