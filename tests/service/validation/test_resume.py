"""Going on with another job: `resume` of a job's document."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from service.jobs import JobFolder, JobState
from service.spec import JobContext
from service.store import IdempotencyConflict
from service.validation import resume
from tests.service.model_folders import CONFIG, write_tokenizer
from tests.service.running_service import RunningService
from tests.service.validation.test_submit import refused


def publish(service: RunningService, job_id: str, step: int) -> Path:
    """A checkpoint as a driver leaves it, as far as the service looks at it."""
    root = service.settings.jobs_dir / job_id / "checkpoints"
    folder = root / f"step-{step:08d}"
    write_tokenizer(folder / "hf")
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "state").mkdir()
    (folder / "state" / "__0_0.distcp").write_bytes(bytes([step]) * 1000)
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    manifest = {
        "step": step,
        "attempt": 1,
        "layout": {"tp": 2, "sequence_parallel": True},
        "created_at": "2026-01-01T00:00:00.000+00:00",
        "files": {n: {"size": (folder / n).stat().st_size, "sha256": ""} for n in names},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (root / "latest").write_text(folder.name + "\n")
    return folder


@pytest.fixture
def earlier(service: RunningService) -> dict[str, Any]:
    """A job with two checkpoints."""
    job = service.submit(
        name="earlier",
        parallel={"tp": 2},
        training={"max_length": 64, "global_batch_size": 8, "steps": 100},
        optimizer={"learning_rate": 0.001, "schedule": "cosine"},
    )
    service.wait_for(job["id"], JobState.QUEUED)
    publish(service, job["id"], 10)
    publish(service, job["id"], 20)
    return job


def submitted(service: RunningService, document: dict[str, Any]) -> JobContext:
    answer = service.http.post("/v1/jobs", json=document)
    assert answer.status_code == 201, answer.text
    return service.store.jobs.get(answer.json()["id"]).context()


def test_a_short_document_takes_the_rest_from_the_job(
    service: RunningService, earlier: dict[str, Any]
) -> None:
    context = submitted(
        service,
        {
            "name": "next",
            "resume": {"job": "earlier"},
            "training": {"steps": 200},
            "parallel": {"pp": 2},
        },
    )
    first = service.store.jobs.get(earlier["id"]).context()
    assert context.spec.training == first.spec.training.model_copy(update={"steps": 200})
    assert (context.spec.parallel.tp, context.spec.parallel.pp) == (1, 2)  # not a mixture
    assert context.spec.optimizer == first.spec.optimizer
    assert (context.spec.model, context.spec.data) == (first.spec.model, first.spec.data)
    assert context.spec.resume is not None
    assert (context.spec.resume.job, context.spec.resume.step) == (earlier["id"], 20)
    assert context.resume is not None
    assert (context.resume.job, context.resume.step) == (earlier["id"], 20)


def test_the_checkpoint_outlives_its_job(service: RunningService, earlier: dict[str, Any]) -> None:
    document = {"name": "next", "resume": {"job": "earlier", "step": 10, "layout": {"pp": 2}}}
    context = submitted(service, document)
    assert context.spec.parallel.pp == 2
    assert context.spec.parallel.tp == 1
    assert context.spec.resume is not None
    assert context.spec.resume.layout is None
    root = service.settings.jobs_dir / earlier["id"] / "checkpoints"
    theirs = {p.relative_to(root): p.stat() for p in root.rglob("step-00000010/**/*")}
    shutil.rmtree(root)  # what retention does to it, and more
    assert context.resume is not None
    ours = Path(context.resume.checkpoint)
    assert ours == service.settings.jobs_dir / context.job_id / "resume" / "step-00000010"
    assert (ours / "state" / "__0_0.distcp").read_bytes() == bytes([10]) * 1000
    assert (ours / "manifest.json").is_file()
    assert Path(context.model.tokenizer) == ours / "hf"
    assert context.model.config == CONFIG
    linked = {p.relative_to(ours.parent): p.stat() for p in ours.rglob("*")}
    assert linked.keys() == theirs.keys()
    assert all(linked[p].st_ino == theirs[p].st_ino for p in linked if (ours.parent / p).is_file())


def test_nothing_is_left_of_a_job_that_is_not_stored(
    service: RunningService, earlier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def refuse(context: JobContext, *_args: Any, **_fields: Any) -> None:
        folders.append(service.settings.jobs_dir / context.job_id)
        assert folders[0].is_dir()
        raise IdempotencyConflict("key", earlier["id"])

    monkeypatch.setattr(service.store.jobs, "create", refuse)
    document = {"name": "next", "resume": {"job": earlier["id"]}}
    assert service.http.post("/v1/jobs", json=document).status_code == 409
    assert not folders[0].exists()


def test_a_job_that_is_stored_after_all_keeps_what_it_goes_on_from(
    service: RunningService, earlier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = service.store.jobs.create
    stored: list[Any] = []
    failed = OperationalError("COMMIT", {}, Exception("the connection broke"))

    def lose_the_answer(context: JobContext, *args: Any, **fields: Any) -> None:
        stored.append(create(context, *args, **fields))
        raise failed

    def lose_the_request(context: JobContext, *_args: Any, **_fields: Any) -> None:
        stored.append(context)
        raise failed

    for kept, lose in enumerate((lose_the_request, lose_the_answer)):
        before = set(service.settings.jobs_dir.iterdir())
        monkeypatch.setattr(service.store.jobs, "create", lose)
        document = {"name": "next", "resume": {"job": earlier["id"]}}
        # The server closes the connection after a failure; the next request must not get it.
        answer = service.http.post("/v1/jobs", json=document, headers={"connection": "close"})
        assert answer.status_code >= 500
        assert len(stored) == kept + 1
        assert len(set(service.settings.jobs_dir.iterdir()) - before) == kept


def test_nothing_is_left_of_a_checkpoint_that_finds_no_room(
    service: RunningService,
    earlier: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = {"name": "next", "resume": {"job": earlier["id"]}}
    spec = resume.read_submission(json.dumps(document).encode(), service.store)
    found = service.context.validator.accept(spec).resume
    assert found is not None

    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(resume, "_link", full)
    with pytest.raises(OSError, match="no space left"):
        resume.put_aside(found, JobFolder(tmp_path / "job"))
    assert not (tmp_path / "job").exists()


def test_a_whole_document_may_resume_too(service: RunningService, earlier: dict[str, Any]) -> None:
    first = service.store.jobs.get(earlier["id"])
    document = {**first.spec, "name": "next", "resume": {"job": earlier["id"], "step": "latest"}}
    plan = service.http.post("/v1/jobs:plan", json=document)
    assert plan.status_code == 200, plan.text
    assert plan.json()["spec"]["resume"] == {"job": earlier["id"], "step": 20, "layout": None}
    folders = sorted(service.settings.jobs_dir.iterdir())
    assert submitted(service, document).spec.parallel.tp == 2
    assert len(list(service.settings.jobs_dir.iterdir())) == len(folders) + 1  # the plan took none


@pytest.mark.usefixtures("earlier")
def test_a_job_that_resumed_can_be_resumed(service: RunningService) -> None:
    second = submitted(service, {"name": "second", "resume": {"job": "earlier"}})
    publish(service, second.job_id, 30)
    third = submitted(service, {"name": "third", "resume": {"job": "second"}})
    assert third.resume is not None
    assert (third.resume.job, third.resume.step) == (second.job_id, 30)
    assert third.spec.data == second.spec.data


@pytest.mark.parametrize(
    ("parts", "field", "message"),
    [
        ({"resume": {"job": "nobody"}}, "resume.job", "there is no job"),
        ({"resume": {"job": "earlier", "step": 15}}, "resume.step", "no checkpoint of step 15"),
        ({"algorithm": {"type": "grpo"}}, "algorithm.type", "'grpo' is not what the job"),
        ({"precision": {"dtype": "bf16"}}, "precision.dtype", "'bf16' is not what the job"),
        ({"data": {"shuffle_seed": 2}}, "data.shuffle_seed", "'2' is not what the job"),
        ({"training": {"steps": 20}}, "training.steps", "20 steps are done already"),
        ({"model": {"from": "job:earlier@10"}}, "model", "this is another"),
        (
            {"resume": {"job": "earlier", "layout": {"pp": 2}}, "parallel": {"tp": 2}},
            "resume.layout",
            "given here and, another one, in `parallel`",
        ),
    ],
)
def test_what_cannot_be_gone_on_with(
    service: RunningService,
    earlier: dict[str, Any],
    parts: dict[str, Any],
    field: str,
    message: str,
) -> None:
    document = {"name": "next", "resume": {"job": "earlier"}, **parts}
    if "algorithm" in parts:
        document |= {"environment": {"id": "tools/calculator"}, "data": None, **parts}
    if "data" in parts:
        data = service.store.jobs.get(earlier["id"]).spec["data"]
        document["data"] = {**data, **parts["data"]}
    errors = {error["field"]: error for error in refused(service, document)}
    assert message in errors[field]["message"]
    assert errors[field]["fix"]


@pytest.mark.usefixtures("earlier")
def test_other_rows_are_another_job(service: RunningService) -> None:
    document = {"name": "next", "resume": {"job": "earlier"}, "data": {"train": service.upload()}}
    (error,) = refused(service, document)
    assert error["field"] == "data.train"


def test_a_job_without_a_checkpoint(service: RunningService) -> None:
    service.wait_for(service.submit(name="young")["id"], JobState.QUEUED)
    (error,) = refused(service, {"name": "next", "resume": {"job": "young"}})
    assert (error["field"], "no checkpoint yet" in error["message"]) == ("resume.job", True)


def test_a_short_document_with_a_key_twice(
    service: RunningService, earlier: dict[str, Any]
) -> None:
    body = '{"name": "next", "resume": {"job": "earlier"}, "resume": {"job": "earlier"}}'
    answer = service.http.post("/v1/jobs", content=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "resume"
    assert service.store.jobs.find(earlier["id"])
