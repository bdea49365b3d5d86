# SPDX-License-Identifier: Apache-2.0
"""List the engines, layouts and transports that ``python -m tests.sync`` combines."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

RANKS = 4
FAMILIES = ("qwen3", "qwen3_moe")
# Layouts of four trainer ranks.
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2xDP2": {"tensor": 2, "data": 2},
    "PP2xDP2": {"pipeline": 2, "data": 2},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
    "EP2xDP2": {"data": 4, "expert": 2},
}
TRANSPORTS = ("shm", "gloo", "ipc")
# Name -> number of engines, and TP of each.
ENGINES = {"1 engine": (1, 1), "2 engines": (2, 1), "1 engine of TP2": (1, 2)}
CONTENTS = ("adapter", "merged")


@dataclass(frozen=True)
class Stage:
    """One model at one layout, whose weights go to the engines by one transport.

    Attributes:
        layout: key of ``LAYOUTS``.
        transport: ``checkpoint_engine.transport``.
        near: True as if each engine had the GPU of a rank other than 0, which then sends to it.
    """

    layout: str
    transport: str
    near: bool = False

    @property
    def way(self) -> str:
        """The transport, for the table and for filters."""
        return f"{self.transport}{', near' if self.near else ''}"


@dataclass(frozen=True)
class Rig:
    """Engines that are started once, and the stages that they live through.

    Attributes:
        family: of the model.
        engines: key of ``ENGINES``.
        content: ``checkpoint_engine.content``.
        stages: in order.
    """

    family: str
    engines: str
    content: str
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        """For the table and for filters."""
        return f"{self.family}, {self.engines}, {self.content}"


def all_rigs() -> Iterator[Rig]:
    """Yield every combination."""
    for family, engines, content in product(FAMILIES, ENGINES, CONTENTS):
        layouts = [name for name, axes in LAYOUTS.items() if "expert" not in axes or family.endswith("moe")]
        ways = [(name, False) for name in TRANSPORTS] + [("ipc", True)] * (ENGINES[engines][0] > 1)
        yield Rig(family, engines, content, tuple(Stage(layout, *way) for layout, way in product(layouts, ways)))
