# SPDX-License-Identifier: Apache-2.0
"""Define the base class of all config sections."""

from pydantic import BaseModel, ConfigDict, field_validator

# Upper bound of every integer. Fields may have smaller bounds.
LARGEST = 2**53


class Section(BaseModel):
    """Base of a section of the config tree: immutable, without unknown keys, without silent type conversion.

    ``strict`` keeps ``"8"`` from becoming ``8``: overrides are parsed as YAML, so a value of the wrong type is a
    mistake.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="after")
    @classmethod
    def _within_bounds(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"it is {value}; it must be within +-{LARGEST}")
        return value
