"""Opens what a job names: its rows or its environment, and what it is evaluated on."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from algorithms.data.chat import ChatFormat
from algorithms.data.dataset import Dataset
from algorithms.data.source import RowSource, open_dataset
from algorithms.errors import JobFailure
from algorithms.evaluate import Evaluator
from algorithms.protocols import Recorder, Workers
from algorithms.reference_cache import ReferenceCache, open_reference_cache
from algorithms.rollout.collector import Collector
from algorithms.rollout.questions import Questions, held_out_items
from algorithms.rollout.source import EpisodeSource
from algorithms.samples import Source
from environments import registry
from environments.protocol import EnvironmentType
from service.spec import EnvironmentRef, JobContext, Reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop runs on."""

    source: Source
    evaluator: Evaluator | None
    validation: Dataset | None
    padding_id: int
    references: ReferenceCache | None = None
    """Of the training rows, where the algorithm keeps a reference."""
    validation_references: ReferenceCache | None = None


def open_parts(
    context: JobContext,
    workers: Workers,
    tokenizer: "PreTrainedTokenizerFast",
    recorder: Recorder,
    *,
    folder: Path | None = None,
) -> Parts:
    """Reads and checks all data before the first step.

    Args:
        context: the job.
        workers: the models.
        tokenizer: a fast tokenizer with a chat template.
        recorder: takes warnings.
        folder: where what is computed once is kept for later attempts; None keeps it in memory.

    Raises:
        JobFailure: USER_ERROR, with the place.
    """
    chat = open_chat(tokenizer)
    evaluator = _open_evaluator(context, workers, chat)
    if context.spec.environment is not None and context.spec.algorithm.online:
        source = _open_episodes(context, workers, chat, context.spec.environment, evaluator)
        return Parts(
            source=source, evaluator=evaluator, validation=None, padding_id=chat.padding_id
        )

    def warn(message: str) -> None:
        recorder.record("warning", {"message": message})

    train = _open_rows(context, chat, recorder)
    validation = _open_validation(context, chat, recorder)
    return Parts(
        source=RowSource(context, chat, train),
        evaluator=evaluator,
        validation=validation,
        padding_id=chat.padding_id,
        references=open_reference_cache(context, train, folder=folder, warn=warn),
        validation_references=None
        if validation is None
        else open_reference_cache(context, validation, folder=folder, warn=warn),
    )


def open_chat(tokenizer: "PreTrainedTokenizerFast") -> ChatFormat:
    """A tokenizer's chat format.

    Raises:
        JobFailure: USER_ERROR; its template is missing or cannot be used.
    """
    try:
        return ChatFormat(tokenizer)
    except ValueError as error:
        raise JobFailure(Reason.USER_ERROR, f"the model's tokenizer: {error}") from error


def _open_rows(context: JobContext, chat: ChatFormat, recorder: Recorder) -> Dataset:
    dataset = open_dataset(context, chat, "train")
    if dataset is None:
        raise JobFailure(Reason.USER_ERROR, "`data` is needed: this algorithm trains on rows")
    _tell_of_length(context, dataset, "train", recorder)
    return dataset


def _open_validation(context: JobContext, chat: ChatFormat, recorder: Recorder) -> Dataset | None:
    dataset = open_dataset(context, chat, "validation")
    if dataset is not None:
        _tell_of_length(context, dataset, "validation", recorder)
    return dataset


def _tell_of_length(context: JobContext, dataset: Dataset, which: str, recorder: Recorder) -> None:
    """A warning where the length rule dropped or cut rows."""
    if not dataset.dropped and not dataset.truncated:
        return
    total = len(dataset.examples) + dataset.dropped
    message = (
        f"data.{which}: of {total} rows, {dataset.dropped} were dropped and {dataset.truncated} "
        f"truncated: they are longer than `training.max_length` "
        f"{context.spec.training.max_length}"
    )
    counts = {"dropped": dataset.dropped, "truncated": dataset.truncated}
    recorder.record("warning", {"message": message, **counts})


def _open_episodes(
    context: JobContext,
    workers: Workers,
    chat: ChatFormat,
    reference: EnvironmentRef,
    evaluator: Evaluator | None,
) -> EpisodeSource:
    environment, config = _open_environment(reference)
    held_out = []
    if evaluator is not None:
        held_out = [evaluator.collector.environment.key(item) for item in evaluator.items]
    questions = Questions(environment, config, seed=reference.seed, held_out=held_out)
    collector = _collector(context, workers, chat, reference, environment, config)
    return EpisodeSource(context, chat, collector, questions)


def _open_evaluator(context: JobContext, workers: Workers, chat: ChatFormat) -> Evaluator | None:
    evaluation, reference = context.spec.evaluation, context.spec.evaluation_environment
    if evaluation.items == 0 or reference is None:
        return None
    environment, config = _open_environment(reference)
    items = held_out_items(environment, config, seed=evaluation.seed, count=evaluation.items)
    if not items:
        raise JobFailure(
            Reason.USER_ERROR, f"environment {reference.id} has no question to evaluate on"
        )
    return Evaluator(
        collector=_collector(context, workers, chat, reference, environment, config),
        items=items,
        modes=evaluation.modes,
        rollout=context.spec.rollout,
        seed=context.spec.training.seed,
        answers=evaluation.samples_per_item,
    )


def _open_environment(reference: EnvironmentRef) -> tuple[EnvironmentType, BaseModel]:
    environment = registry.get(reference.id, reference.version)
    return environment, environment.config_model.model_validate(reference.config)


def _collector(
    context: JobContext,
    workers: Workers,
    chat: ChatFormat,
    reference: EnvironmentRef,
    environment: EnvironmentType,
    config: BaseModel,
) -> Collector:
    if workers.generator is None:
        raise ValueError("episodes need workers with a generator")
    rollout = context.spec.rollout
    return Collector(
        environment=environment,
        config=config,
        max_turns=reference.max_turns or environment.max_turns,
        generator=workers.generator,
        chat=chat,
        max_new_tokens=rollout.max_new_tokens,
        timeout_seconds=rollout.episode_timeout_seconds,
    )
