# SPDX-License-Identifier: Apache-2.0
"""List the ways to break a sync. What breaks on the trainer's side is done in ``sender``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from megarl.checkpoint_engine.wire import Kind
from tests.helpers.processes import find_engine

if TYPE_CHECKING:
    from tests.sync.faults import Rig


@dataclass(frozen=True)
class Fault:
    """A way to break a sync.

    Attributes:
        name: of the fault; the trainer breaks by itself what has this name there.
        says: parts that the error must have.
        act: what this process does in the middle of the transfer, or before the flip; None: nothing.
        at_flip: True if it acts before the flip.
        unseen: True if the sync need not notice: the flip of an adapter asks the engine's front end only.
        kind: of the weights whose sync is broken.
    """

    name: str
    says: tuple[str, ...]
    act: "Callable[[Rig], None] | None" = None
    at_flip: bool = False
    unseen: bool = False
    kind: Kind = "adapter"

    @property
    def title(self) -> str:
        """For the table and for filters."""
        return self.name if self.kind == "adapter" else f"{self.kind}: {self.name}"


def end_sender(rig: "Rig") -> None:
    """Kill the trainer's process."""
    rig.sender.process.kill()


def end_engine(rig: "Rig") -> None:
    """Kill the second engine's vLLM process."""
    find_engine(psutil.Process(rig.engines[1].process.pid)).kill()


def end_front_end(rig: "Rig") -> None:
    """Kill the second engine's own process."""
    psutil.Process(rig.engines[1].process.pid).kill()


def stop_engine(rig: "Rig") -> None:
    """Stop the second engine's vLLM process; recovery kills it."""
    find_engine(psutil.Process(rig.engines[1].process.pid)).suspend()


FAULTS = (
    Fault("wrong_rank", ("transfer", "the model needs")),
    Fault("wrong_name", ("transfer", "no linear module of the model takes the adapter of 'model.layers.9.")),
    Fault("missing", ("transfer", "is missing")),
    Fault("not_finite", ("transfer", "not finite")),
    Fault("wrong_version", ("transfer", "asked to send policy version")),
    Fault("flipped_bit", ("transfer", "arrived damaged")),
    Fault("truncated", ("transfer", "does not fit its bucket")),
    Fault("end_before_receipts", ("trainer, transfer",)),
    Fault("sender killed in the transfer", ("trainer, transfer",), end_sender),
    Fault("engine killed in the transfer", ("transfer",), end_engine),
    Fault("engine's front end killed in the transfer", ("sampler 1",), end_front_end),
    Fault("engine stopped in the transfer", ("transfer",), stop_engine),
    Fault("engine killed before the flip", ("sampler 1, flip",), end_engine, at_flip=True, unseen=True),
    Fault("front end killed before the flip", ("sampler 1, flip",), end_front_end, at_flip=True),
    Fault("missing", ("transfer", "no tensor reached"), kind="base"),
    Fault("not_finite", ("transfer", "not finite"), kind="base"),
    Fault("flipped_bit", ("transfer", "arrived damaged"), kind="base"),
    Fault("sender killed in the transfer", ("trainer, transfer",), end_sender, kind="base"),
    # Of an engine of several ranks the flip asks the process that is killed or stopped here; its workers receive.
    Fault("engine killed in the transfer", ("sampler 1",), end_engine, kind="base"),
    Fault("engine's front end killed in the transfer", ("sampler 1",), end_front_end, kind="base"),
    Fault("engine stopped in the transfer", ("sampler 1",), stop_engine, kind="base"),
)
