# SPDX-License-Identifier: Apache-2.0
"""Program of test_freed_models.py: train, drop the model, and print what is left.

    python -m tests.helpers.freed FOLDER FAMILY ...

It runs in a process of its own, since what other tests imported or left in the fork server must not count.
"""

import gc
import sys
import weakref
from pathlib import Path
from types import FrameType

from megarl.verify.cases import Place


def train_and_drop(here: Place) -> list[str]:
    """On each rank, return what is left of the model after a step, and what holds it."""
    from megarl.parallel.device import pick_device
    from megarl.parallel.groups import destroy_groups, init_groups
    from megarl.verify.ranks import build
    from megarl.verify.reference.surrogate_loss import SurrogateLoss

    groups = init_groups(here.config.parallel, pick_device("cpu"))
    model = build(here, groups)
    model.load_adapter(here.case.adapter)
    batch = model.pack(here.case.samples(), here.case.weights(0))
    model.forward(batch)
    model.forward_backward(batch, SurrogateLoss())
    model.optim_step(1e-3)
    references = [weakref.ref(parameter) for chunk in model.chunks for parameter in chunk.parameters()]
    assert references and all(reference() is not None for reference in references)
    del model
    gc.collect()
    destroy_groups()
    left = sum(reference() is not None for reference in references)
    return [f"{left} of {len(references)} parameters: {holders(references[0]())}"] if left else []


def holders(thing: object, depth: int = 12) -> str:
    """Name what keeps ``thing`` alive, level by level of referrers: their types, and how they begin."""
    gc.unfreeze()  # objects that were frozen are not asked otherwise
    mine = {id(sys._getframe()), id(sys._getframe(1))}
    names, seen, level = [], {id(thing)} | mine, [thing]
    for _ in range(depth):
        found = [r for r in gc.get_referrers(*level) if id(r) not in seen and r is not level]
        seen |= {id(found), id(level), *map(id, found)}
        level = found[:50]
        if not level:
            break
        names.append(", ".join(sorted({_described(r) for r in level})[:4]))
    return " <- ".join(names) or "nothing that the garbage collector knows"


def _described(thing: object) -> str:
    if isinstance(thing, FrameType):
        return f"frame of {thing.f_code.co_qualname}"
    return f"{type(thing).__qualname__} {str(thing)[:60]!r}"


def main(folder: str, *families: str) -> None:
    """Print one line for each rank that kept something of a family's model."""
    from tests.helpers.cases import make_case, place
    from tests.helpers.ranks import run_ranks

    for family in families:
        case = make_case(Path(folder), family, family=family, tied=False)
        for left in run_ranks(train_and_drop, 2, place(case, "TP2+SP", {"tensor": 2})):
            for line in left:
                print(f"{family}: {line}")


if __name__ == "__main__":
    from tests.helpers import freed  # the ranks import the function by this name

    freed.main(*sys.argv[1:])
