# SPDX-License-Identifier: Apache-2.0
"""Define every error that megarl raises on purpose.

Each class is also the standard exception that a caller would expect (``ConfigError`` is a ``ValueError``), so code that
does not know megarl handles it too. Messages name the field, the value and the fix.
"""

import difflib
from collections.abc import Iterable, Sequence


class MegarlError(Exception):
    """Base of all errors raised on purpose; the CLI prints these without a traceback."""


class ConfigError(MegarlError, ValueError):
    """A recipe, an override or an option is wrong; nothing was started."""


class UnsupportedError(MegarlError, NotImplementedError):
    """The request is valid but not supported here; the message says what is supported."""


class DataError(MegarlError, ValueError):
    """A data row, a prompt or a sample is malformed; the message names file, row and field."""


class RewardError(MegarlError, RuntimeError):
    """A reward function raised, or returned something other than a finite number."""


class EpisodeError(MegarlError, RuntimeError):
    """An environment raised, never ended, or returned something other than a trajectory of its own episode."""


class AdapterError(MegarlError, ValueError):
    """A LoRA adapter is truncated, has a wrong shape or names a target that the model lacks."""


class ModelError(MegarlError, ValueError):
    """A Hugging Face model folder is incomplete or does not match its config."""


class CheckpointError(MegarlError, RuntimeError):
    """A training checkpoint cannot be written, read, or does not belong to this run."""


class WeightSyncError(MegarlError, RuntimeError):
    """Weights did not reach the sampler exactly; the run stops instead of sampling from other weights."""


class StaleVersionError(MegarlError, RuntimeError):
    """A sampler was asked for a policy version other than the one it holds."""


class LossInputError(MegarlError, ValueError):
    """Per-token inputs of a loss disagree in length or hold values a loss cannot use."""


class WorkerError(MegarlError, RuntimeError):
    """A trainer or sampler process died or raised; the cause is chained or quoted."""


class NodeLostError(MegarlError, RuntimeError):
    """A node of the cluster was lost, and none came in its place within ``train.node_seconds``."""


class LostError(WorkerError):
    """Trainer ranks or engines died, give no sign of life, or did not answer in time.

    Attributes:
        names: of those participants.
    """

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str], message: str) -> "LostError":
        """Return the error about some participants."""
        error = cls(message)
        error.names = tuple(names)
        return error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to ``name``, or ``""``.

    Args:
        name: the name that the user wrote.
        known: the names that are possible.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def first_few(problems: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` problems, one per indented line, and a line that counts the rest."""
    lines = [f"  {problem}" for problem in problems[:most]]
    if len(problems) > most:
        lines.append(f"  and {len(problems) - most} more")
    return "\n".join(lines)


def pick(registry: dict, name: str, what: str, error: type[MegarlError] = ConfigError):
    """Return ``registry[name]``; raise ``error`` with the registered names and the nearest one if it is missing.

    Args:
        registry: maps names to entries.
        name: the requested name.
        what: what the registry holds, for the message (``"loss"``, ``"task"``).
        error: the class to raise.
    """
    if name in registry:
        return registry[name]
    raise error(f"unknown {what} '{name}'{nearest(name, registry)} (known: {', '.join(sorted(registry))})")
