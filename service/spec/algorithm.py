"""The algorithm's part of a job, told apart by `type`.

An algorithm has two halves. Its spec, here, is a torch-free model that the service checks at
submit. Its maths is named by `implementation` and is imported on the workers only. The entry-point
group `planish.algorithms` maps a `type` to a spec class, so another package adds an algorithm
without touching this one.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, GetJsonSchemaHandler, SerializeAsAny, WrapValidator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import CoreSchema, PydanticCustomError

from service.spec.base import SpecModel

LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


class AlgorithmSpec(SpecModel):
    """What every algorithm's spec is: a `type`, hyperparameters, and where its maths lives."""

    type: str
    """Which algorithm; `GET /v1/algorithms` lists them."""

    implementation: ClassVar[str]
    """`package.module:Class` of the worker half (see `algorithms.algorithm.Algorithm`)."""

    online: ClassVar[bool]
    """True where the model samples its own training data from an environment."""

    summary: ClassVar[str]
    """One line for listings."""

    @property
    def samples_per_prompt(self) -> int:
        """How many answers an online algorithm samples for one question."""
        return 1


class SftSpec(AlgorithmSpec):
    """Supervised fine-tuning: cross-entropy on the assistant's tokens."""

    type: Literal["sft"] = "sft"
    implementation: ClassVar[str] = "algorithms.sft:Sft"
    online: ClassVar[bool] = False
    summary: ClassVar[str] = "Supervised fine-tuning on the assistant's tokens"

    loss_aggregation: LossAggregation = "token-mean"
    """How token losses become one number; `token-mean` divides by all trained tokens of a step."""


class GrpoSpec(AlgorithmSpec):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    implementation: ClassVar[str] = "algorithms.grpo:Grpo"
    online: ClassVar[bool] = True
    summary: ClassVar[str] = "Group-relative advantages, clipped token ratio, KL to a reference"

    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Samples per question. A group of one has no advantage, so at least two."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0, le=10)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the k3 KL estimate against the starting model; 0 keeps no reference model."""
    normalize_by_std: bool = True
    """Divide a group's centred rewards by their sample standard deviation (n - 1)."""
    updates_per_rollout: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer steps on each batch of samples."""
    loss_aggregation: LossAggregation = "token-mean"
    """How token losses become one number; `token-mean` divides by all trained tokens of a step."""

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size


@cache
def algorithm_specs() -> Mapping[str, type[AlgorithmSpec]]:
    """Every algorithm that is installed, by `type`.

    Raises:
        TypeError: an entry point is no AlgorithmSpec, or its name is not its `type`.
        ValueError: two packages offer the same name.
    """
    found: dict[str, type[AlgorithmSpec]] = {}
    for entry in sorted(entry_points(group="planish.algorithms"), key=lambda e: e.name):
        spec = entry.load()
        if not (isinstance(spec, type) and issubclass(spec, AlgorithmSpec)):
            raise TypeError(f"entry point {entry.name} = {entry.value} is no AlgorithmSpec")
        if spec.model_fields["type"].default != entry.name:
            raise TypeError(f"entry point {entry.name} = {entry.value} has another `type`")
        if entry.name in found:
            raise ValueError(f"two packages offer the algorithm {entry.name!r}")
        found[entry.name] = spec
    return found


def _resolve(value: Any, handler: ModelWrapValidatorHandler[AlgorithmSpec]) -> AlgorithmSpec:
    if isinstance(value, AlgorithmSpec):
        return value
    if not isinstance(value, Mapping):
        return handler(value)  # pydantic's own message about the wrong type
    known = algorithm_specs()
    name = value.get("type")
    if name is None:
        raise PydanticCustomError(
            "missing_algorithm_type",
            "give the algorithm's `type`, one of: {known}",
            {"known": ", ".join(known)},
        )
    if not isinstance(name, str) or name not in known:
        raise PydanticCustomError(
            "unknown_algorithm",
            "unknown algorithm {name}; this service has: {known}",
            {"name": repr(name)[:100], "known": ", ".join(known)},
        )
    return known[name].model_validate(value)


class _OneOfInstalled:
    """Shows the union of the installed algorithms in the JSON schema."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, _schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        options = [handler(spec.__pydantic_core_schema__) for spec in algorithm_specs().values()]
        return {"oneOf": options, "discriminator": {"propertyName": "type"}}


AlgorithmField = Annotated[SerializeAsAny[AlgorithmSpec], WrapValidator(_resolve), _OneOfInstalled]
