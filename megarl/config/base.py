"""What all config sections share."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config tree: immutable, no unknown keys, no silent type conversion.

    ``strict`` keeps ``"8"`` from becoming ``8``: overrides are parsed as YAML, so a wrong type is a mistake.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
