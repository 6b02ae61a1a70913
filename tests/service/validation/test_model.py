"""Faults of a model's config become problems of the job's field."""

from typing import Any

import pytest

from service.validation.model import read_model
from tests.service.model_folders import CONFIG


def test_a_config_that_is_right_has_no_problems() -> None:
    model, problems = read_model(CONFIG, "model.path")
    assert problems == []
    assert model is not None
    assert (model.num_layers, model.vocab_size, model.head_dim) == (4, 40, 8)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model_type": None}, ["model_type"]),
        ({"hidden_size": 10**400}, ["hidden_size"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor"]),
        ({"attention_dropout": 0.1, "vocab_size": "40"}, ["attention_dropout", "vocab_size"]),
    ],
    ids=lambda value: ",".join(value),
)
def test_each_fault_names_its_setting(changes: dict[str, Any], fields: list[str]) -> None:
    model, problems = read_model(CONFIG | changes, "model.init.config")
    assert model is None
    assert [problem.field for problem in problems] == [f"model.init.config.{f}" for f in fields]
    for problem in problems:
        assert problem.fix
        assert len(problem.message) < 300
