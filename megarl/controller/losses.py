# SPDX-License-Identifier: Apache-2.0
"""Tell who is lost by an error, and that nobody is started again."""

from megarl.errors import LostError, MegarlError, WorkerError


def names_in(error: BaseException | None) -> set[str]:
    """Return the participants that an error, or what it was raised from, names as lost."""
    names: set[str] = set()
    while error is not None:
        names |= set(error.names) if isinstance(error, LostError) else set()
        error = error.__cause__
    return names


def used_up(error: MegarlError, setting: str, most: int) -> WorkerError:
    """Return the error of a loss after which nothing is started again."""
    used = LostError.of(names_in(error), f"{error}\nit is not started again: {setting} ({most}) is used up")
    return used if most else LostError.of(names_in(error), str(error))
