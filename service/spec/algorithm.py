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
from service.spec.other_models import CriticSpec, FrozenModelSpec

RowKind = Literal["conversation", "preference", "label"]
Head = Literal["vocabulary", "value"]


class DynamicSampling(SpecModel):
    """Questions whose answers all have the same reward teach nothing, and are replaced by others
    (DAPO, arXiv 2503.14476, section 3.2). What counts is the environment's reward alone."""

    max_batches: Annotated[int, Field(ge=1, le=1000)] = 5
    """Batches of questions at most that are sampled for one step."""
    when_short: Literal["train", "fail"] = "train"
    """What to do where they did not give enough: train on what there is, or fail."""


class AlgorithmSpec(SpecModel):
    """What every algorithm's spec is: a `type`, hyperparameters, and where its maths lives."""

    type: str
    """Which algorithm; `GET /v1/algorithms` lists them."""

    implementation: ClassVar[str]
    """`package.module:Class` of the worker half (see `algorithms.algorithm.Algorithm`)."""

    online: ClassVar[bool]
    """True where the model samples its own training data from an environment."""

    rows: ClassVar[RowKind] = "conversation"
    """What a row of an offline algorithm's data is."""

    head: ClassVar[Head] = "vocabulary"
    """What the trained model says of a token: how likely each is, or one number."""

    least_batch: ClassVar[int] = 1
    """Rows that an optimizer step must have at least."""

    greedy_baseline: ClassVar[bool] = False
    """Whether each question is also answered greedily, for a baseline that is not trained."""

    learns_from_rewards: ClassVar[bool] = True
    """Whether what episodes earn is learned from; of online algorithms only."""

    summary: ClassVar[str]
    """One line for listings."""

    @property
    def sequences_per_row(self) -> int:
        """How many sequences one row of a batch is: a preference is an answer that was chosen and
        one that was rejected, which stay together."""
        return 2 if self.rows == "preference" else 1

    @property
    def steps_per_batch(self) -> int:
        """Into how many optimizer steps a batch is dealt."""
        return 1

    @property
    def samples_per_prompt(self) -> int:
        """How many answers an online algorithm samples for one question."""
        return 1

    @property
    def comparable_loss(self) -> bool:
        """Whether one step's loss can be set beside another's. It can where it is a likelihood, a
        preference or a divergence, which is never below 0; a policy gradient's hovers around 0,
        and how large it is says nothing."""
        return False

    @property
    def keeps_reference(self) -> bool:
        """Whether log-probs of the model as the job started are needed."""
        return False

    @property
    def resampling(self) -> DynamicSampling | None:
        """Whether questions that teach nothing are replaced."""
        return None

    @property
    def critic(self) -> CriticSpec | None:
        """The value model that is trained beside the policy, where there is one."""
        return None

    @property
    def teacher(self) -> FrozenModelSpec | None:
        """The model whose distributions are learned, where there is one."""
        return None


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
