# SPDX-License-Identifier: Apache-2.0
"""What is said of one tensor or module alone: its place in the forward pass, its bound, a line of text."""

from collections.abc import Callable, Iterable

from megarl.lora.targets.resolve import EMBED_MODULE, OUTPUT_MODULE
from megarl.model.weights.full_config import names_of
from megarl.model.weights.hf_folder import read_config
from megarl.peft.names import PREFIX
from megarl.verify.cases import Case

# How many times the yardstick's error is allowed. One part's error is a single draw: more slack than for a row.
SLACK = 3.0


def forward_order(case: Case) -> Callable[[str], tuple[int, bool]]:
    """Sort key of PEFT's and Hugging Face's names: linears as the forward pass uses them, A before B; others first."""
    linears = names_of(read_config(case.model)).linear_names()
    places = {name: index for index, name in enumerate([EMBED_MODULE, *linears, OUTPUT_MODULE])}

    def key(name: str) -> tuple[int, bool]:
        module, _, side = name.removeprefix(PREFIX).removesuffix(".weight").partition(".lora_")
        return places.get(module, -1), side.removeprefix("embedding_").startswith("B")

    return key


def beyond(name: str, error: float, fixed: float, own: float = 0.0) -> str | None:
    """``model.layers.0.mlp.up_proj.lora_A (error 1.0e-02, bound 1.0e-04)``, if the error is larger than its bound.

    Args:
        name: PEFT's or Hugging Face's.
        error: of that part alone; NaN is larger than any bound.
        fixed: the bound whatever rounding does.
        own: the yardstick's error.
    """
    bound = max(fixed, SLACK * own)
    if error <= bound:
        return None
    return f"{name.removeprefix(PREFIX).removesuffix('.weight')} (error {error:.1e}, bound {bound:.1e})"


def first_of(found: Iterable[str | None], otherwise: str) -> str:
    """The first line of text, or that there is none."""
    return next(filter(None, found), f"none, {otherwise}")
