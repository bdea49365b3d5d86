# SPDX-License-Identifier: Apache-2.0
"""What all config sections share."""

from pydantic import BaseModel, ConfigDict, field_validator

# Every integer is at most this; smaller bounds are at the fields.
LARGEST = 2**53


class Section(BaseModel):
    """A section of the config tree: immutable, no unknown keys, no silent type conversion.

    ``strict`` keeps ``"8"`` from becoming ``8``: overrides are parsed as YAML, so a wrong type is a mistake.
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
