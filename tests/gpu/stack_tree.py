# SPDX-License-Identifier: Apache-2.0
"""Add up what `tests/gpu/stacks` noted: `python3 -m tests.gpu.stack_tree FOLDER [LEAST]`.

For each process that was noted for at least LEAST seconds (5) it prints a tree of calls with the seconds in each,
without those below a fiftieth and without calls that only call one other.
"""

import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

SHARE = 0.02


@dataclass
class Node:
    """A call, and what it calls."""

    seconds: float = 0.0
    below: dict[str, "Node"] = field(default_factory=dict)


def tree_of(lines: list[str]) -> tuple[Node, float]:
    """Return the calls of a process, and when it began. A sample stands for the time until the next one."""
    samples = [(float(time), stack) for time, _, stack in (line.rstrip("\n").partition(" ") for line in lines)]
    root = Node()
    for (time, stack), (after, _) in pairwise(samples):
        node = root
        node.seconds += after - time
        for name in stack.split(";"):
            if "importlib" in name:
                continue
            node = node.below.setdefault(name, Node())
            node.seconds += after - time
    return root, samples[0][0] if samples else 0.0


def show(node: Node, least: float, depth: int = 0) -> None:
    """Print a tree; a call with one branch of as many seconds is left out."""
    for name, one in sorted(node.below.items(), key=lambda item: -item[1].seconds):
        if one.seconds < least:
            continue
        only = [each for each in one.below.values() if each.seconds > 0.97 * one.seconds]
        if not only:
            print(f"{one.seconds:7.1f} {'  ' * depth}{name}")
        show(one, least, depth + (not only))


def main(folder: str, least: str = "5") -> None:
    """Print the trees of all processes, in the order of their beginning."""
    found = []
    for file in Path(folder).glob("*.stacks"):
        command, *lines = file.read_text().splitlines() or [""]
        root, began = tree_of([line for line in lines if " " in line])
        if root.seconds >= float(least):
            found.append((began, file.stem, command, root))
    first = min((began for began, *_ in found), default=0.0)
    for began, name, command, root in sorted(found, key=lambda one: one[0]):
        print(f"\n== {name}, from {began - first:.1f} s on, {root.seconds:.1f} s: {command}")
        show(root, SHARE * root.seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
