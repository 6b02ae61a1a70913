"""Exact arithmetic over text, for tools that a policy calls.

The text is parsed by a shunting-yard of our own and computed with fractions as it is read: nothing
is ever evaluated as code, and no float rounds a result. Sizes are bounded at every step (length of
the text, digits of a number, bits of any intermediate result), so the worst input costs
microseconds: `9**9**9**9` is refused before the power is taken. The yard keeps its own stack, so
ten thousand opening brackets are no recursion.

Grammar, loosest first: `+ -` (left), `* /` (left), unary `+ -`, `**` (right, binds tighter than a
unary minus on its left: `-2**2` is -4, `2**-1` is 1/2), numbers and brackets. The signs that
typesetting has for `*`, `/` and `-` are read as these.
"""

import re
from decimal import Context, Decimal
from fractions import Fraction

MAX_CHARACTERS = 512
MAX_DIGITS = 64
MAX_BITS = 2048
"""Of a numerator or denominator: about 600 decimal digits."""

_PLAIN_DIGITS = 40
"""A whole number with more digits is written in scientific notation."""
_DECIMAL_PLACES = 20
"""A fraction with at most this many decimals is written exactly."""
_ROUNDED = Context(prec=12, Emax=10_000, Emin=-10_000)

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<operator>\*\*|[-+*/()]))", re.A
)
_SYNONYMS = str.maketrans({"×": "*", "÷": "/", "−": "-"})  # noqa: RUF001
_UNARY = {"+": "u+", "-": "u-"}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "u+": 3, "u-": 3, "**": 4}
_RIGHT = {"**", "u+", "u-"}


class ExpressionError(ValueError):
    """Why an expression has no value, in words for whoever wrote it."""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, as text: `84`, `2.5`, `0.333333333333`.

    Raises:
        ExpressionError: malformed, divided by zero, or too large.
    """
    return render(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """The exact value of an arithmetic expression.

    Raises:
        ExpressionError: malformed, divided by zero, or too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ExpressionError(f"the expression is longer than {MAX_CHARACTERS} characters")
    yard = _Yard()
    source = expression.translate(_SYNONYMS).rstrip(" \t\r\n")
    position = 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise _unexpected(source[position:].lstrip(" \t\r\n")[0])
        if number := match["number"]:
            yard.number(number)
        else:
            yard.operator(match["operator"])
        position = match.end()
    return yard.finish()


def render(value: Fraction) -> str:
    """A value as text: exact where that is short, else rounded to 12 significant digits."""
    if value.denominator == 1 and abs(value.numerator) < 10**_PLAIN_DIGITS:
        return str(value.numerator)
    scaled = value * 10**_DECIMAL_PLACES
    if scaled.denominator == 1 and abs(value) < 10**_PLAIN_DIGITS:
        exact = Decimal(scaled.numerator).scaleb(-_DECIMAL_PLACES, Context(prec=MAX_DIGITS))
        return f"{exact.normalize(Context(prec=MAX_DIGITS)):f}"
    rounded = _ROUNDED.divide(Decimal(value.numerator), Decimal(value.denominator))
    rounded = rounded.normalize(_ROUNDED)
    return f"{rounded:f}" if -7 < rounded.adjusted() < _PLAIN_DIGITS else f"{rounded:e}"


class _Yard:
    """Dijkstra's shunting-yard, which computes instead of writing postfix."""

    def __init__(self) -> None:
        self._values: list[Fraction] = []
        self._operators: list[str] = []
        self._operand_next = True

    def number(self, literal: str) -> None:
        if not self._operand_next:
            raise ExpressionError(f"an operator is missing before {literal[:MAX_DIGITS]}")
        if len(literal) > MAX_DIGITS:
            raise ExpressionError(f"a number has more than {MAX_DIGITS} digits")
        self._values.append(Fraction(literal))
        self._operand_next = False

    def operator(self, symbol: str) -> None:
        if symbol == "(":
            if not self._operand_next:
                raise ExpressionError("an operator is missing before (")
            self._operators.append(symbol)
        elif symbol == ")":
            self._close()
        elif self._operand_next:
            if symbol not in _UNARY:
                raise ExpressionError(f"a number is missing before {symbol}")
            self._operators.append(_UNARY[symbol])
        else:
            self._apply_while_tighter(symbol)
            self._operators.append(symbol)
            self._operand_next = True

    def finish(self) -> Fraction:
        if self._operand_next:
            raise ExpressionError("the expression ends where a number is missing")
        while self._operators:
            if self._operators[-1] == "(":
                raise ExpressionError("a ( is never closed")
            self._apply()
        return self._values[0]

    def _close(self) -> None:
        if self._operand_next:
            raise ExpressionError("a number is missing before )")
        while self._operators and self._operators[-1] != "(":
            self._apply()
        if not self._operators:
            raise ExpressionError("a ) was never opened")
        self._operators.pop()

    def _apply_while_tighter(self, symbol: str) -> None:
        limit = _PRECEDENCE[symbol] + (symbol in _RIGHT)
        while self._operators and _PRECEDENCE.get(self._operators[-1], 0) >= limit:
            self._apply()

    def _apply(self) -> None:
        symbol = self._operators.pop()
        right = self._values.pop()
        if symbol in ("u+", "u-"):
            result = -right if symbol == "u-" else right
        else:
            result = _binary(symbol, self._values.pop(), right)
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
            raise ExpressionError("the result is too large")
        self._values.append(result)


def _binary(symbol: str, left: Fraction, right: Fraction) -> Fraction:
    match symbol:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            if not right:
                raise ExpressionError("division by zero")
            return left / right
        case _:
            return _power(left, right)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("an exponent must be a whole number")
    if not base and exponent < 0:
        raise ExpressionError("division by zero")
    # A number of n bits has at least (n - 1) * e bits in its e-th power: refuse before computing.
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > MAX_BITS:
        raise ExpressionError("the result is too large")
    if bits == 0:
        # The base is 0, 1 or -1: only the exponent's parity matters, whatever its size.
        exponent = exponent % 2 if base < 0 or not exponent else Fraction(1)
    return Fraction(base ** int(exponent))


def _unexpected(character: str) -> ExpressionError:
    if character == "^":
        return ExpressionError("unexpected '^'; write ** for a power")
    return ExpressionError(f"unexpected {character!r}; only numbers, + - * / ** and ( ) are known")
