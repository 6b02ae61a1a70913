"""The number in an answer: notation, markers, and what must not count (C01, C03)."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.numeric_answers import find_answer, parse_gold, verify


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72),
        ("so it is 1,234,567.50 in all", Fraction("1234567.5")),
        ("$18.", 18),
        ("-$5", -5),
        ("$-5", -5),
        ("£5", 5),
        ("it is -5.", -5),
        ("10-3", 3),
        ("10 - 3 = 7", 7),
        ("- 5 apples", 5),
        (".5", Fraction(1, 2)),
        ("25%", 25),
        ("1,2 and 3", 3),
        ("12,3456", 3456),
        ("3/4", Fraction(3, 4)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
        ("#### 5\nnot 7", 5),
        ("#### $1,000 dollars", 1000),
        ("The answer is 3/4.", Fraction(3, 4)),
        ("the answer is: **42**\nchecked in 3 ways", 42),
        ("answer = 5 apples, not 6", 5),
        ("The answer is 4. No, the answer is 5, for 6 reasons.", 5),
        ("The answer is as follows\n7", 7),
        (r"\boxed{\$18}", 18),
        (r"\boxed{18\%}", 18),
        (r"\boxed{1{,}000}", 1000),
        (r"\boxed{x = 5\text{ apples}}", 5),
        (r"\boxed{\text{5 cm}}", 5),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
        (r"\boxed{3} and \boxed{70,000}", 70000),
        (r"\boxed{4} #### 5", 5),
        (r"#### 5 \boxed{4}", 4),
        (r"\boxed{4}. The answer is correct.", 4),
        ("", None),
        ("no number", None),
        ("1/0", None),
        ("9" * 100, None),
        (r"\boxed{}", None),
        (r"\boxed{5", None),
        (r"\boxed{5^{2}}", None),
        (r"\boxed{2 + 3}", None),
        (r"\boxed{\frac{1}{0}}", None),
        ("#### none", None),
    ],
)
def test_answer_found(text: str, number: Fraction | int | None) -> None:
    assert find_answer(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("#### 5", 5), ("5", None), (r"\boxed{5}", None), ("The answer is 5", None)],
)
def test_strict_wants_the_marker(text: str, number: int | None) -> None:
    assert find_answer(text, extraction="strict") == number


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        ("steps <<48/2=24>>24\n#### 72", 72),
        ("#### 1,000", 1000),
        ("#### -3", -3),
        ("#### $2.50", Fraction("2.5")),
        ("6", 6),
        ("It takes 180 days", None),
        ("#### 180 days", None),
        ("#### ", None),
        ("", None),
        ("#### 1e5", None),
        ("#### 1,00", None),
        ("#### .", None),
    ],
)
def test_gold(gold: str, number: Fraction | int | None) -> None:
    assert parse_gold(gold) == number


def test_c01_a_gold_answer_that_is_no_number_is_unscorable() -> None:
    verdict = verify(r"\boxed{7}", "It takes 180 days")
    assert verdict.reward is None
    assert verdict.reason is not None
    assert verdict.reason.startswith("unparseable_gold")
    assert verify(r"\boxed{6}", "6").reward == 1.0
    assert verify("It takes 180 days", "It takes 180 days").reward is None


def test_wrong_and_missing_answers_score_zero() -> None:
    assert verify("#### 7", "#### 6").reward == 0.0
    missing = verify("I do not know", "#### 6")
    assert (missing.reward, missing.found) == (0.0, False)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{(5^(5^(5^(5^5))-4)-5)/16}",
        "1,111" * 50_000,
        "(" * 100_000,
        r"\boxed{" * 20_000,
        r"\boxed{" + "{" * 20_000,
        r"\text{" * 20_000 + "}" * 20_000,
        "answer is " * 10_000,
        "1" * 20_000,
        "1," * 20_000,
        "1/" * 20_000,
        "-" * 20_000,
        "$ " * 20_000,
        r"\frac{" * 5_000,
    ],
)
def test_c03_no_text_holds_the_verifier_up(text: str) -> None:
    started = time.process_time()
    for _ in range(4):
        assert verify(text, "#### 6").reward == 0.0
    assert time.process_time() - started < 2.0
    assert verify("#### 6", "#### 6").reward == 1.0


@given(st.integers(-(10**12), 10**12), st.integers(0, 4))
def test_notation_does_not_matter(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    sign = "-" if digits < 0 else ""
    plain = f"{abs(digits) // 10**places}" + (
        f".{abs(digits) % 10**places:0{places}d}" if places else ""
    )
    grouped = f"{abs(digits) // 10**places:,}" + plain[plain.find(".") :] * ("." in plain)
    gold = f"some steps\n#### {sign}{grouped}"
    assert parse_gold(gold) == value
    for number in (plain, grouped, plain + "0" if places else plain + ".0"):
        for text in (
            f"{sign}{number}",
            f"It costs {sign}${number}.",
            f"2 + 2\n#### {sign}{number}",
            f"\\boxed{{{sign}{number}\\text{{ units}}}}",
            f"The answer is {sign}{number} apples, as 1 of 7 says",
        ):
            assert verify(text, gold).reward == 1.0, text


@given(st.text(max_size=200))
def test_any_text_has_a_verdict(text: str) -> None:
    assert verify(text, "#### 6").reward in (0.0, 1.0)
    assert verify(text, text).reward in (None, 0.0, 1.0)
