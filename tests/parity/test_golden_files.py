"""A change of what a package computes is found."""

import copy
from typing import Any

import numpy as np
import pytest

from tests.parity import golden_files
from tests.parity.batches import BATCHES


@pytest.fixture(name="golden")
def _golden() -> golden_files.Golden:
    return golden_files.read("verl")


def _changed(golden: golden_files.Golden, case: str, batch: str, by: float) -> golden_files.Golden:
    other: golden_files.Golden = copy.deepcopy(golden)
    values: dict[str, Any] = other["cases"][case]["batches"][batch]
    values["loss"] += by
    return other


def test_the_same_values_are_the_same(golden: golden_files.Golden) -> None:
    assert list(golden_files.differences(golden, copy.deepcopy(golden))) == []


def test_a_changed_value_is_named(golden: golden_files.Golden) -> None:
    changed = _changed(golden, "clip/token-mean", "ragged", 1e-6)
    assert list(golden_files.differences(golden, changed)) == [
        "clip/token-mean on ragged: 1e-06 apart"
    ]


def test_a_value_that_is_off_by_rounding_is_the_same(golden: golden_files.Golden) -> None:
    changed = _changed(golden, "clip/token-mean", "ragged", 1e-9)
    assert list(golden_files.differences(golden, changed)) == []


def test_another_version_batch_case_or_setting_is_named(golden: golden_files.Golden) -> None:
    other = copy.deepcopy(golden)
    other["versions"]["verl"] = "0.9.2"
    other["inputs"]["F"] += 1
    del other["cases"]["remax"]
    other["cases"]["dual-clip/token-mean"]["of"]["settings"]["clip_ratio_c"] = 4.0
    del other["cases"]["kl/k1"]["batches"]["F"]
    found = list(golden_files.differences(golden, other))
    beginnings = [
        "versions: ",
        "inputs: ",
        "remax: is no more",
        "dual-clip/token-mean: ",
        "kl/k1 on F",
    ]
    assert len(found) == len(beginnings)
    for line, beginning in zip(found, beginnings, strict=True):
        assert line.startswith(beginning)


def test_a_file_that_is_read_is_the_one_that_was_written(
    golden: golden_files.Golden, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = (golden_files.FOLDER / "verl.json").read_text()
    monkeypatch.setattr(golden_files, "FOLDER", tmp_path / "golden")
    golden_files.write("verl", golden)
    assert (tmp_path / "golden" / "verl.json").read_text() == written


def test_a_digest_changes_with_any_number() -> None:
    for name, inputs in BATCHES.items():
        before = golden_files.digest(inputs)
        assert before == golden_files.DIGESTS[name]
        inputs.margins[-1] += 1e-3
        assert golden_files.digest(inputs) != before
        inputs.margins[-1] -= 1e-3
        assert golden_files.digest(inputs) == before


def test_numbers_have_nine_digits() -> None:
    values = {"loss": 1 / 3, "gradient": np.array([[0.0, -0.0], [2.0, 123456.7890123]])}
    assert golden_files.plain(values) == {
        "loss": 0.333333333,
        "gradient": [[0, 0], [2, 123456.789]],
    }
