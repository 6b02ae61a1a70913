"""Going on with another job (`resume`): what it means, and whether it can be.

The checkpoint is put aside when the job is submitted: its files are linked into the new job's
folder (copied, where that is another file system). They are never written to again, so the link
is as good as a copy and takes no space, and the other job may delete its own name for them while
this one still waits for its turn.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from service.jobs import Job, JobFolder
from service.spec import JobSpec, ModelSource, ResumedCheckpoint, ResumeSpec
from service.spec.durable import fsync_file, fsync_folders
from service.store import NotFound, Store
from service.validation.document import read_job_spec
from service.validation.model import FoundModel, ModelFinder
from service.validation.problems import FieldProblem, InvalidRequest, quote
from service.validation.repeated_keys import find_repeated_keys

_REPLACED_WHOLE = {"name", "model", "data", "environment", "parallel", "resume"}
"""Parts of a short document that do not take single fields from the job it goes on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundResume:
    """A checkpoint that a job can go on from."""

    job: str
    """Id of the job that published it."""
    step: int
    folder: Path
    model: FoundModel
    pinned: ResumeSpec
    """The reference with name and `latest` replaced by what they meant at submit."""
    sent: JobSpec
    """The other job as it was sent."""
    resolved: JobSpec
    """The other job with its models pinned."""


def read_submission(body: bytes, store: Store) -> JobSpec:
    """The job of a request's body; one that resumes another may leave out what is the same.

    Raises:
        InvalidRequest: names each field that is wrong.
    """
    return read_job_spec(_completed(body, store))


def with_layout(spec: JobSpec) -> tuple[JobSpec, list[FieldProblem]]:
    """The job with `resume.layout`, where it is given, in the place of `parallel`."""
    resume = spec.resume
    if resume is None or resume.layout is None:
        return spec, []
    if "parallel" in spec.model_fields_set and spec.parallel != resume.layout:
        problem = FieldProblem(
            field="resume.layout",
            message="the layout is given here and, another one, in `parallel`",
            fix="write one of them and leave the other out",
        )
        return spec, [problem]
    moved = {
        "parallel": resume.layout,
        "resume": ResumeSpec(job=resume.job, step=resume.step),
    }
    return spec.model_copy(update=moved), []


class ResumeFinder:
    """Resolves `resume` of a job."""

    def __init__(self, *, store: Store, models: ModelFinder) -> None:
        self._store, self._models = store, models

    def find(
        self, spec: JobSpec, resume: ResumeSpec
    ) -> tuple[FoundResume | None, list[FieldProblem]]:
        """The checkpoint, or None and what is wrong."""
        try:
            job = self._store.jobs.find(resume.job)
        except NotFound:
            return None, [_no_job(resume.job)]
        field = "resume.step" if resume.step != "latest" else "resume.job"
        checkpoint, missing = self._models.find_checkpoint(job, str(resume.step), field)
        if checkpoint is None:
            return None, [missing] if missing else []
        step, folder = checkpoint
        try:
            earlier = job.context()
        except ValidationError:
            message = f"the job {job.id} is of a version of the service that this one cannot read"
            return None, [FieldProblem(field="resume.job", message=message, fix="use model.path")]
        problems = _differences(spec, earlier.spec, job) + _is_over(spec, step)
        model, found = self._models.of_checkpoint(job, folder, earlier.spec.model, "resume.job")
        if model is None or problems:
            return None, problems + found
        # The model as the job started is that of the other job; only a reference model needs it.
        start = earlier.model.model_copy(
            update={"config": model.resolved.config, "tokenizer": model.resolved.tokenizer}
        )
        return FoundResume(
            job=job.id,
            step=step,
            folder=folder,
            model=replace(model, resolved=start),
            pinned=ResumeSpec(job=job.id, step=step),
            sent=JobSpec.model_validate(job.spec),
            resolved=earlier.spec,
        ), []


