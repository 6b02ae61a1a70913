import pytest

from algorithms.rollout.questions import Questions, held_out_items
from tests.algorithms.letters import Letters, LettersConfig


def _numbers(items: list[dict[str, int]]) -> list[int]:
    return [item["number"] for item in items]


def test_the_question_of_a_place_is_always_the_same() -> None:
    whole = Questions(Letters(), LettersConfig(), seed=1)
    parts = [_numbers(whole.at(start, 5)) for start in range(0, 145, 5)]
    resumed = Questions(Letters(), LettersConfig(), seed=1)
    assert _numbers(resumed.at(80, 5)) == parts[16]
    assert _numbers(resumed.at(10, 5)) == parts[2]
    in_order = Letters().items(LettersConfig(), seed=1, count=145)
    assert [n for part in parts for n in part] == _numbers(list(in_order))


def test_no_held_out_question_is_trained_on() -> None:
    environment, config = Letters(), LettersConfig(size=50)
    held = held_out_items(environment, config, seed=9, count=20)
    keys = {environment.key(item) for item in held}
    assert len(keys) == 20
    questions = Questions(environment, config, seed=1, held_out=keys)
    epoch = [n for start in range(0, 30, 5) for n in _numbers(questions.at(start, 5))]
    assert sorted(map(str, epoch)) == sorted({str(n) for n in range(50)} - keys)
    assert _numbers(questions.at(30, 5)) == epoch[:5]  # a finite source begins again


def test_held_out_questions_differ_from_each_other_and_begin_as_the_source_does() -> None:
    environment = Letters()
    held = held_out_items(environment, LettersConfig(), seed=3, count=300)
    numbers = _numbers(held)
    assert len(set(numbers)) == 300
    drawn = _numbers(list(environment.items(LettersConfig(), seed=3, count=1000)))
    assert numbers == list(dict.fromkeys(drawn))[:300]
    assert len(held_out_items(environment, LettersConfig(size=5), seed=3, count=8)) == 5


def test_a_source_that_is_all_held_out_is_refused() -> None:
    questions = Questions(Letters(), LettersConfig(size=2), seed=1, held_out={"0", "1"})
    with pytest.raises(ValueError, match="no training question that is not held out"):
        questions.at(0, 1)


def test_a_generator_of_few_questions_gives_what_it_has() -> None:
    environment, config = Letters(), LettersConfig(different=40)
    held = held_out_items(environment, config, seed=3, count=100)
    assert sorted(_numbers(held)) == list(range(40))
    keys = {environment.key(item) for item in held}
    with pytest.raises(ValueError, match="no training question that is not held out"):
        Questions(environment, config, seed=1, held_out=keys).at(0, 1)
    left = Questions(environment, config, seed=1, held_out=keys - {"7"})
    assert _numbers(left.at(120, 60)) == [7] * 60
