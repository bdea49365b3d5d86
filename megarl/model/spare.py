"""Columns left unwritten behind each row of an activation, for the linear that reads it (``megarl.lora.room``).

A linear says how many it wants, what makes its input leaves them and says so on the tensor, and the first reader takes
them: a second one would write over what the first left there.
"""

from typing import Any

import torch

_NAME = "_megarl_spare_columns"


def wanted_by(linear: Any, hidden: torch.Tensor) -> int:
    """Columns that a linear wants behind the rows of its input.

    Args:
        linear: any; those without an adapter want none.
        hidden: an activation of the model, for its device and dtype.
    """
    ask = getattr(linear, "wanted_columns", None)
    return ask(hidden) if ask is not None else 0


def offer(activation: torch.Tensor, columns: int) -> torch.Tensor:
    """Say on an activation, whose rows lie that far apart, that so many columns behind each row are free."""
    if columns:
        setattr(activation, _NAME, columns)
    return activation


def take(activation: torch.Tensor) -> int:
    """How many columns are free; none for whoever asks next."""
    return activation.__dict__.pop(_NAME, 0)