def put_aside(resume: FoundResume, folder: JobFolder) -> ResumedCheckpoint:
    """Links a checkpoint into the folder of the new job.

    Raises:
        InvalidRequest: it was deleted in this very moment.
    """
    target = folder.path / "resume" / resume.folder.name
    fresh = folder.path / f".resume-{resume.folder.name}"
    try:
        manifest = json.loads((resume.folder / "manifest.json").read_text(encoding="utf-8"))
        for name in ("manifest.json", *manifest["files"]):
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            _link(resume.folder / name, fresh / name)
        target.parent.mkdir(exist_ok=True)
        os.rename(fresh, target)
        fsync_folders(folder.path)
    except OSError as error:  # a full disk, where files must be copied
        put_back(folder)
        if not isinstance(error, FileNotFoundError):
            raise
        problem = FieldProblem(
            field="resume.step",
            message=f"the job {resume.job} has just deleted its checkpoint of step {resume.step}",
            fix="try again, or set its checkpoint.keep_every",
        )
        raise InvalidRequest([problem]) from None
    return ResumedCheckpoint(job=resume.job, step=resume.step, checkpoint=str(target))


def put_back(folder: JobFolder) -> None:
    """Undoes `put_aside`, for a job that was not stored after all."""
    shutil.rmtree(folder.path, ignore_errors=True)


def _completed(body: bytes, store: Store) -> bytes:
    try:
        document = from_json(body)
    except ValueError:
        return body  # whoever reads it next says what is wrong with it
    if not isinstance(document, dict) or ("model" in document and "algorithm" in document):
        return body
    resume = document.get("resume")
    name = resume.get("job") if isinstance(resume, dict) else None
    if not isinstance(resume, dict) or not isinstance(name, str):
        return body
    if problems := find_repeated_keys(body):
        raise InvalidRequest(problems)
    try:
        job = store.jobs.find(name)
    except NotFound:
        raise InvalidRequest([_no_job(name)]) from None
    earlier = {key: value for key, value in job.spec.items() if key != "resume"}
    if resume.get("layout") is not None and "parallel" not in document:
        earlier.pop("parallel", None)
    return to_json(_merged(earlier, document, _REPLACED_WHOLE))


def _merged(
    earlier: Mapping[str, Any], document: Mapping[str, Any], whole: set[str]
) -> dict[str, Any]:
    """`document` with what it leaves out taken from `earlier`."""
    merged = dict(earlier)
    for key, value in document.items():
        base = merged.get(key)
        if isinstance(value, dict) and isinstance(base, dict) and key not in whole:
            value = _merged(base, value, set())
        merged[key] = value
    return merged


def _differences(spec: JobSpec, earlier: JobSpec, job: Job) -> list[FieldProblem]:
    """Where a job is another one than the one that it wants to go on with."""
    compared: list[tuple[str, Any, Any]] = [
        ("algorithm.type", spec.algorithm.type, earlier.algorithm.type),
        ("precision.dtype", spec.precision.dtype, earlier.precision.dtype),
    ]
    for name in ("train", "shuffle_seed", "too_long", "strings"):
        now, then = (getattr(each.data, name, None) for each in (spec, earlier))
        compared.append((f"data.{name}", now, then))
    for name in ("id", "config", "seed"):
        now, then = (getattr(each.environment, name, None) for each in (spec, earlier))
        compared.append((f"environment.{name}", now, then))
    if spec.data is not None and spec.data.too_long == "drop":  # it decides how many rows there are
        lengths = (spec.training.max_length, earlier.training.max_length)
        compared.append(("training.max_length", *lengths))
    problems = [
        FieldProblem(
            field=field,
            message=f"{quote(str(now))} is not what the job {job.id} has: {quote(str(then))}",
            fix="leave it as it was, or start a new job with `model.from`, which keeps the weights "
            "and nothing else: optimizer, counters and place in the data begin anew",
        )
        for field, now, then in compared
        if now != then
    ]
    if spec.model not in (earlier.model, ModelSource.model_validate(job.spec["model"])):
        problems.append(
            FieldProblem(
                field="model",
                message=f"`resume` goes on with the model of the job {job.id}, and this is another",
                fix="leave `model` out",
            )
        )
    return problems


def _is_over(spec: JobSpec, step: int) -> list[FieldProblem]:
    steps = spec.training.steps
    if steps is None or steps > step:
        return []
    problem = FieldProblem(
        field="training.steps",
        message=f"the checkpoint is of step {step}, so {steps} steps are done already",
        fix=f"use more than {step}: the steps of both jobs are counted together",
    )
    return [problem]


def _no_job(name: str) -> FieldProblem:
    return FieldProblem(
        field="resume.job",
        message=f"there is no job with the id or name {quote(name)}",
        fix="GET /v1/jobs lists them",
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
        fsync_file(target)
