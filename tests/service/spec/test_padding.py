"""Padding: cases E06 (vocabulary), E09 (context and sequence parallelism), E11 (FP8)."""

import pytest

from service.spec import Fp8Spec
from service.spec.layout import Layout
from service.spec.padding import fp8_alignment, padded_vocab_size, padding_factor


@pytest.mark.parametrize(
    ("cp", "tp", "factor"), [(1, 4, 4), (2, 4, 8), (2, 3, 12), (4, 8, 32), (1, 1, 1), (2, 1, 4)]
)
def test_e09_the_least_factor_that_cuts_evenly(cp: int, tp: int, factor: int) -> None:
    layout = Layout(tp=tp, cp=cp, sequence_parallel=tp > 1)
    assert padding_factor(layout) == factor
    for length in range(1, 34):
        padded = -(-length // factor) * factor
        chunk, rest = divmod(padded, 2 * cp if cp > 1 else 1)
        assert rest == 0
        assert (chunk * (2 if cp > 1 else 1)) % tp == 0
    fitting = [
        n for n in range(1, factor + 1) if n % (2 * cp if cp > 1 else 1) == 0 and n // cp % tp == 0
    ]
    assert fitting[0] == factor


def test_without_sequence_parallelism_tp_cuts_nothing() -> None:
    assert padding_factor(Layout(tp=4)) == 1
    assert padding_factor(Layout(tp=4, cp=2)) == 4


def test_e11_the_local_length_is_aligned_after_the_split() -> None:
    layout, fp8 = Layout(tp=2, sequence_parallel=True), Fp8Spec(recipe="tensorwise")
    factor = padding_factor(layout, fp8=fp8)
    padded = -(-11486 // factor) * factor
    assert padded == 11488
    assert padded // 2 % 16 == 0


@pytest.mark.parametrize(
    ("recipe", "aligned"), [("delayed", 16), ("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32)]
)
def test_e11_each_recipe_has_its_alignment(recipe: str, aligned: int) -> None:
    fp8 = Fp8Spec.model_validate({"recipe": recipe})
    assert fp8_alignment(fp8) == aligned
    for layout in (Layout(), Layout(cp=2), Layout(cp=2, tp=4, sequence_parallel=True)):
        factor = padding_factor(layout, fp8=fp8)
        shards = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        assert factor // shards % aligned == 0
    assert fp8_alignment(None) == 1


@pytest.mark.parametrize(
    ("size", "tp", "rows"),
    [(50257, 2, 50432), (50257, 8, 51200), (30, 1, 32), (1023, 4, 1024), (1024, 3, 1152)],
)
def test_e06_a_vocabulary_is_padded_for_its_ranks(size: int, tp: int, rows: int) -> None:
    assert padded_vocab_size(size, tp=tp) == rows
