"""Exact arithmetic on text: against Python's own parser, and against hostile input (C03, C10)."""

import ast
import contextlib
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.expressions import MAX_CHARACTERS, ExpressionError, calculate, evaluate, render


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("58 + 26", "84"),
        ("5/2", "2.5"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("-7/3", "-2.33333333333"),
        ("1 - 2 - 3", "-4"),
        ("12 / 2 / 3", "2"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("2 ** -3 * 4", "0.5"),
        ("--3", "3"),
        ("2 * -3", "-6"),
        ("(1 + 2) * 3", "9"),
        (".5 + 1.", "1.5"),
        ("6 × 7 − 84 ÷ 2", "0"),  # noqa: RUF001
        ("0 ** 0", "1"),
        ("(-1) ** 999999999999999", "-1"),
        ("10 ** 39", "1" + "0" * 39),
        ("10 ** 41", "1e+41"),
        ("10 ** 600", "1e+600"),
        ("1 / 10 ** 30", "1e-30"),
        ("123456789123456789.125", "123456789123456789.125"),
    ],
)
def test_value(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "number is missing"),
        ("()", "before )"),
        ("(1", "never closed"),
        ("1)", "never opened"),
        ("1 2", "operator is missing before 2"),
        ("2(3)", "operator is missing before ("),
        ("* 2", "missing before *"),
        ("1 // 2", "missing before /"),
        ("1 +", "ends where"),
        ("1.5.2", "operator is missing"),
        ("2 ^ 3", "write **"),
        ("1e5", "unexpected 'e'"),
        ("٣", "unexpected"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "whole number"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("1" * 65, "more than 64 digits"),
        ("1+" * MAX_CHARACTERS, "longer than"),
        ("__import__('os')", "unexpected '_'"),
    ],
)
def test_error_says_what_is_wrong(expression: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=re.escape(message)):
        calculate(expression)


def _reference(node: ast.AST) -> Fraction:
    """Python's grammar with fractions: independent of the parser under test."""
    match node:
        case ast.Expression(body):
            return _reference(body)
        case ast.Constant(value):
            return Fraction(str(value))
        case ast.UnaryOp(ast.USub(), operand):
            return -_reference(operand)
        case ast.BinOp(left, operator, right):
            a, b = _reference(left), _reference(right)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
                case ast.Pow():
                    return Fraction(a ** int(b))
    raise AssertionError(ast.dump(node))


_NUMBERS = st.one_of(
    st.integers(0, 99).map(str), st.decimals(0, 99, places=2, allow_nan=False).map(str)
)
_EXPRESSIONS = st.recursive(
    _NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        st.tuples(inner, st.sampled_from(["**2", "**-1", " ** 3"])).map("".join),
    ),
    max_leaves=8,
)


@given(_EXPRESSIONS)
def test_equals_pythons_own_reading(expression: str) -> None:
    try:
        expected = _reference(ast.parse(expression, mode="eval"))
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(expression)
        return
    # Eight leaves stay within every bound but that of size.
    largest = max(abs(expected.numerator), expected.denominator)
    if largest < 10**30:
        assert evaluate(expression) == expected


@given(st.integers(-(10**39), 10**39), st.integers(0, 20))
def test_short_decimals_are_written_exactly(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    assert Fraction(render(value)) == value


@given(st.text(alphabet="0123456789.+-*/() eE^\n", max_size=600))
def test_any_text_gives_a_value_or_an_error(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        Fraction(calculate(text))


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9",
        "(5**(5**(5**(5**5))-4)-5)/16",
        "**".join(["9"] * 170),
        "(" * 512,
        "-" * 512,
        "(" * 250 + "1" + ")" * 250,
        "*".join(["9" * 60] * 8),
        "1/3+" * 120 + "1",
        "2**2047*" * 50 + "1",
    ],
)
def test_c03_the_worst_costs_no_time(expression: str) -> None:
    started = time.process_time()
    for _ in range(64):
        with contextlib.suppress(ExpressionError):
            calculate(expression)
    assert time.process_time() - started < 1.0
    assert calculate("58 + 26") == "84"


def test_c10_text_is_never_run_as_code(tmp_path: Path) -> None:
    touched = tmp_path / "x"
    with pytest.raises(ExpressionError):
        calculate(f"__import__('os').system('touch {touched}')")
    assert not touched.exists()
