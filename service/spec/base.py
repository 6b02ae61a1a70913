"""What every part of the job spec has in common: strict, closed, frozen, described."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints


class SpecModel(BaseModel):
    """A part of the contract: unknown fields are refused, values are never coerced or changed.

    The docstring below a field becomes its description in the OpenAPI document.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        populate_by_name=False,
        serialize_by_alias=True,
    )


# A DNS label: names become folder names, RayJob names, SLURM job names and metric text.
JobName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
