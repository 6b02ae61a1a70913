"""reasoning_gym/*: every dataset's questions, settings and verifier, and hostile answers."""

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from environments.config import InvalidConfig, parse_config
from environments.protocol import AssistantTurn, EnvironmentType, StepResult
from environments.reasoning_gym_adapter import ReasoningGymType, extract_answer, spread_seed
from environments.reasoning_gym_config import config_model, to_dataclass
from environments.reasoning_gym_datasets import LEFT_OUT, NAMES, may_be_scored

# Slow to draw: a question takes seconds.
SLOW = {"knight_swap", "arc_agi", "intermediate_integration", "zebra_puzzles", "puzzle24"}


async def play(
    environment: EnvironmentType, settings: Mapping[str, Any], item: Mapping[str, Any], text: str
) -> StepResult:
    env = environment.make(parse_config(environment.config_model, settings))
    await env.reset(seed=1, item=item)
    result = await env.step(AssistantTurn(text=text))
    await env.close()
    return result


def draw(name: str, count: int, **settings: Any) -> tuple[EnvironmentType, list[Any]]:
    environment = ReasoningGymType(name)
    config = parse_config(environment.config_model, settings)
    return environment, list(environment.items(config, seed=1, count=count))


def test_the_names_are_those_of_the_package() -> None:
    assert set(NAMES) == set(DATASETS) - set(LEFT_OUT)
    assert set(LEFT_OUT) <= set(DATASETS)


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_datasets_own(name: str) -> None:
    dataclass = DATASETS[name][1]
    model = config_model(name, dataclass)
    schema = model.model_json_schema()
    assert all(field.get("description") for field in schema["properties"].values())
    config = parse_config(model, {})
    assert parse_config(model, json.loads(config.model_dump_json())) == config
    own, native = to_dataclass(config), dataclass()
    for field in dataclasses.fields(native):
        expected = getattr(native, field.name)
        if name == "intermediate_integration" and field.name == "symbols":
            expected = tuple(expected)
        assert getattr(own, field.name) == expected
        assert type(getattr(own, field.name)) is type(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_questions_repeat_and_the_right_answer_scores_one(name: str) -> None:
    environment = ReasoningGymType(name)
    config = parse_config(environment.config_model, {})
    items = environment.items(config, seed=3, count=2)
    assert json.loads(json.dumps(items, allow_nan=False)) == items
    if name not in SLOW:
        assert environment.items(config, seed=3, count=1) == items[:1]
    answer = items[1]["answer"]
    if answer is not None:
        assert asyncio.run(play(environment, {}, items[1], answer)).reward == 1.0
    for wrong in ("no idea", "nan", "[1]", "{}", "null", "0 0"):
        result = asyncio.run(play(environment, {}, items[1], wrong))
        assert result.reward is not None, result.info
        assert result.reward < 1.0 or wrong == answer


def test_questions_are_the_datasets_own() -> None:
    _, items = draw("chain_sum", 600, min_terms=3, max_terms=3, max_digits=2)
    settings = {"min_terms": 3, "max_terms": 3, "max_digits": 2}
    native = create_dataset("chain_sum", seed=spread_seed(1), size=1000, **settings)
    assert [item["question"] for item in items] == [native[n]["question"] for n in range(600)]
    assert items[:10] == draw("chain_sum", 10, **settings)[1]


def test_neighbouring_seeds_share_no_stretch_of_questions() -> None:
    seeds = sorted(spread_seed(seed) for seed in range(1, 1001))
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 500_000
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.asyncio
async def test_an_episode_has_one_turn() -> None:
    environment, items = draw("chain_sum", 1, instruction="Only the number.")
    env = environment.make(
        parse_config(environment.config_model, {"instruction": "Only the number."})
    )
    messages, _ = await env.reset(seed=1, item=items[0])
    assert messages == [{"role": "user", "content": items[0]["question"] + "\n\nOnly the number."}]
    result = await env.step(AssistantTurn(text=f" {items[0]['answer']}\n"))
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert result.info == {
        "metrics": {"answer_found": 1.0},
        "reward_components": {"answer": 1.0},
    }
    assert (await env.step(AssistantTurn(text=""))).reward == 0.0
    await env.close()


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        (" 84 \n", "text", "84"),
        ("so\n84", "text", "so\n84"),
        ("so\n84\n\n", "last_line", "84"),
        ("84", "last_line", "84"),
        ("<answer> 84 </answer>.", "answer_tags", "84"),
        ("<answer>1</answer> no <answer>84</answer>", "answer_tags", "84"),
        ("<answer><answer>84</answer>", "answer_tags", "84"),
        ("<answer>\n1 2\n3 4\n</answer>", "answer_tags", "1 2\n3 4"),
        ("84", "answer_tags", None),
        ("<answer>84", "answer_tags", None),
        (" \n ", "text", None),
        ("", "last_line", None),
    ],
)
def test_answer_formats(text: str, answer_format: str, answer: str | None) -> None:
    assert extract_answer(text, answer_format) == answer


