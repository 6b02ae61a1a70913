"""The check of a job's environment, and the command line through which the service asks for it."""

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from environments import registry
from environments.__main__ import _check_input as check_input
from environments.__main__ import describe
from environments.check import check
from environments.config import InvalidConfig
from environments.gsm8k import Gsm8kConfig, Gsm8kEnv, Gsm8kType
from environments.protocol import Env
from environments.registry import Entry, Registry

ROOT = Path(__file__).parents[2]
CHAIN_SUM = {"id": "reasoning_gym/chain_sum", "config": {"min_terms": 3, "max_terms": 3}}


def run(*arguments: str, given: str = "") -> tuple[int, Any, str]:
    """Exit code, standard output as JSON, standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "environments", *arguments],
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def problems(reference: Mapping[str, Any]) -> dict[tuple[str | int, ...], str]:
    with pytest.raises(InvalidConfig) as raised:
        check(reference)
    return {problem.loc: problem.message for problem in raised.value.problems}


def test_the_command_line_answers_with_the_version() -> None:
    reference = {
        "id": "tools/calculator",
        "version": None,
        "max_turns": 2,
        "config": {"questions": CHAIN_SUM},
    }
    assert run("check", given=json.dumps(reference)) == (0, {"version": 1}, "")


def test_the_command_line_answers_with_paths() -> None:
    questions = {"id": "reasoning_gym/chain_sum", "config": {"min_terms": 4, "max_terms": 3}}
    reference = {"id": "tools/calculator", "config": {"questions": questions}}
    code, answer, _ = run("check", given=json.dumps(reference))
    assert code == 1
    assert answer == {
        "errors": [
            {
                "loc": ["config", "questions", "config", "max_terms"],
                "message": "max_terms must be >= min_terms",
            }
        ]
    }


def test_the_command_line_takes_no_other_input() -> None:
    code, answer, _ = run("check", given="{")
    assert code == 1
    assert answer["errors"][0]["loc"] == []


@pytest.mark.parametrize("given", ["", "{", "[]", "3", "[" * 100_000])
def test_input_that_is_no_reference(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    with pytest.raises(InvalidConfig) as raised:
        check_input()
    assert [problem.loc for problem in raised.value.problems] == [()]


def test_the_command_line_describes() -> None:
    code, answer, _ = run("describe", "tools/calculator", "reasoning_gym/chain_sum")
    assert code == 0
    calculator, chain_sum = answer
    assert set(calculator) == {
        "id",
        "version",
        "summary",
        "config_schema",
        "max_turns",
        "reward_range",
        "tools",
    }
    assert (calculator["max_turns"], calculator["reward_range"]) == (2, [0.0, 1.0])
    assert calculator["tools"][0]["function"]["name"] == "calculator"
    assert chain_sum["config_schema"]["properties"]["min_terms"]["default"] == 2
    assert chain_sum["config_schema"]["additionalProperties"] is False


def test_the_command_line_knows_no_other_environment() -> None:
    code, answer, _ = run("describe", "math/gsm9k")
    assert code == 1
    assert "math/gsm8k" in answer["errors"][0]["message"]


def test_every_environment_is_described() -> None:
    described = describe()
    assert [(item["id"], item["version"]) for item in described] == list(
        registry.list_environments()
    )
    json.dumps(described, allow_nan=False)
    for item in described:
        for name, field in item["config_schema"]["properties"].items():
            assert "description" in field or "$ref" in field, (item["id"], name)


@pytest.mark.parametrize(
    ("reference", "loc", "message"),
    [
        ({}, ("id",), "required"),
        ({"id": 3}, ("id",), "string"),
        ({"id": "../x"}, ("id",), "pattern"),
        ({"id": "reasoning_gym/../../etc"}, ("id",), "pattern"),
        ({"id": "math/gsm9k"}, ("id",), "math/gsm8k"),
        ({"id": "math/gsm8k", "version": 9}, ("version",), "no version 9"),
        ({"id": "math/gsm8k", "version": 0}, ("version",), "greater than"),
        ({"id": "math/gsm8k", "max_turns": 0}, ("max_turns",), "greater than"),
        ({"id": "math/gsm8k", "config": []}, ("config",), "dictionary"),
        ({"id": "math/gsm8k"}, ("config", "path"), "required"),
        ({"id": "math/gsm8k", "config": {"path": "/etc"}}, ("config", "path"), "no file"),
        ({"id": "math/gsm8k", "more": 1}, ("more",), "not permitted"),
        (
            {"id": "tools/calculator", "config": {"questions": {"id": "../../x"}}},
            ("config", "questions", "id"),
            "pattern",
        ),
        (
            {"id": "tools/calculator", "config": {"questions": {"id": "math/gsm9k"}}},
            ("config", "questions", "id"),
            "math/gsm8k",
        ),
        (
            {"id": "tools/calculator", "config": {"questions": {**CHAIN_SUM, "version": 7}}},
            ("config", "questions", "version"),
            "no version 7",
        ),
        (
            {"id": "tools/calculator", "config": {"questions": {"id": "math/gsm8k"}}},
            ("config", "questions", "config", "path"),
            "required",
        ),
        (
            {
                "id": "reasoning_gym/chain_sum",
                "config": {"min_digits": 5000, "max_digits": 5000},
            },
            ("config",),
            "cannot draw question 0",
        ),
    ],
)
def test_errors_name_the_field(
    reference: Mapping[str, Any], loc: tuple[str, ...], message: str
) -> None:
    found = problems(reference)
    assert list(found) == [loc]
    assert message in found[loc]


def test_several_errors_are_told_at_once() -> None:
    config = {"min_terms": "3", "max_terms": None, "terms": 3}
    found = problems({"id": "reasoning_gym/chain_sum", "config": config})
    assert set(found) == {("config", name) for name in config}


class Theirs(Gsm8kType):
    """Somebody's environment that cannot be begun."""

    id = "theirs/broken"
    config_model = Gsm8kConfig

    def make(self, config: Any, *, max_turns: int | None = None) -> Env:  # noqa: ARG002
        return Unready(config)


class Unready(Gsm8kEnv):
    """Raises as it is reset, and counts how often it is closed."""

    closed = 0

    async def reset(self, *, seed: int, item: Any) -> Any:  # noqa: ARG002
        raise ConnectionError("the sandbox is away")

    async def close(self) -> None:
        Unready.closed += 1


def test_an_environment_that_cannot_begin_is_told_and_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    theirs = Registry([Entry(id="theirs/broken", version=1, load=Theirs)])
    monkeypatch.setattr(registry, "installed", lambda: theirs)
    found = problems({"id": "theirs/broken", "config": {"path": str(file)}})
    assert found == {("config",): "ConnectionError: the sandbox is away"}
    assert Unready.closed == 1
