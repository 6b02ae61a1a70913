"""Documents that are wrong by themselves: each names the field and the fix."""

import json
from typing import Any

import pytest

from service.validation.document import known_fields, read_job_spec
from service.validation.problems import FieldProblem, InvalidRequest

GOOD: dict[str, Any] = {
    "name": "sample",
    "model": {"path": "tiny"},
    "algorithm": {"type": "grpo"},
    "environment": {"id": "tools/calculator"},
    "training": {"steps": 3},
}


REWARD_MODEL: dict[str, Any] = {
    "name": "sample",
    "model": {"path": "tiny"},
    "algorithm": {"type": "reward_model"},
    "data": {"train": "file-0123456789abcdef"},
}


def problems_of(body: bytes) -> list[FieldProblem]:
    with pytest.raises(InvalidRequest) as caught:
        read_job_spec(body)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("parts", "field", "message", "fix"),
    [
        ({"nmae": "x"}, "nmae", "unknown field 'nmae'", "name, model, algorithm"),
        ({"parallel": {"tpp": 2}}, "parallel.tpp", "unknown field", "tp, pp, vpp"),
        ({"model": {"form": "x"}}, "model.form", "unknown field", "from, path, init"),
        (
            {"algorithm": {"type": "grpo", "beta": 1}},
            "algorithm.beta",
            "unknown field",
            "group_size",
        ),
        ({"algorithm": {"type": "ppoo"}}, "algorithm.type", "'ppoo'; this service has", "use one"),
        ({"algorithm": {}}, "algorithm.type", "one of: cispo, dapo", "use one"),
        ({"name": "A B"}, "name", "pattern", "lower-case letters"),
        ({"parallel": {"dp": "all"}}, "parallel.dp", "'auto'", "`auto` fills the machines"),
        ({"parallel": {"tp": "2"}}, "parallel.tp", "valid integer", "Tensor parallelism"),
        ({"evaluation": {"modes": ["x"]}}, "evaluation.modes[0]", "'sampled'", "greedy"),
        ({"optimizer": {"learning_rate": "1e-5"}}, "optimizer.learning_rate", "number", "Peak"),
        ({"environment": None}, "environment", "is needed", "add it"),
        ({"training": {}}, "training.steps", "is needed", "add it"),
        ({"data": {"train": "file-0123456789abcdef"}}, "data", "has no use", "remove it"),
        ({"model": {}}, "model", "exactly one", "leave the others out"),
        ({"algorithm": {"type": ["grpo"]}}, "algorithm.type", "unknown algorithm", "use one"),
        ({"algorithm": {"type": {}}}, "algorithm.type", "unknown algorithm", "use one"),
        ({"model": {"path": "a\0b"}}, "model.path", "NUL", "JSON"),
        (
            {"environment": {"id": "a/b", "config": {"x": [1e999]}}},
            "environment.config.x[0]",
            "finite",
            "JSON",
        ),
        ({"environment": {"id": "../../etc"}}, "environment.id", "pattern", "registry"),
        (
            {"resources": {"cluster": "../x"}},
            "resources.cluster",
            "pattern",
            "cluster of the service",
        ),
        ({"model": {"from": "job:../x@latest"}}, "model.from", "pattern", "job:NAME_OR_ID"),
        (
            {"reward": {"environment_weight": 0}},
            "reward.environment_weight",
            "without `reward.model` nothing else is earned",
            "Weight of the environment's reward",
        ),
        (
            {
                "algorithm": {"type": "dapo"},
                "reward": {"environment_weight": 0, "model": {"source": {"path": "rm"}}},
            },
            "algorithm.dynamic_sampling",
            "goes by the environment's reward",
            "null trains on all",
        ),
        (
            {"algorithm": {"type": "dr_grpo", "length_constant": None}},
            "algorithm.length_constant",
            "is needed",
            "add it",
        ),
        (
            {"algorithm": {"type": "rloo", "loss_aggregation": "token-mean"}},
            "algorithm.loss_aggregation",
            "must be seq-mean-token-sum",
            "one number",
        ),
        (
            {"algorithm": {"type": "grpo", "overlong": {"max_tokens": 5, "buffer_tokens": 8}}},
            "algorithm.overlong.buffer_tokens",
            "at most `max_tokens`",
            "grows from 0",
        ),
        ({"algorithm": {"type": "distillation"}}, "algorithm.teacher_model", "needed", "add it"),
    ],
)
def test_each_fault_names_its_field_and_what_would_be_right(
    parts: dict[str, Any], field: str, message: str, fix: str
) -> None:
    (problem,) = problems_of(json.dumps(GOOD | parts).encode())
    assert problem.field == field
    assert message in problem.message
    assert problem.fix is not None
    assert fix in problem.fix


def test_all_faults_come_at_once() -> None:
    found = problems_of(b'{"name": "A", "extra": 1, "parallel": {"tp": 0}}')
    assert {p.field for p in found} == {"name", "extra", "parallel.tp", "model", "algorithm"}


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b'{"name": "a', b'{"name": "\\ud800"}', b'{"name": "\xff"}', b"[" * 5000],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    (problem,) = problems_of(body)
    assert problem.field == ""


def test_an_unknown_hyperparameter_is_answered_with_those_of_its_own_algorithm() -> None:
    (problem,) = problems_of(
        json.dumps(GOOD | {"algorithm": {"type": "sft", "group_size": 8}}).encode()
    )
    assert problem.field == "algorithm.group_size"
    assert problem.fix == "remove it, or use one of: type, loss_aggregation"


@pytest.mark.parametrize(
    ("once", "twice", "field"),
    [
        ('"name": "sample"', '"name": "sample", "name": "other"', "name"),
        ('"steps": 3', '"steps": 3, "steps": 3', "training.steps"),
        (
            '"id": "tools',
            '"config": {"a": [{"b": 1, "b": 2}]}, "id": "tools',
            "environment.config.a[0].b",
        ),
    ],
)
def test_a_key_that_occurs_twice_is_refused(once: str, twice: str, field: str) -> None:
    body = json.dumps(GOOD).replace(once, twice)
    (problem,) = problems_of(body.encode())
    assert problem.field == field
    assert "more than once" in problem.message
    assert problem.fix


def test_every_field_of_the_job_spec_has_a_description() -> None:
    known = known_fields()
    assert len(known.descriptions) > 50
    assert [path for path, text in known.descriptions.items() if not text] == []


def test_a_description_that_is_a_fix_is_one_line() -> None:
    broken = [path for path, text in known_fields().descriptions.items() if "\n" in text]

    assert not broken


def test_a_reward_model_is_not_evaluated_in_an_environment() -> None:
    held_out = {"items": 4, "environment": {"id": "tools/calculator"}}
    document = json.dumps(REWARD_MODEL | {"evaluation": held_out})
    (problem,) = problems_of(document.encode())
    assert problem.field == "evaluation.items"
    assert "writes no answers" in problem.message
    assert read_job_spec(json.dumps(REWARD_MODEL).encode()).algorithm.head == "value"


def test_rewards_have_no_use_where_rows_are_trained_on() -> None:
    document = REWARD_MODEL | {"reward": {"unfinished_penalty": 0.5}}
    (problem,) = problems_of(json.dumps(document).encode())
    assert (problem.field, problem.fix) == ("reward", "remove it")
