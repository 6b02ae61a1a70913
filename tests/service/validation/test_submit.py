"""What only the service can know: models, files, jobs, environments, clusters."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.model_folders import CONFIG, write_model, write_tokenizer
from tests.service.running_service import ROW, RunningService


def refused(service: RunningService, document: dict[str, Any]) -> list[dict[str, str]]:
    """The errors of a document, alike from plan and submit, which stores nothing."""
    before = sum(service.store.jobs.counts().values())  # those that are there may move on meanwhile
    folders = sorted(service.settings.jobs_dir.iterdir())
    plan = service.http.post("/v1/jobs:plan", json=document)
    submit = service.http.post("/v1/jobs", json=document)
    assert plan.status_code == submit.status_code == 422, submit.text
    assert plan.json()["errors"] == submit.json()["errors"]
    assert sum(service.store.jobs.counts().values()) == before
    assert sorted(service.settings.jobs_dir.iterdir()) == folders
    return list(submit.json()["errors"])


def test_every_fault_of_a_document_comes_at_once(service: RunningService) -> None:
    document = service.job_document(
        model={"path": "missing"},
        data={"train": "file-aaaaaaaaaaaaaaaa", "validation": "file-bbbbbbbbbbbbbbbb"},
        training={"global_batch_size": 7},
        parallel={"dp": 2},
        resources={"cluster": "moon"},
        evaluation={"environment": {"id": "tools/abacus"}, "items": 2},
    )
    errors = refused(service, document)
    assert {e["field"] for e in errors} == {
        "model.path",
        "data.train",
        "data.validation",
        "training.global_batch_size",
        "resources.cluster",
        "evaluation.environment.id",
    }
    assert all(e["fix"] for e in errors)
    fixes = {e["field"]: e["fix"] for e in errors}
    assert fixes["resources.cluster"] == "use one of: local"


@pytest.fixture
def hopper(new_service: Callable[..., RunningService]) -> RunningService:
    """A service on a machine with eight Hopper GPUs."""
    return new_service(gpus=8, capability=(9, 0))


def test_fp8_that_cards_or_layers_cannot_compute_is_refused(
    hopper: RunningService, model_root: Path
) -> None:
    write_model(model_root / "wide", hidden_size=512, intermediate_size=1024)
    document = hopper.job_document(
        model={"path": "wide"}, resources={"gpus_per_node": 8}, parallel={"tp": 2}
    )

    def errors(dtype: str = "bf16", **settings: Any) -> list[dict[str, str]]:
        precision = {"dtype": dtype, "fp8": settings}
        return refused(hopper, document | {"precision": precision})

    assert errors(recipe="mxfp8") == [
        {
            "field": "precision.fp8.recipe",
            "message": "mxfp8 needs compute capability 10.0 (Blackwell), and the GPUs of local "
            "have 9.0",
            "fix": "use one of: delayed, tensorwise, blockwise",
        }
    ]
    (border,) = errors(recipe="delayed", first_last_bf16_layers=1)
    assert border["field"] == "precision.fp8.first_last_bf16_layers"
    (dtype,) = errors(dtype="fp32", recipe="tensorwise")
    assert (dtype["field"], dtype["fix"]) == ("precision.dtype", "use bf16 or fp16, or fp8: null")
    document |= {"model": {"path": "tiny"}, "parallel": {"tp": 4}}
    (sides,) = errors(recipe="tensorwise")
    assert sides == {
        "field": "precision.fp8.recipe",
        "message": "tensorwise takes matrices whose sides are multiples of 16 on each rank, and "
        "with tp = 4 there are intermediate_size / tp = 24",
        "fix": "use a lower tp, another recipe (tensorwise takes multiples of 16), or fp8: null",
    }


def test_fp8_that_the_cards_compute_is_accepted(hopper: RunningService, model_root: Path) -> None:
    write_model(model_root / "wide", hidden_size=512, intermediate_size=1024)
    document = hopper.job_document(model={"path": "wide"}, resources={"gpus_per_node": 8})
    for recipe in ("delayed", "tensorwise", "blockwise"):
        sent = document | {"precision": {"dtype": "bf16", "fp8": {"recipe": recipe}}}
        plan = hopper.http.post("/v1/jobs:plan", json=sent)
        assert plan.status_code == 200, plan.text
    job = hopper.http.post("/v1/jobs", json=sent)
    assert job.status_code == 201, job.text
    assert job.json()["resolved_spec"]["precision"]["fp8"]["recipe"] == "blockwise"


@pytest.mark.parametrize(
    ("parallel", "field"),
    [
        ({"tp": 16}, "parallel.tp"),
        ({"tp": 3}, "parallel.tp"),
        ({"pp": 5}, "parallel.pp"),
        ({"pp": 2, "vpp": 4}, "parallel.vpp"),
        ({"pp": 2, "pipeline_layers": [3, 2]}, "parallel.pipeline_layers"),
        ({"ep": 2, "dp": 2}, "parallel.ep"),
        ({"sequence_parallel": True}, "parallel.sequence_parallel"),
    ],
)
def test_layouts_are_checked_against_the_models_config(
    service: RunningService, parallel: dict[str, int], field: str
) -> None:
    errors = refused(service, service.job_document(parallel=parallel))
    assert {e["field"] for e in errors} == {field}


def test_a_sequence_longer_than_the_model(service: RunningService) -> None:
    (error,) = refused(service, service.job_document(training={"max_length": 513}))
    assert error["field"] == "training.max_length"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "llama, qwen2, qwen3"),
        ({"vocab_size": 39}, "ids up to 39"),
        ({"num_attention_heads": 5}, "do not divide"),
    ],
)
def test_model_folders_that_cannot_be_trained(
    service: RunningService, model_root: Path, changes: dict[str, Any], says: str
) -> None:
    name = "bad-" + "-".join(map(str, changes.values()))
    write_model(model_root / name, **changes)
    errors = refused(service, service.job_document(model={"path": name}))
    assert says in json.dumps(errors)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_model_folders_with_something_missing(
    service: RunningService, model_root: Path, missing: str
) -> None:
    folder = write_model(model_root / f"without-{missing}")
    (folder / missing).unlink()
    (error,) = refused(service, service.job_document(model={"path": folder.name}))
    assert error["field"] == "model.path"
    assert missing.replace("model", "*") in error["message"]


@pytest.mark.parametrize("content", ["{", "[]", '{"a": NaN}', "\0"])
def test_a_config_that_cannot_be_read(
    service: RunningService, model_root: Path, content: str
) -> None:
    folder = write_model(model_root / "broken-config")
    (folder / "config.json").write_text(content)
    (error,) = refused(service, service.job_document(model={"path": folder.name}))
    assert "config.json" in error["message"]


def test_a_tokenizer_without_a_chat_template(service: RunningService, model_root: Path) -> None:
    folder = write_tokenizer(model_root / "no-template", chat_template=False)
    document = service.job_document(model={"init": {"config": CONFIG, "tokenizer": folder.name}})
    (error,) = refused(service, document)
    assert error["field"] == "model.init.tokenizer"
    assert "chat template" in error["message"]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert service.http.post("/v1/jobs:plan", json=document).status_code == 200


def test_a_file_for_another_purpose(service: RunningService) -> None:
    other = service.http.post(
        "/v1/files", data={"purpose": "user_data"}, files={"file": ("x", b"x")}
    ).json()
    (error,) = refused(service, service.job_document(data={"train": other["id"]}))
    assert "user_data" in error["message"]
    assert "fine-tune" in error["fix"]


PAIRS = b'{"prompt":"a","chosen":"b","rejected":"c"}\n'
LABELS = b'{"prompt":"a","completion":"b","label":true}\n'


@pytest.mark.parametrize(
    ("algorithm", "rows", "says"),
    [
        ("sft", PAIRS, "a pair of answers"),
        ("sft", LABELS, "an answer with a label"),
        ("dpo", ROW, "a conversation"),
        ("kto", PAIRS, "a pair of answers"),
        ("reward_model", LABELS, "an answer with a label"),
    ],
)
def test_b11_a_file_of_another_kind_than_the_algorithm_trains_on(
    service: RunningService, algorithm: str, rows: bytes, says: str
) -> None:
    data = {"train": service.upload(rows), "validation": service.upload(rows)}
    errors = refused(service, service.job_document(algorithm={"type": algorithm}, data=data))
    assert [error["field"] for error in errors] == ["data.train", "data.validation"]
    assert says in errors[0]["message"]
    assert "another file" in errors[0]["fix"]


@pytest.mark.parametrize(("algorithm", "rows"), [("dpo", PAIRS), ("kto", LABELS), ("sft", ROW)])
def test_a_file_of_the_right_kind(service: RunningService, algorithm: str, rows: bytes) -> None:
    document = service.job_document(
        algorithm={"type": algorithm}, data={"train": service.upload(rows)}
    )
    answer = service.http.post("/v1/jobs:plan", json=document)
    assert answer.status_code == 200, answer.text


def test_rows_may_lie_under_a_data_root_or_in_s3(service: RunningService, tmp_path: Path) -> None:
    root = service.settings.data_dir / "data"
    root.mkdir(exist_ok=True)
    (root / "rows.jsonl").write_bytes(ROW)
    (root / "pairs.jsonl").write_bytes(PAIRS)
    (tmp_path / "rows.jsonl").write_bytes(ROW)
    (root / "link.jsonl").unlink(missing_ok=True)
    (root / "link.jsonl").symlink_to(tmp_path / "rows.jsonl")

    def plan(train: str) -> Any:
        document = service.job_document(data={"train": train})
        return service.http.post("/v1/jobs:plan", json=document)

    for train in (str(root / "rows.jsonl"), "s3://bucket/rows.parquet"):
        assert plan(train).status_code == 200, plan(train).text
    outside = [str(tmp_path / "rows.jsonl"), str(tmp_path / "none"), str(root / "link.jsonl")]
    for train in (*outside, f"{root}/../../etc/passwd", str(root)):
        (error,) = plan(train).json()["errors"]
        assert error["field"] == "data.train"
        assert "under one of the service's data roots" in error["message"]
    (error,) = plan(str(root / "pairs.jsonl")).json()["errors"]
    assert "a pair of answers" in error["message"]
    for train in ("s3://b", "rows.jsonl", "http://x/y", "file-x"):
        (error,) = plan(train).json()["errors"]
        assert error["field"] == "data.train"


def online(service: RunningService, **environment: Any) -> dict[str, Any]:
    chain_sum = {"id": "reasoning_gym/chain_sum", "config": {"min_terms": 3, "max_terms": 3}}
    reference = {"id": "tools/calculator", "config": {"questions": chain_sum}}
    document = service.job_document(
        algorithm={"type": "grpo", "group_size": 4},
        environment=reference | environment,
        training={"steps": 2, "global_batch_size": 8, "max_length": 128},
        rollout={"max_new_tokens": 32},
    )
    del document["data"]
    return document


def test_an_environments_version_is_pinned_at_submit(service: RunningService) -> None:
    plan = service.http.post("/v1/jobs:plan", json=online(service)).json()
    assert plan["spec"]["environment"]["version"] == 1
    job = service.http.post("/v1/jobs", json=online(service)).json()
    assert job["resolved_spec"]["environment"]["version"] == 1
    assert "version" not in job["spec"]["environment"]


@pytest.mark.parametrize(
    ("environment", "field", "says"),
    [
        ({"id": "tools/calculater"}, "environment.id", "did you mean tools/calculator"),
        ({"id": "no/such"}, "environment.id", "GET /v1/environments"),
        ({"config": {}}, "environment.config.questions", "GET /v1/environments"),
        ({"version": 99}, "environment.version", "GET /v1/environments"),
        (
            {"config": {"questions": {"id": "math/gsm8k", "config": {"nope": 3}}}},
            "environment.config.questions.config.nope",
            "GET /v1/environments",
        ),
    ],
)
def test_environments_and_their_settings_are_checked(
    service: RunningService, environment: dict[str, Any], field: str, says: str
) -> None:
    errors = refused(service, online(service, **environment))
    assert field in {e["field"] for e in errors}
    assert says in json.dumps(errors)


def test_lengths_of_episodes_go_by_the_environment_s_turns(service: RunningService) -> None:
    overlong = {"max_tokens": 64, "buffer_tokens": 16}
    document = online(service, max_turns=2) | {
        "algorithm": {"type": "grpo", "group_size": 4, "overlong": overlong}
    }
    assert service.http.post("/v1/jobs:plan", json=document).json()["notes"] == []
    document["environment"]["max_turns"] = 1
    (error,) = refused(service, document)
    assert error["field"] == "algorithm.overlong.max_tokens"
    assert "at most 32 of the policy" in error["message"]
    # Where the environment is not there, nothing is known of its turns.
    document["environment"]["id"] = "no/such"
    (error,) = refused(service, document)
    assert error["field"] == "environment.id"
    constant = online(service, max_turns=2) | {"algorithm": {"type": "dr_grpo", "group_size": 4}}
    (note,) = service.http.post("/v1/jobs:plan", json=constant).json()["notes"]
    assert "length_constant is 1024, and an episode has at most 64 tokens" in note


def test_a_batch_that_is_no_multiple_of_the_group(service: RunningService) -> None:
    document = online(service)
    document["training"]["global_batch_size"] = 10
    (error,) = refused(service, document)
    assert error["field"] == "training.global_batch_size"


def _publish_checkpoint(service: RunningService, job_id: str, step: int) -> Path:
    root = service.settings.jobs_dir / job_id / "checkpoints"
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True)
    manifest = {
        "step": step,
        "attempt": 1,
        "layout": {"tp": 1, "pp": 1, "dp": 1},
        "created_at": "2026-01-01T00:00:00Z",
        "files": {"a": {"size": 3, "sha256": ""}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (root / "latest").write_text(f"{folder.name}\n")
    return folder


def test_a_model_from_another_job(service: RunningService) -> None:
    earlier = service.submit(name="earlier")
    reference = f"job:{earlier['id']}@latest"
    (error,) = refused(service, service.job_document(model={"from": reference}))
    assert error["field"] == "model.from"
    assert "no checkpoint yet" in error["message"]

    _publish_checkpoint(service, earlier["id"], 10)
    newest = _publish_checkpoint(service, earlier["id"], 20)
    (newest.parent / "step-00000030").mkdir()  # without a manifest: not published
    job = service.submit(model={"from": "job:earlier@latest"})
    assert job["spec"]["model"]["from"] == "job:earlier@latest"
    assert job["resolved_spec"]["model"]["from"] == f"job:{earlier['id']}@20"
    context = service.store.jobs.get(job["id"]).context()
    assert context.model.kind == "checkpoint"
    assert context.model.weights == str(newest)
    assert context.model.config["model_type"] == "qwen2"

    job = service.submit(model={"from": f"job:{earlier['id']}@10"})
    assert job["resolved_spec"]["model"]["from"].endswith("@10")
    (error,) = refused(service, service.job_document(model={"from": "job:earlier@30"}))
    assert "10, 20" in error["fix"]
    listed = service.http.get("/v1/jobs/earlier/checkpoints").json()["data"]
    assert [(c["step"], c["latest"], c["bytes"]) for c in listed] == [(10, False, 3), (20, True, 3)]
    assert listed[1]["source"] == f"job:{earlier['id']}@20"
    assert listed[1]["created_at"] == 1767225600.0


def test_a_model_from_a_job_that_is_not_there(service: RunningService) -> None:
    (error,) = refused(service, service.job_document(model={"from": "job:nobody@latest"}))
    assert "'nobody'" in error["message"]


def test_a_plan_resolves_everything_and_takes_nothing(service: RunningService) -> None:
    before = sum(service.store.jobs.counts().values())
    training = {"max_length": 128, "global_batch_size": 16, "micro_batch_size": 4}
    document = service.job_document(parallel={"tp": 2, "pp": 2, "dp": 2}, training=training)
    plan = service.http.post("/v1/jobs:plan", json=document).json()
    sizes = {"tp": 2, "pp": 2, "dp": 2, "vpp": 1, "cp": 1, "ep": 1, "world_size": 8}
    assert plan["layout"] == sizes | {"sequence_parallel": False, "pipeline_layers": None}
    assert (plan["micro_batch_size"], plan["micro_batches"]) == (4, 2)
    assert [rank["pp_rank"] for rank in plan["memory_per_rank"]] == [0, 1]
    assert all(rank["activations"] > 0 for rank in plan["memory_per_rank"])
    assert (plan["padded_vocabulary"], plan["padding_factor"]) == (48, 1)
    assert (plan["notes"], plan["proposals"]) == ([], None)
    assert plan["spec"]["optimizer"]["betas"] == [0.9, 0.95]
    assert sum(service.store.jobs.counts().values()) == before


def test_a_plan_proposes_layouts_that_a_submit_accepts(service: RunningService) -> None:
    document = service.job_document(training={"max_length": 128, "global_batch_size": 16})
    url = "/v1/jobs:plan?gpu_memory_gib=16&gpus_per_node=4"
    plan = service.http.post(url, json=document).json()
    assert plan["proposals"]
    times = [one["relative_time"] for one in plan["proposals"]]
    assert times == sorted(times)
    for one in plan["proposals"]:
        assert one["layout"]["world_size"] == 4
        assert 0 < one["memory"]["total"] < 16 * 2**30
        # This machine has no GPUs; the same layout on the CPU is checked in the same way.
        changed = document | {
            "parallel": one["changes"]["parallel"] | {"dp": one["layout"]["dp"]},
            "training": document["training"] | one["changes"]["training"],
        }
        assert service.http.post("/v1/jobs:plan", json=changed).status_code == 200


def test_a_plan_says_where_nothing_fits(service: RunningService) -> None:
    url = "/v1/jobs:plan?gpu_memory_gib=2&gpus_per_node=1"
    plan = service.http.post(url, json=service.job_document()).json()
    assert plan["proposals"] == []
    (note,) = plan["notes"]
    assert "fits in no layout of 1 x 1 GPUs of 2 GiB" in note
    assert re.search(r"needs \d+\.\d GiB", note)


def test_proposals_need_to_know_how_many_gpus(service: RunningService) -> None:
    answer = service.http.post("/v1/jobs:plan?gpu_memory_gib=16", json=service.job_document())
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "gpus_per_node"
    assert "?gpus_per_node=8" in error["fix"]


@pytest.mark.parametrize("query", ["gpus_per_node=8", "nodes=2"])
def test_proposals_need_to_know_the_memory_of_a_gpu(service: RunningService, query: str) -> None:
    answer = service.http.post(f"/v1/jobs:plan?{query}", json=service.job_document())
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "gpu_memory_gib"
    assert "?gpu_memory_gib=80" in error["fix"]
