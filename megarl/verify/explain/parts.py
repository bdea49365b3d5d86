# SPDX-License-Identifier: Apache-2.0
"""Judge and describe a single tensor or module: its place in the forward pass, its bound, a line of text."""

from collections.abc import Callable, Iterable

from megarl.lora.targets.resolve import EMBED_MODULE, OUTPUT_MODULE
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.peft.names import PREFIX
from megarl.verify.cases import Case

# Factor of the yardstick's error that is allowed. One tensor varies more by chance than a row, so it has more slack.
SLACK = 3.0


def forward_order(case: Case) -> Callable[[str], tuple[int, bool]]:
    """Return a sort key for PEFT's and Hugging Face's names: linears in forward order, A before B; others first."""
    linears = names_of(read_config(case.model)).linear_names()
    places = {name: index for index, name in enumerate([EMBED_MODULE, *linears, OUTPUT_MODULE])}

    def key(name: str) -> tuple[int, bool]:
        module, _, side = name.removeprefix(PREFIX).removesuffix(".weight").partition(".lora_")
        return places.get(module, -1), side.removeprefix("embedding_").startswith("B")

    return key


def beyond(name: str, error: float, fixed: float, yardstick_error: float = 0.0) -> str | None:
    """Describe an error that exceeds its bound: ``model.layers.0.mlp.up_proj.lora_A (error 1.0e-02, bound 1.0e-04)``.

    Args:
        name: PEFT's or Hugging Face's name.
        error: error of that tensor or module alone; NaN exceeds any bound.
        fixed: fixed bound.
        yardstick_error: the yardstick's error.
    """
    bound = max(fixed, SLACK * yardstick_error)
    if error <= bound:
        return None
    return f"{name.removeprefix(PREFIX).removesuffix('.weight')} (error {error:.1e}, bound {bound:.1e})"


def first_of(beyond_bound: Iterable[str | None], otherwise: str) -> str:
    """Return the first text, or say that there is none."""
    return next(filter(None, beyond_bound), f"none, {otherwise}")
