"""The names of a job's folders."""

import pytest

from service.spec.attempt import step_name, step_of


@pytest.mark.parametrize("step", [0, 20, 99_999_999, 100_000_000])
def test_a_name_gives_its_step_back(step: int) -> None:
    assert step_of(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-20",
        "step-00000020.old",
        ".tmp-00000020-1-ab",
        "latest",
        "step-\N{ARABIC-INDIC DIGIT TWO}0000000",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert step_of(name) is None
