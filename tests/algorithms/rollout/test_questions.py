import pytest

from algorithms.rollout.questions import Questions, held_out_items
from tests.algorithms.letters import Letters, LettersConfig


def _numbers(items: list[dict[str, int]]) -> list[int]:
    return [item["number"] for item in items]


def test_a_step_s_questions_depend_on_the_step_alone() -> None:
    whole = Questions(Letters(), LettersConfig(), seed=1)
    steps = [_numbers(whole.of_step(step, 5)) for step in range(1, 30)]
    resumed = Questions(Letters(), LettersConfig(), seed=1)
    assert _numbers(resumed.of_step(17, 5)) == steps[16]
    assert _numbers(resumed.of_step(3, 5)) == steps[2]
    in_order = Letters().items(LettersConfig(), seed=1, count=145)
    assert [n for step in steps for n in step] == _numbers(list(in_order))


def test_no_held_out_question_is_trained_on() -> None:
    environment, config = Letters(), LettersConfig(size=50)
    held = held_out_items(environment, config, seed=9, count=20)
    keys = {environment.key(item) for item in held}
    assert len(keys) == 20
    questions = Questions(environment, config, seed=1, held_out=keys)
    epoch = [n for step in range(1, 7) for n in _numbers(questions.of_step(step, 5))]
    assert sorted(map(str, epoch)) == sorted({str(n) for n in range(50)} - keys)
    assert _numbers(questions.of_step(7, 5)) == epoch[:5]  # a finite source begins again


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
        questions.of_step(1, 1)


def test_a_generator_of_few_questions_gives_what_it_has() -> None:
    environment, config = Letters(), LettersConfig(different=40)
    held = held_out_items(environment, config, seed=3, count=100)
    assert sorted(_numbers(held)) == list(range(40))
    keys = {environment.key(item) for item in held}
    with pytest.raises(ValueError, match="no training question that is not held out"):
        Questions(environment, config, seed=1, held_out=keys).of_step(1, 1)
    left = Questions(environment, config, seed=1, held_out=keys - {"7"})
    assert _numbers(left.of_step(3, 60)) == [7] * 60
