# SPDX-License-Identifier: Apache-2.0
"""Free a model that is dropped, and with it its process groups."""

import gc
import weakref

import pytest

from megarl.verify.cases import Place
from tests.helpers.cases import make_case, place
from tests.helpers.ranks import run_ranks


def holders(thing: object, depth: int = 8) -> str:
    """Name a chain of objects that keep ``thing`` alive, nearest first."""
    names, seen = [], {id(thing)}
    for _ in range(depth):
        referrers = [r for r in gc.get_referrers(thing) if id(r) not in seen and type(r).__name__ != "frame"]
        if not referrers:
            break
        thing = referrers[0]
        seen |= {id(thing), id(referrers)}
        names.append(f"{type(thing).__module__}.{type(thing).__qualname__} {str(thing)[:80]!r}")
    return " <- ".join(names)


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
    left = [parameter for reference in references if (parameter := reference()) is not None]
    return [f"{len(left)} of {len(references)} parameters: {holders(left[0])}"] if left else []


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_nothing_is_left_of_a_model(tmp_path, family):
    case = make_case(tmp_path, family, family=family, tied=False)
    here = place(case, "TP2+SP", {"tensor": 2})
    assert run_ranks(train_and_drop, 2, here) == [[], []]
