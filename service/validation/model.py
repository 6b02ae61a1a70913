"""Finds the weights, config and tokenizer that a job names, before it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.artifacts import checkpoint_folders, latest_step
from service.jobs import Job, JobFolder
from service.spec import ModelSource, ResolvedModel
from service.spec.algorithm import Head
from service.spec.config_reader import UnsupportedModel
from service.spec.model_config import ModelConfig
from service.store import NotFound, Store
from service.validation.paths import find_folder
from service.validation.problems import FieldProblem, quote
from service.validation.tokenizer import check_tokenizer, read_json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model that exists."""

    resolved: ResolvedModel
    config: ModelConfig
    source: ModelSource
    """The source with names and `latest` replaced by what they meant at submit."""
    head: Head | None
    """What it says of a token; None where it is new, and says whatever it is built for."""


class ModelFinder:
    """Resolves the models that a job names."""

    def __init__(self, *, roots: Sequence[Path], jobs_dir: Path, store: Store) -> None:
        self._roots = roots
        self._jobs_dir = jobs_dir
        self._store = store

    def find(
        self, source: ModelSource, field: str = "model"
    ) -> tuple[FoundModel | None, list[FieldProblem]]:
        """The model, or None and what is wrong with its source.

        Args:
            source: where a model comes from.
            field: path of the source in the job.
        """
        if source.from_job is not None:
            return self._from_job(source.from_job, f"{field}.from")
        if source.path is not None:
            return self._from_path(source, source.path, f"{field}.path")
        return self._random(source, f"{field}.init")

    def _from_path(
        self, source: ModelSource, name: str, field: str
    ) -> tuple[FoundModel | None, list[FieldProblem]]:
        folder, problem = find_folder(name, self._roots, field)
        if folder is None:
            return None, [problem] if problem else []
        try:
            config = read_json_object(folder / "config.json")
        except ValueError as error:
            return None, [FieldProblem(field=field, message=str(error), fix="save the model again")]
        if config is None:
            problem = FieldProblem(
                field=field,
                message=f"there is no config.json in {quote(name)}",
                fix="name a folder as save_pretrained writes it",
            )
            return None, [problem]
        if not any(folder.glob("*.safetensors")):
            problem = FieldProblem(
                field=field,
                message=f"there are no *.safetensors in {quote(name)}",
                fix="save the weights with save_pretrained; pickled weights are not read",
            )
            return None, [problem]
        parsed, problems = read_model(config, field)
        problems += check_labels(config, field)
        vocabulary = parsed.vocab_size if parsed else None
        problems += check_tokenizer(folder, vocabulary=vocabulary, field=field)
        if parsed is None or problems:
            return None, problems
        resolved = ResolvedModel(
            kind="huggingface", config=config, tokenizer=str(folder), weights=str(folder)
        )
        head: Head = "value" if is_classifier(config) else "vocabulary"
        return FoundModel(resolved=resolved, config=parsed, source=source, head=head), []

    def _random(
        self, source: ModelSource, parent: str
    ) -> tuple[FoundModel | None, list[FieldProblem]]:
        init = source.init
        if init is None:
            raise ValueError("the source names no model")  # its own validator excludes that
        parsed, problems = read_model(init.config, f"{parent}.config")
        field = f"{parent}.tokenizer"
        folder, problem = find_folder(init.tokenizer, self._roots, field)
        if problem:
            problems.append(problem)
        if folder is not None:
            vocabulary = parsed.vocab_size if parsed else None
            problems += check_tokenizer(folder, vocabulary=vocabulary, field=field)
        if parsed is None or folder is None or problems:
            return None, problems
        resolved = ResolvedModel(kind="random", config=init.config, tokenizer=str(folder))
        return FoundModel(resolved=resolved, config=parsed, source=source, head=None), []

    def _from_job(self, reference: str, field: str) -> tuple[FoundModel | None, list[FieldProblem]]:
        name, _, wanted = reference.removeprefix("job:").rpartition("@")
        try:
            job = self._store.jobs.find(name)
        except NotFound:
            problem = FieldProblem(
                field=field,
                message=f"there is no job with the id or name {quote(name)}",
                fix="GET /v1/jobs lists them",
            )
            return None, [problem]
        found, missing = self.find_checkpoint(job, wanted, field)
        if found is None:
            return None, [missing] if missing else []
        step, folder = found
        pinned = ModelSource.model_validate({"from": f"job:{job.id}@{step}"})
        return self.of_checkpoint(job, folder, pinned, field)

    def of_checkpoint(
        self, job: Job, folder: Path, source: ModelSource, field: str
    ) -> tuple[FoundModel | None, list[FieldProblem]]:
        """The model of a checkpoint, or None and what is wrong.

        Args:
            job: that the checkpoint is of.
            folder: the checkpoint.
            source: what the found model's `source` shall be.
            field: that problems are of.
        """
        try:
            context = job.context()
        except ValidationError:
            message = f"the job {job.id} is of a version of the service that this one cannot read"
            fix = "export it, and name the folder with `path`"
            return None, [FieldProblem(field=field, message=message, fix=fix)]
        earlier = context.model
        # A checkpoint carries its own config and tokenizer; the job's are the same, elsewhere.
        own = folder / "hf"
        try:
            config = read_json_object(own / "config.json") or earlier.config
        except ValueError as error:
            return None, [FieldProblem(field=field, message=f"the checkpoint's {error}")]
        tokenizer = own if (own / "tokenizer.json").is_file() else Path(earlier.tokenizer)
        parsed, problems = read_model(config, field)
        vocabulary = parsed.vocab_size if parsed else None
        problems += check_tokenizer(tokenizer, vocabulary=vocabulary, field=field)
        if parsed is None or problems:
            return None, problems
        resolved = ResolvedModel(
            kind="checkpoint", config=config, tokenizer=str(tokenizer), weights=str(folder)
        )
        head = context.spec.algorithm.head
        return FoundModel(resolved=resolved, config=parsed, source=source, head=head), []

    def find_checkpoint(
        self, job: Job, wanted: str, field: str
    ) -> tuple[tuple[int, Path] | None, FieldProblem | None]:
        """Step and folder of a checkpoint of a job, or None and what is wrong.

        Args:
            job: whose it is.
            wanted: `latest` or a step.
            field: that problems are of.
        """
        root = JobFolder(self._jobs_dir / job.id).checkpoints_path
        steps = checkpoint_folders(root)
        if not steps:
            return None, FieldProblem(
                field=field,
                message=f"the job {job.id} ({job.state}) has no checkpoint yet",
                fix="wait for it to end, or set checkpoint.every_steps",
            )
        if wanted == "latest":
            latest = latest_step(root)
            step = latest if latest in steps else max(steps)
        else:
            step = int(wanted)
        if step in steps:
            return (step, steps[step]), None
        return None, FieldProblem(
            field=field,
            message=f"the job {job.id} has no checkpoint of step {step}",
            fix=f"use latest, or one of the steps: {', '.join(map(str, sorted(steps)))}",
        )


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a model that gives a sequence numbers in place of tokens."""
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names
    )


def check_labels(config: Mapping[str, Any], field: str) -> list[FieldProblem]:
    """Whether such a model gives one number, as a reward model does."""
    if not is_classifier(config):
        return []
    # transformers writes one label's name only where there is one, and takes two by default.
    labels, count = config.get("id2label"), config.get("num_labels", 2)
    if isinstance(labels, dict):
        count = len(labels)
    if count == 1:
        return []
    message = f"the model in this folder has {count!r} numbers for a sequence, for so many classes"
    fix = "a reward model has one: save it with num_labels = 1"
    return [FieldProblem(field=field, message=message, fix=fix)]


def read_model(
    config: Mapping[str, Any], field: str
) -> tuple[ModelConfig | None, list[FieldProblem]]:
    """Reads a config.

    Args:
        config: as in config.json.
        field: what to call it in problems.

    Returns:
        The model, or None and what is wrong.
    """
    try:
        return ModelConfig.from_hf(config), []
    except UnsupportedModel as error:
        return None, [
            FieldProblem(field=f"{field}.{problem.name}", message=problem.message, fix=problem.fix)
            for problem in error.problems
        ]
