"""Rows of the training file as steps, and the loss on the validation file."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from algorithms.batch import Batch, MetricSums, Normalizer
from algorithms.data.chat import ChatFormat
from algorithms.data.collation import collate
from algorithms.data.dataset import Dataset, load_dataset
from algorithms.data.sampler import Sampler
from algorithms.data.tokenized import Rules
from algorithms.errors import JobFailure
from algorithms.phases import PhaseClock
from algorithms.protocols import TrainEngine
from algorithms.samples import Samples
from service.spec import JobContext, Reason


def open_dataset(
    context: JobContext, chat: ChatFormat, which: Literal["train", "validation"]
) -> Dataset | None:
    """The named file of the job's `data`, tokenized; None where the job names none.

    Raises:
        JobFailure: USER_ERROR, naming the file and the line.
    """
    data = context.spec.data
    name = getattr(data, which) if data is not None else None
    if data is None or name is None:
        return None
    rules = Rules(
        kind=context.spec.algorithm.rows,
        max_length=context.spec.training.max_length,
        too_long=data.too_long,
        strings=data.strings,
    )
    try:
        return load_dataset(context.files[name], chat, rules)
    except (ValueError, FileNotFoundError, PermissionError) as error:
        raise JobFailure(Reason.USER_ERROR, f"data.{which} ({name}): {error}") from error


class RowSource:
    """Steps of `training.global_batch_size` rows of the file, be they sequences or pairs; see
    `algorithms.samples.Source`."""

    online = False

    def __init__(self, context: JobContext, chat: ChatFormat, dataset: Dataset) -> None:
        spec = context.spec
        self._digest = dataset.digest()
        self._goes_on_with_another = context.resume is not None
        seed = spec.data.shuffle_seed if spec.data is not None else 0
        self._examples = dataset.examples
        self._sampler = Sampler(len(dataset.examples), seed=seed)
        self._batch_size = spec.training.global_batch_size
        self._padding_id = chat.padding_id
        self._max_length = spec.training.max_length
        rows = spec.training.epochs * len(dataset.examples)
        self.total_steps = spec.training.steps or math.ceil(rows / self._batch_size)

    def draw(self, step: int, clock: PhaseClock) -> Samples:  # noqa: ARG002
        """The next rows. `data_start` and `data_end` say which, for anyone who asks later."""
        with clock("data"):
            draw = self._sampler.draw(self._batch_size)
            batch = collate(
                [self._examples[index] for index in draw.indices],
                padding_id=self._padding_id,
                max_length=self._max_length,
            )
        return Samples(
            batch=batch,
            metrics={
                "data_epoch": draw.epoch,
                "data_start": draw.start,
                "data_end": draw.end,
            },
            rows=draw.indices,
        )

    def state(self) -> dict[str, Any]:
        """The cursor, and what the rows are, which a file in S3 or on a disk may not stay."""
        return {"position": self._sampler.position, "rows": self._digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`.

        Raises:
            JobFailure: USER_ERROR; the rows are others than this job has trained on so far. A job
                that goes on with another's state may have another bound on their length.
        """
        if state.get("rows", self._digest) != self._digest and not self._goes_on_with_another:
            raise JobFailure(
                Reason.USER_ERROR,
                "data.train: the rows are not those that the checkpoint was made with, so its "
                "place in them means nothing; put the file back as it was, or start a new job with "
                "`model.from`",
            )
        self._sampler.position = int(state["position"])


def validate(
    train: TrainEngine,
    dataset: Dataset,
    *,
    batch_size: int,
    padding_id: int,
    max_length: int,
    prepare: Callable[[Samples], Batch] = lambda samples: samples.batch,
) -> dict[str, float]:
    """The algorithm's `loss` on a whole file, as if it were one batch, and its metrics.

    The last batch is filled up with rows that have no trained token, so that every batch divides as
    the training batch does; they add nothing to the loss or to the counts.

    Args:
        train: the model.
        dataset: the file.
        batch_size: rows of one batch.
        padding_id: token behind the end of a sequence.
        max_length: longest sequence.
        prepare: adds what the loss needs to a batch; see `algorithms.prepare`.
    """
    batches = []
    for start in range(0, len(dataset.examples), batch_size):
        items = list(dataset.examples[start : start + batch_size])
        filling = items[:1] * (batch_size - len(items))
        batch = collate(items + filling, padding_id=padding_id, max_length=max_length)
        batch.loss_mask[len(items) * batch.unit :] = 0.0
        rows = range(start, start + len(items))
        batches.append(prepare(Samples(batch=batch, rows=rows, metrics={})))
    normalizer = Normalizer.of_all(batches)
    results = [train.evaluate_loss(batch, normalizer) for batch in batches]
    metrics = MetricSums()
    for result in results:
        metrics.add(result.sums)
    return {**metrics.means(), "loss": math.fsum(result.loss for result in results)}
