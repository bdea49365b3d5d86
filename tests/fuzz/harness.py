# SPDX-License-Identifier: Apache-2.0
"""A seeded fuzzer of the files that users give megarl. The outcome must be a named error or the right result.

A target (``tests/fuzz/targets``) writes an intact subject, changes a copy of it, and makes megarl read the copy. Each
case depends only on its target, the seed and its number, so that it can be repeated alone.
"""

import contextlib
import random
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megarl.errors import MegarlError

# Seconds after which a case counts as hung. The slowest correct one takes about one on a busy core.
CASE_SECONDS = 60.0
# Least number of characters of a message that can name a field, its value and the fix.
SHORTEST = 25


class WrongResult(AssertionError):
    """megarl accepted a changed subject, and its result differs from the reference's."""


@dataclass(frozen=True)
class Mutation:
    """One change of a subject.

    Attributes:
        what: the change in words.
        names: a refusal must contain one of these (a file's name, a field); if empty, any message will do.
    """

    what: str
    names: tuple[str, ...] = ()


class Target(Protocol):
    """Interface of something that megarl reads."""

    def make(self, folder: Path) -> None:
        """Write the intact subject into an empty folder. Called once, before ``check``."""
        ...

    def mutate(self, folder: Path, draw: random.Random) -> Mutation:
        """Change the copy in ``folder``."""
        ...

    def check(self, folder: Path) -> None:
        """Make megarl read the copy.

        Raises:
            MegarlError: megarl refused it by name.
            WrongResult: megarl accepted it, and the result is not the right one.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case: ``kind`` is right, refused, wrong, crashed, unnamed or hung."""

    target: str
    seed: int
    number: int
    mutation: str
    kind: str
    text: str

    @property
    def failed(self) -> bool:
        return self.kind not in ("right", "refused")

    def __str__(self) -> str:
        return f"{self.target} --seed {self.seed} --case {self.number}: {self.mutation}\n  {self.kind}: {self.text}"


class Hung(BaseException):
    """A case took longer than ``CASE_SECONDS``. No ``except Exception`` of the product catches it."""


def run_cases(name: str, seed: int, numbers: Iterable[int], work: str, keep: bool = False) -> list[Outcome]:
    """Run cases of a target one after the other, on the main thread.

    Args:
        name: a key of ``tests.fuzz.targets.TARGETS``.
        seed: seed of the changes.
        numbers: numbers of the cases.
        work: an empty folder for the subject and its copies.
        keep: True leaves the copies of failed cases there.

    Raises:
        AssertionError: the intact subject is refused, so that no case would mean anything.
    """
    from tests.fuzz.targets import TARGETS

    target, intact = TARGETS[name](), Path(work) / "intact"
    intact.mkdir(parents=True)
    target.make(intact)
    unchanged = Path(work) / "unchanged"
    shutil.copytree(intact, unchanged, symlinks=True)
    target.check(unchanged)
    outcomes = []
    for number in numbers:
        copy = Path(work) / f"case-{number}"
        shutil.copytree(intact, copy, symlinks=True)
        mutation = target.mutate(copy, random.Random(f"{name}-{seed}-{number}"))
        kind, text = judge(target, copy, mutation)
        outcomes.append(Outcome(name, seed, number, mutation.what, kind, text))
        if not (keep and outcomes[-1].failed):
            shutil.rmtree(copy)
    return outcomes


def judge(target: Target, folder: Path, mutation: Mutation) -> tuple[str, str]:
    """Return kind and text of one case's outcome."""
    try:
        with limited(CASE_SECONDS):
            target.check(folder)
    except WrongResult as error:
        return "wrong", str(error)
    except MegarlError as error:
        message = str(error)
        if len(message) < SHORTEST or (mutation.names and not any(name in message for name in mutation.names)):
            return "unnamed", f"{type(error).__name__}: {message} (names none of {', '.join(mutation.names)})"
        return "refused", f"{type(error).__name__}: {message}"
    except Hung:
        return "hung", f"no end within {CASE_SECONDS:.0f} s"
    except Exception as error:
        return "crashed", "".join(traceback.format_exception(error)[-6:]).rstrip()
    return "right", ""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``Hung`` in the block when the time is over."""

    def stop(*_: object) -> None:
        raise Hung

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def summary(outcomes: Iterable[Outcome]) -> str:
    """Return ``recipes: 12 right, 188 refused``, one line per target."""
    counts: dict[str, Counter] = {}
    for outcome in outcomes:
        counts.setdefault(outcome.target, Counter())[outcome.kind] += 1
    return "\n".join(
        f"{name}: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}"
        for name, kinds in counts.items()
    )
