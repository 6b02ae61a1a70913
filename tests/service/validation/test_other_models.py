"""Critic, teacher and reward model at submit: found, compared with the policy, pinned."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.jobs import new_job_id
from service.spec import JobContext
from service.validation.model import ModelFinder
from service.validation.other_models import check_trained_head
from tests.service.model_folders import write_model, write_reward_model, write_tokenizer
from tests.service.running_service import RunningService
from tests.service.store import sample_jobs
from tests.service.validation.jobs import spec
from tests.service.validation.test_resume import publish
from tests.service.validation.test_submit import online, refused


@pytest.fixture
def reward_folder(model_root: Path) -> str:
    write_reward_model(model_root / "reward")
    return "reward"


def with_algorithm(service: RunningService, **algorithm: Any) -> dict[str, Any]:
    return online(service) | {"algorithm": algorithm}


def distillation(service: RunningService, teacher: dict[str, Any], **layout: int) -> dict[str, Any]:
    model = {"source": teacher} | ({"layout": layout} if layout else {})
    return with_algorithm(service, type="distillation", teacher_model=model)


def with_reward(service: RunningService, source: dict[str, Any], **layout: int) -> dict[str, Any]:
    model = {"source": source} | ({"layout": layout} if layout else {})
    return online(service) | {"reward": {"model": model}}


def ppo(service: RunningService, critic: dict[str, Any] | None) -> dict[str, Any]:
    return with_algorithm(service, type="ppo", value_model={"source": critic})


def accepted(service: RunningService, document: dict[str, Any]) -> JobContext:
    answer = service.http.post("/v1/jobs", json=document)
    assert answer.status_code == 201, answer.text
    return service.store.jobs.get(answer.json()["id"]).context()


def reward_job(service: RunningService, name: str) -> str:
    """A job that trains a reward model, with two checkpoints; its rows do not matter here."""
    sent = sample_jobs.document(name) | {"algorithm": {"type": "reward_model"}}
    job, _ = service.store.jobs.create(sample_jobs.context(sent, new_job_id()), sent)
    publish(service, job.id, 10)
    publish(service, job.id, 20)
    return job.id


def test_every_role_is_resolved_into_the_context(
    service: RunningService, model_root: Path, reward_folder: str
) -> None:
    write_model(model_root / "teacher", num_hidden_layers=8)
    context = accepted(service, distillation(service, {"path": "teacher"}))
    teacher = context.other_models["teacher"]
    assert (teacher.kind, teacher.weights) == ("huggingface", str(model_root / "teacher"))
    assert teacher.config["num_hidden_layers"] == 8
    assert list(context.other_models) == ["teacher"]

    document = ppo(service, {"path": reward_folder})
    document["reward"] = {"model": {"source": {"path": reward_folder}}}
    context = accepted(service, document)
    assert set(context.other_models) == {"critic", "reward"}
    assert context.other_models["critic"].weights == str(model_root / reward_folder)
    # Without a source the critic begins as the policy.
    assert accepted(service, ppo(service, None)).other_models == {}


@pytest.mark.parametrize("step", ["latest", "10"])
def test_a_checkpoint_of_another_job_is_pinned_where_it_stands(
    service: RunningService, step: str
) -> None:
    job = reward_job(service, f"rm-{step}")
    document = ppo(service, {"from": f"job:rm-{step}@{step}"})
    document["reward"] = {"model": {"source": {"from": f"job:rm-{step}@{step}"}}}
    answer = service.http.post("/v1/jobs", json=document).json()
    wanted = {"from": f"job:{job}@{20 if step == 'latest' else 10}"}
    resolved = answer["resolved_spec"]
    assert resolved["reward"]["model"]["source"]["from"] == wanted["from"]
    assert resolved["algorithm"]["value_model"]["source"]["from"] == wanted["from"]
    assert answer["spec"]["reward"]["model"]["source"]["from"].endswith(f"@{step}")
    context = service.store.jobs.get(answer["id"]).context()
    assert context.spec.reward.model is not None
    assert context.spec.reward.model.source.from_job == wanted["from"]
    assert context.other_models["reward"].kind == "checkpoint"
    assert str(context.other_models["reward"].weights).endswith(
        "step-00000020" if step == "latest" else "step-00000010"
    )


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (distillation, "algorithm.teacher_model.source"),
        (with_reward, "reward.model.source"),
        (ppo, "algorithm.value_model.source"),
    ],
)
def test_each_problem_names_the_path_of_its_field(
    service: RunningService, make: Any, field: str
) -> None:
    (error,) = refused(service, make(service, {"path": "nowhere"}))
    assert error["field"] == f"{field}.path"
    (error,) = refused(service, make(service, {"from": "job:nobody@latest"}))
    assert error["field"] == f"{field}.from"
    bad = {"config": {"model_type": "mamba"}, "tokenizer": "nowhere"}
    errors = refused(service, make(service, {"init": bad}))
    assert {e["field"] for e in errors} == {
        f"{field}.init.config.model_type",
        f"{field}.init.tokenizer",
    }


def test_faults_of_several_models_come_at_once(service: RunningService) -> None:
    document = ppo(service, {"path": "nowhere"})
    document["reward"] = {"model": {"source": {"path": "neither"}}}
    document["model"] = {"path": "nor-here"}
    assert {e["field"] for e in refused(service, document)} == {
        "model.path",
        "algorithm.value_model.source.path",
        "reward.model.source.path",
    }


def test_a_policy_is_no_reward_model_and_a_reward_model_no_policy(
    service: RunningService, reward_folder: str
) -> None:
    (error,) = refused(service, with_reward(service, {"path": "tiny"}))
    assert error["field"] == "reward.model.source.path"
    assert "gives no reward" in error["message"]
    assert "reward_model" in error["fix"]
    (error,) = refused(service, online(service) | {"model": {"path": reward_folder}})
    assert error["field"] == "model.path"
    assert "grpo trains one that writes tokens" in error["message"]
    (error,) = refused(service, distillation(service, {"path": reward_folder}))
    assert error["field"] == "algorithm.teacher_model.source.path"

    reward_job(service, "rm-head")
    from_reward_model = {"from": "job:rm-head@latest"}
    (error,) = refused(service, service.job_document(model=from_reward_model))
    assert error["field"] == "model.from"
    assert "sft trains one that writes tokens" in error["message"]
    policy = service.submit(name="policy-head")
    publish(service, policy["id"], 5)
    (error,) = refused(service, with_reward(service, {"from": "job:policy-head@latest"}))
    assert error["field"] == "reward.model.source.from"


def test_a_reward_model_begins_as_a_policy_or_goes_on_as_what_it_is(
    service: RunningService, reward_folder: str
) -> None:
    finder = ModelFinder(
        roots=service.settings.all_model_roots,
        jobs_dir=service.settings.jobs_dir,
        store=service.store,
    )
    for folder, head in (("tiny", "vocabulary"), (reward_folder, "value")):
        document = spec(model={"path": folder}, algorithm={"type": "reward_model"})
        found, problems = finder.find(document.model)
        assert found is not None
        assert (found.head, problems) == (head, [])
        assert check_trained_head(document, found) == []


def test_a_classifier_of_several_classes_is_no_reward_model(
    service: RunningService, model_root: Path
) -> None:
    write_reward_model(model_root / "classes", labels=3)
    (error,) = refused(service, with_reward(service, {"path": "classes"}))
    assert "3 numbers for a sequence" in error["message"]
    write_model(
        model_root / "two-by-default", architectures=["Qwen2ForSequenceClassification"]
    )  # what transformers leaves out of a config
    (error,) = refused(service, with_reward(service, {"path": "two-by-default"}))
    assert "2 numbers for a sequence" in error["message"]


def test_a_critic_has_the_policy_s_architecture(service: RunningService, model_root: Path) -> None:
    write_reward_model(
        model_root / "other-critic", num_hidden_layers=2, intermediate_size=64, vocab_size=48
    )
    (error,) = refused(service, ppo(service, {"path": "other-critic"}))
    assert error["field"] == "algorithm.value_model.source.path"
    for said in ("num_layers is 2, not 4", "ffn_size is 64, not 96", "vocab_size is 48, not 40"):
        assert said in error["message"]
    write_model(model_root / "like", initializer_range=0.1, tie_word_embeddings=False)
    accepted(service, ppo(service, {"path": "like"}))  # neither is seen behind a value head


def test_a_teacher_has_the_student_s_vocabulary(service: RunningService, model_root: Path) -> None:
    folder = write_model(model_root / "wide", vocab_size=48)
    # Rows that pad an embedding belong to no token: models of one family differ in them.
    accepted(service, distillation(service, {"path": "wide"}))
    write_tokenizer(folder, tokens=42)
    (error,) = refused(service, distillation(service, {"path": "wide"}))
    assert error["field"] == "algorithm.teacher_model.source.path"
    assert "token id 40 is 'w40' there and no token to the policy" in error["message"]


@pytest.mark.parametrize("make", [distillation, with_reward, ppo])
def test_an_id_means_the_same_token_to_whoever_reads_it(
    service: RunningService, model_root: Path, make: Any
) -> None:
    folder = model_root / f"shuffled-{make.__name__}"
    write_model(folder) if make is distillation else write_reward_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w3"], vocabulary["w4"] = 4, 3
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (error,) = refused(service, make(service, {"path": folder.name}))
    assert "token id 3 is 'w3' to the policy and 'w4' there" in error["message"]
    write_tokenizer(folder, tokens=38)
    (error,) = refused(service, make(service, {"path": folder.name}))
    assert "token id 38 is 'w38' to the policy and no token there" in error["message"]


def test_a_reward_model_may_know_more_tokens(service: RunningService, model_root: Path) -> None:
    folder = write_reward_model(model_root / "knows-more", vocab_size=50)
    write_tokenizer(folder, tokens=50)
    accepted(service, with_reward(service, {"path": folder.name}))


def test_sequences_are_no_longer_than_any_model_reads(
    service: RunningService, model_root: Path
) -> None:
    write_reward_model(model_root / "short", max_position_embeddings=64)
    (error,) = refused(service, with_reward(service, {"path": "short"}))
    assert error["field"] == "reward.model.source.path"
    assert "at most 64 tokens" in error["message"]


@pytest.mark.parametrize(
    ("layout", "field"),
    [({"tp": 3}, "layout.tp"), ({"pp": 5}, "layout.pp"), ({"tp": 16}, "layout.tp")],
)
def test_a_frozen_layout_divides_its_own_model(
    service: RunningService, reward_folder: str, layout: dict[str, int], field: str
) -> None:
    errors = refused(service, with_reward(service, {"path": reward_folder}, **layout))
    assert {e["field"] for e in errors} == {f"reward.model.{field}"}
    accepted(service, with_reward(service, {"path": reward_folder}, tp=2, pp=4, dp=3))


def test_a_job_that_goes_on_keeps_the_other_models_that_were_pinned(
    service: RunningService,
) -> None:
    rewards = reward_job(service, "rm-moves-on")
    document = with_reward(service, {"from": "job:rm-moves-on@latest"}) | {"name": "before"}
    first = accepted(service, document)
    publish(service, first.job_id, 1)
    publish(service, rewards, 30)
    again = {"name": "after", "resume": {"job": "before"}, "training": {"steps": 9}}
    context = accepted(service, again)
    assert context.spec.reward == first.spec.reward
    assert str(context.other_models["reward"].weights).endswith("step-00000020")
    # A reference that it names itself is resolved anew.
    changed = again | {"reward": {"model": {"source": {"from": f"job:{rewards}@latest"}}}}
    context = accepted(service, changed)
    assert str(context.other_models["reward"].weights).endswith("step-00000030")


def test_going_on_under_another_algorithm_is_refused_with_what_would_be_kept(
    service: RunningService,
) -> None:
    job = service.submit(name="sft-state", training={"global_batch_size": 8, "max_length": 128})
    publish(service, job["id"], 1)
    document = ppo(service, None) | {"resume": {"job": "sft-state"}}
    error = next(e for e in refused(service, document) if e["field"] == "algorithm.type")
    assert "'ppo' is not what the job" in error["message"]
    assert "`model.from`, which keeps the weights and nothing else" in error["fix"]


def test_a_reward_model_without_weight_earns_nothing() -> None:
    reward = {"environment_weight": 0, "model": {"source": {"path": "reward"}}}
    assert spec(online=True, reward=reward).reward.model_weight == 1
    with pytest.raises(ValueError, match=r"nor where `reward\.model_weight` is 0"):
        spec(online=True, reward=reward | {"model_weight": 0})
