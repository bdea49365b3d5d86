"""Types and ranges of the fields of ``adapter_config.json`` that decide what an adapter computes.

PEFT checks none of them when it reads the file: ``use_rslora: "no"`` would be true, an alpha of 0 no adapter at all.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megarl.config.explain import explain
from megarl.config.lora import Pattern
from megarl.errors import AdapterError

Rank = Annotated[int, Field(ge=1, le=2**20)]
# Python's integers have no largest one; JSON's 1e400 is read as infinity.
Alpha = Annotated[float, Field(gt=0.0, le=2.0**53, allow_inf_nan=False)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    r: Rank = 8
    lora_alpha: Alpha = 8
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    use_rslora: bool = False
    target_modules: Pattern | list[str] | None = None
    exclude_modules: Pattern | list[str] | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[Pattern, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[Pattern, Alpha] = Field(default_factory=dict)
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Pattern] | Pattern | None = None


def check_fields(plain: dict[str, Any], file: Path) -> None:
    """Refuse a wrong type or a value outside its range.

    Raises:
        AdapterError: one line for each wrong field.
    """
    try:
        _Fields.model_validate(plain)
    except ValidationError as error:
        raise AdapterError(f"{file}: {explain(error, plain, _Fields)}") from None
