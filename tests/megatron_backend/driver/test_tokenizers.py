"""Whether two models speak of the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.errors import JobFailure
from megatron_backend.driver.tokenizers import check_same_tokens, load_tokenizer
from service.spec import Reason
from service.spec.other_models import Role
from tests.megatron_backend.driver import tiny_job


def tokenizer(folder: Path, **vocabulary: Any) -> PreTrainedTokenizerFast:
    """The tiny job's, with some tokens' ids changed; None takes a token away."""
    tiny_job.write_tokenizer(folder)
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    ids = document["model"]["vocab"] | vocabulary
    document["model"]["vocab"] = {token: number for token, number in ids.items() if number}
    document["model"]["vocab"] |= {"<|end|>": 0}
    path.write_text(json.dumps(document))
    return load_tokenizer(folder)


@pytest.mark.parametrize("role", ["teacher", "reward"])
def test_the_same_tokens_are_accepted(tmp_path: Path, role: Role) -> None:
    check_same_tokens(role, tokenizer(tmp_path / "a"), tokenizer(tmp_path / "b"))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"a": 6, "b": 5}, "'a' is 5 here; the teacher calls it 6"),
        ({"j": None}, "'j' is 14 here; the teacher has none"),
        ({"k": 15}, "'k' is 15 there, and is not known here"),
    ],
)
def test_a_teacher_of_other_tokens_is_refused(
    tmp_path: Path, theirs: dict[str, int | None], message: str
) -> None:
    with pytest.raises(JobFailure) as failure:
        check_same_tokens("teacher", tokenizer(tmp_path / "a", **theirs), tokenizer(tmp_path / "b"))
    assert failure.value.reason is Reason.USER_ERROR
    assert message in str(failure.value)


def test_a_reward_model_may_know_more_tokens_but_no_others(tmp_path: Path) -> None:
    """It only reads what the policy wrote."""
    ours = tokenizer(tmp_path / "ours")
    check_same_tokens("reward", tokenizer(tmp_path / "more", k=15), ours)
    with pytest.raises(JobFailure, match="the reward model calls it 6"):
        check_same_tokens("reward", tokenizer(tmp_path / "other", a=6, b=5), ours)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFailure, match="the teacher's tokenizer: ") as failure:
        load_tokenizer(tmp_path, of="teacher")
    assert failure.value.reason is Reason.USER_ERROR
