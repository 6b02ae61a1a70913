"""What the loop asks of the workers. `megatron_backend` implements it; tests may, too.

The driver is one thread of plain Python that holds whole batches; behind these Protocols a batch is
split over data-parallel ranks and micro-batches, and results come back whole and in order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from algorithms.batch import Batch, LossOutput, Normalizer, Outputs


class Loss(Protocol):
    """The part of an algorithm that runs inside a rank, on one micro-batch."""

    def loss(self, outputs: Outputs, batch: Batch, normalizer: Normalizer) -> LossOutput:
        """See `LossOutput` for what the parts mean."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step.

    Attributes:
        loss: the step's loss, whole.
        gradient_norm: global L2 norm before clipping.
        metrics: the algorithm's own, over the whole batch (means of `LossOutput.sums`); an engine
            may add how fast it was.
        finite: False where loss or gradient norm is NaN or infinite; the step was then not taken,
            nor is one whose norm or loss is above the limit that it was tried under.
        sums: what the algorithm's `metrics` are the means of, as (sum, count).
    """

    loss: float
    gradient_norm: float
    metrics: Mapping[str, float]
    finite: bool
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A step as some of the ranks compute it alone.

    Attributes:
        ranks: who computed it, for people.
        result: the whole step's; it was not taken.
    """

    ranks: str
    result: StepResult


class TrainEngine(Protocol):
    """The model that is trained, with its optimizer."""

    def train_step(
        self,
        batch: Batch,
        normalizer: Normalizer,
        *,
        learning_rate: float,
        norm_limit: float = math.inf,
        loss_limit: float = math.inf,
    ) -> StepResult:
        """Forward, the algorithm's loss, backward, clip and one optimizer step.

        The step is not taken, and nothing changes, where the loss or the gradient norm is not
        finite, the norm is above `norm_limit` or the loss above `loss_limit`.
        """
        ...

    def trials(self, batch: Batch, normalizer: Normalizer) -> Sequence[Trial]:
        """The step once more, by each half of the model's copies alone; nothing changes.

        Empty where there are no two copies that compute apart from each other.
        """
        ...

    def log_probs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy"
    ) -> Tensor:
        """[B, T] log p(token i | before i) without gradient, at the temperature of `PolicyOutputs`.

        `reference` is the model as the job started (kept only where the algorithm's spec says so).
        """
        ...

    def evaluate_loss(self, batch: Batch, normalizer: Normalizer) -> StepResult:
        """The algorithm's loss without gradient; `gradient_norm` is 0."""
        ...

    def tied_difference(self) -> float | None:
        """Largest difference between the copies of a tied embedding on two pipeline stages.

        None where the model is not tied, or one stage holds both ends of it.
        """
        ...


class Critic(Protocol):
    """The value model that is trained beside the policy, with its own optimizer."""

    def train_step(
        self,
        batch: Batch,
        normalizer: Normalizer,
        *,
        learning_rate: float,
        norm_limit: float = math.inf,
        loss_limit: float = math.inf,
    ) -> StepResult:
        """As `TrainEngine.train_step`, with the algorithm's `value_loss`."""
        ...

    def trials(self, batch: Batch, normalizer: Normalizer) -> Sequence[Trial]:
        """As `TrainEngine.trials`."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """[B, T] as `ValueOutputs.values`, without gradient."""
        ...


class Scorer(Protocol):
    """A reward model that is not trained."""

    def scores(self, batch: Batch) -> Tensor:
        """[B] as `ValueOutputs.scores`."""
        ...


class Teacher(Protocol):
    """A model that is not trained, and whose distributions are learned."""

    def likeliest(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """For each trained token, the `count` likeliest tokens in its place (all of them where the
        vocabulary has fewer), by the distribution that the token itself is drawn from.

        Returns:
            ids [B, T, K] int64, likeliest first; log_probs [B, T, K] float32. 0 where a token is
            not trained.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy."""

    temperature: float
    max_new_tokens: int
    seed: int
    """With the prompt's place in the list it decides the draw, whatever the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the model wrote after one prompt.

    Attributes:
        token_ids: the tokens, the stop token included.
        log_probs: of each token, from the very logits it was drawn from (after temperature and the
            mask of padded vocabulary). Greedy decoding reports temperature 1.
        stop_reason: `stop` where a stop token was drawn, `length` at a bound.
        weight_version: of the weights it was sampled from.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    stop_reason: Literal["stop", "length"]
    weight_version: int


class Generator(Protocol):
    """The generation copy of the model."""

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and answer together."""
        ...

    def sync_weights(self, version: int) -> None:
        """Moves the training weights to the generation layout, and names them `version`."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion a prompt, in order. Stops at the tokenizer's end-of-turn tokens.

        Raises:
            ValueError: a prompt is empty, or leaves no room for one token below `max_length`.
        """
        ...


class Checkpoints(Protocol):
    """Published training states of this job."""

    def save(
        self,
        step: int,
        loop_state: Mapping[str, Any],
        *,
        evaluations: Sequence[Mapping[str, Any]] = (),
        required: bool = False,
    ) -> None:
        """Takes weights, optimizer, RNG and `loop_state` (JSON values) as they are now.

        They may be published later, by `poll` or `drain`; an earlier save that is still on its way
        is finished first. A save that the storage refuses is a warning, and after some in a row, or
        where it is `required`, the job's end.

        Args:
            step: steps done.
            loop_state: what the loop needs to go on.
            evaluations: data of this step's `evaluation` events; they decide which is the best.
            required: the job's result is worth nothing without it.

        Raises:
            JobFailure: the storage refused too often.
        """
        ...

    def poll(self) -> None:
        """Publishes a save whose files are all on disk. Cheap; call it between pieces of work.

        Raises:
            JobFailure: the storage refused too often.
        """
        ...

    def drain(self) -> None:
        """Returns once no save is on its way any more.

        Raises:
            JobFailure: the storage refused too often.
        """
        ...

    def load_latest(self) -> Mapping[str, Any] | None:
        """Restores the newest published checkpoint; its `loop_state`, None where there is none.

        A save that is still on its way is given up.

        Raises:
            JobFailure: there was a checkpoint, and none is whole any more.
        """
        ...


class Recorder(Protocol):
    """Where the loop's events go; see `service.spec.attempt.WorkerEvent`."""

    def record(self, kind: str, data: Mapping[str, Any], *, step: int | None = None) -> None:
        """Appends one event to the attempt's record, and returns without waiting for the service.

        What is recorded before a checkpoint's save is on disk when the checkpoint is published.
        """
        ...

    def replay(self) -> None:
        """Says that steps of which there are events already may be taken again.

        They are in the record then, and `record` takes none of them a second time.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """All that the loop works with; no `generator` where the job neither samples nor evaluates."""

    train: TrainEngine
    generator: Generator | None
    checkpoints: Checkpoints
    critic: Critic | None = None
    scorer: Scorer | None = None
    teacher: Teacher | None = None