def test_answer_tags_cost_no_time() -> None:
    started = time.process_time()
    for text in ("<answer>" * 50_000, "<answer>" + "x<" * 200_000, "</answer>" * 50_000):
        extract_answer(text, "answer_tags")
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    ("name", "settings", "loc", "message"),
    [
        ("chain_sum", {"min_terms": 4, "max_terms": 3}, "max_terms", "must be >= min_terms"),
        ("chain_sum", {"min_terms": "3"}, "min_terms", "integer"),
        ("chain_sum", {"terms": 3}, "terms", "not permitted"),
        ("chain_sum", {"seed": 3}, "seed", "not permitted"),
        ("chain_sum", {"size": 3}, "size", "not permitted"),
        ("chain_sum", {"answer_format": "xml"}, "answer_format", "answer_tags"),
        ("basic_arithmetic", {"operators": ["__import__('os')"]}, "operators", "pattern"),
        ("spell_backward", {"data_file": "../../../etc/passwd"}, "data_file", "pattern"),
        ("figlet_font", {"static_font": "../x"}, "static_font", "pattern"),
        ("calendar_arithmetic", {"tasks": ["no_such"]}, "tasks", "no_such"),
        ("time_intervals", {"min_date": "yesterday"}, "min_date", "date"),
    ],
)
def test_bad_settings_name_their_field(
    name: str, settings: Mapping[str, Any], loc: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message) as raised:
        parse_config(config_model(name, DATASETS[name][1]), settings)
    assert raised.value.problems[0].loc[:1] == (loc,)


def test_json_fills_tuples_dates_and_nested_settings() -> None:
    intervals = parse_config(
        config_model("time_intervals", DATASETS["time_intervals"][1]), {"min_date": "2000-02-29"}
    )
    assert to_dataclass(intervals).min_date.year == 2000
    countdown = parse_config(
        config_model("countdown", DATASETS["countdown"][1]), {"operators": ["+", "-"]}
    )
    assert to_dataclass(countdown).operators == ("+", "-")
    arc = parse_config(
        config_model("arc_agi", DATASETS["arc_agi"][1]),
        {"board_format_opts": {"col_delimiter": ","}},
    )
    options = to_dataclass(arc).board_format_opts
    assert dataclasses.is_dataclass(options)
    assert (options.col_delimiter, options.row_delimiter) == (",", "\n")


# What each of these scorers would evaluate, were it to see it.
CODE = [
    "__import__('os').system('touch {path}')",
    "(lambda: open('{path}', 'w'))()",
    "[open('{path}', 'w')]",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "open(chr(120), chr(119))",
    "S('open')",
    "Symbol(1).__class__",
    "x.func",
    "1 .real",
    "sympify(1)",
    "preview(x)",
    "init_session()",
    "f'{{open}}'",
    "(x).free_symbols",
]
EVALUATED = [
    "binary_matrix",
    "n_queens",
    "spiral_matrix",
    "string_insertion",
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
]


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize("code", CODE)
def test_c10_code_reaches_no_scorer(name: str, code: str, tmp_path: Path) -> None:
    assert not may_be_scored(name, code.format(path=tmp_path / "x"))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("string_insertion", '["A", "B"]'),
        ("countdown", "(12.5 - 3) * 4 / 2"),
        ("simple_integration", "2*x**3/3 + 5*X**2 + C"),
        ("intermediate_integration", "exp(2*x)*sin(x)/5 + log(x) - sqrt(x) + C"),
        ("polynomial_multiplication", "3*x**2*y - z"),
    ],
)
def test_honest_answers_reach_their_scorer(name: str, answer: str) -> None:
    assert may_be_scored(name, answer)


@pytest.mark.asyncio
async def test_c10_no_code_runs(tmp_path: Path) -> None:
    path = tmp_path / "x"
    environment, items = draw("string_insertion", 1)
    for code in CODE:
        result = await play(environment, {}, items[0], code.format(path=path))
        assert result.reward == 0.0
    assert not path.exists()


@pytest.mark.asyncio
async def test_c03_a_power_tower_is_unscorable_in_time() -> None:
    settings = {"scoring_timeout_seconds": 1.0}
    environment, items = draw("countdown", 1, **settings)
    assert (await play(environment, settings, items[0], items[0]["answer"])).reward == 1.0
    started = time.monotonic()
    tower = "(5**(5**(5**(5**5))-4)-5)/16"
    results = await asyncio.gather(
        *(play(environment, settings, items[0], tower) for _ in range(64))
    )
    # One second for the deadline; the rest is for a machine that has other work as well.
    assert time.monotonic() - started < 5.0
    assert {result.reward for result in results} == {None}
    assert all(result.info["reason"].startswith("timeout") for result in results)
    assert (await play(environment, {}, items[0], items[0]["answer"])).reward == 1.0


@pytest.mark.asyncio
async def test_a_scorer_that_fails_gives_none_and_the_reason() -> None:
    environment, items = draw("chain_sum", 1)
    broken = {**items[0], "answer": 3}
    result = await play(environment, {}, broken, "3")
    assert result.reward is None
    assert result.info["reason"].startswith("scorer_failed: TypeError")
    assert result.info["reward_components"] == {}


@pytest.mark.asyncio
async def test_an_endless_answer_is_wrong_at_once() -> None:
    environment, items = draw("chain_sum", 1)
    started = time.monotonic()
    assert (await play(environment, {}, items[0], "9" * 1_000_000)).reward == 0.0
    assert time.monotonic() - started < 1.0


def test_settings_that_no_question_meets_are_told() -> None:
    environment = ReasoningGymType("chain_sum")
    config = parse_config(environment.config_model, {"min_digits": 5000, "max_digits": 5000})
    with pytest.raises(ValueError, match="cannot draw question 0"):
        environment.items(config, seed=1, count=1)
