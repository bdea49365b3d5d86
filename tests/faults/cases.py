# SPDX-License-Identifier: Apache-2.0
"""List the faults: who is hit, how, and in which phase of a step."""

from dataclasses import dataclass, field
from itertools import product

# For ranks: the method that Ray shows in the titles of their processes in each phase of a step.
PHASES = {
    "building": "TrainerRank.build",
    "sampling": "ray::TrainerRank ",
    "training": "TrainerRank.forward_backward",
    "syncing": "TrainerRank.send_weights",
    "saving": "TrainerRank.save_checkpoint",
}
ASYNCHRONOUS = (
    "train.max_staleness=2",
    "loss.importance_cap=2.0",
    "checkpoint_engine.in_flight=continue",
)
NO_RESTARTS = ("train.max_restarts=0", "sampler.max_restarts=0")
HANG_SECONDS = 6


@dataclass(frozen=True)
class Case:
    """One fault of one run.

    Attributes:
        who: ``engine`` (vLLM's process), ``front end`` (the actor before it), ``rank``, ``controller``; or what is
            spoiled: ``disk``, ``shm``, ``reward``, ``loss``.
        how: ``killed``, ``stopped`` or ``told to end`` (SIGTERM) for processes.
        phase: key of ``PHASES``; the victim is hit while the ranks do that.
        settings: further settings of the run.
        ends: text of the error that the run must end with; empty if it must go on by itself.
        kind: for the name.
    """

    who: str
    how: str
    phase: str = "sampling"
    settings: tuple[str, ...] = field(default=())
    ends: str = ""
    kind: str = "synchronous"

    @property
    def name(self) -> str:
        """For the table and for filters."""
        return f"{self.kind}: {self.who} {self.how}, {self.phase}"

    @property
    def result(self) -> str:
        """The requirement on the run: bit for bit that of the reference, or of every prompt once; or over."""
        if self.phase == "building" and self.ends:
            return "ended"
        return "every prompt once" if self.kind == "asynchronous" else "bit for bit"


def all_cases() -> list[Case]:
    """Return every case."""
    phases = [phase for phase in PHASES if phase != "building"]
    cases = [Case(*each) for each in product(("engine", "rank", "controller"), ("killed", "stopped"), phases)]
    cases += [Case("front end", how) for how in ("killed", "stopped")]
    cases += [Case("engine", "killed", "sampling", ("sampler.engines=2",), kind="two engines")]
    cases += [Case("engine", "killed", "syncing", ("sampler.engines=2",), kind="two engines")]
    unsaved = ("train.save_every=99",)
    cases += [Case("rank", "killed", "training", unsaved, kind="no checkpoint yet")]
    cases += [
        Case("controller", "told to end", phase, unsaved, "interrupted by signal SIGTERM", "no checkpoint yet")
        for phase in ("sampling", "training")
    ]
    cases += [Case(who, "killed", "building") for who in ("rank", "engine")]
    cases += [
        Case(who, how, "sampling", ASYNCHRONOUS, kind="asynchronous")
        for who, how in (("engine", "killed"), ("rank", "killed"), ("rank", "stopped"), ("controller", "killed"))
    ]
    cases += [
        Case(who, "stopped", phase, NO_RESTARTS, "has given no sign of life for", "no restarts")
        for who, phase in (("rank", "building"), ("rank", "training"), ("engine", "sampling"))
    ]
    cases += [
        Case("reward", "raises", ends="raised ArithmeticError"),
        Case("loss", "never ends", "training"),
        Case("loss", "gives NaN", "training", ends="the gradient norm is nan"),
        Case("disk", "full", "saving", ends="No space left on device"),
        Case("shm", "full", "syncing", ("checkpoint_engine.transport=shm",), ends="/dev/shm cannot hold a bucket"),
    ]
    return cases


CASES = all_cases()
