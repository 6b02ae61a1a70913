"""Finds and compares the number that answers a word problem.

Only numbers are parsed, never expressions, by patterns that read each character a bounded number of
times: there is nothing in a policy's text that could run, or run long. A gold answer that is no
number makes the question unscorable (None); it never makes an answer right.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

type Extraction = Literal["flexible", "strict"]

TAIL_CHARACTERS = 20_000
"""An answer stands near the end; what is before the last so many characters is not read."""
MAX_DIGITS = 60
_STATEMENTS = 8
_LINE_CHARACTERS = 1000

# A sign belongs to the number unless it stands between two operands, as in 10-3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}%])[-−+])?"  # noqa: RUF001
    r"(?:\\?[$€£]\s?-?)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)",
    re.ASCII,
)
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s?\{\s?(-?\d{1,60})\s?\}\s?\{\s?(\d{1,60})\s?\}", re.ASCII)
_QUOTIENT = re.compile(r"\s?/\s?(\d{1,60})(?![\d.,]*\d)", re.ASCII)
_GOLD = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?", re.ASCII)
_STATED = re.compile(r"answer\s{0,4}(?:is|=|:)", re.IGNORECASE)
_WRAPPERS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s?\{([^{}]*)\}|\\[,!;: ]|\{,\}")
_UNITS = re.compile(r"[A-Za-z%°\s.\\]*")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score, or why there is none.

    Attributes:
        reward: 1 or 0; None where the question cannot be scored.
        found: an answer was found in the text.
        reason: why `reward` is None.
    """

    reward: float | None
    found: bool = False
    reason: str | None = None


def verify(text: str, gold: str, *, extraction: Extraction = "flexible") -> Verdict:
    """Scores a turn against a gold answer: equal numbers score 1, whatever their notation."""
    expected = parse_gold(gold)
    if expected is None:
        return Verdict(None, reason="unparseable_gold: the gold answer is not a number")
    answer = find_answer(text, extraction=extraction)
    return Verdict(float(answer == expected), found=answer is not None)


def parse_gold(gold: str) -> Fraction | None:
    """The number of a gold answer: all that follows the last `####`, or the whole text.

    Commas, a currency sign and one full stop at the end are allowed; words are not.
    """
    stated = gold.rpartition("####")[2].strip().removesuffix(".").replace("$", "", 1).strip()
    if not stated or len(stated) > MAX_DIGITS or not _GOLD.fullmatch(stated):
        return None
    return _value(stated)


def find_answer(text: str, *, extraction: Extraction = "flexible") -> Fraction | None:
    r"""The number that a policy gives as its answer.

    `strict` takes only what follows the last `####`. `flexible` takes what the last `####` or
    `\boxed{...}` holds; without these, the number behind the last "answer is"; else the last one.
    """
    tail = text[-TAIL_CHARACTERS:]
    _, marker, after = tail.rpartition("####")
    if extraction == "strict" or (marker and "\\boxed" not in after):
        return _first_number(_line(after)) if marker else None
    _, marker, after = tail.rpartition("\\boxed")
    if marker:
        return _boxed(after)
    # Words may go on without a number, as in "the answer is as follows".
    for stated in reversed(list(_STATED.finditer(tail))[-_STATEMENTS:]):
        if (number := _first_number(_line(tail[stated.end() :]))) is not None:
            return number
    return _last_number(tail)


def _line(text: str) -> str:
    return text.lstrip().partition("\n")[0][:_LINE_CHARACTERS]


def _first_number(text: str) -> Fraction | None:
    numbers = _NUMBER.finditer(text)
    fraction = _FRACTION.search(text)
    number = next(numbers, None)
    if fraction and (number is None or fraction.start() <= number.start()):
        return _latex_fraction(fraction)
    return _read(number) if number else None


def _last_number(text: str) -> Fraction | None:
    numbers = list(_NUMBER.finditer(text))
    fractions = list(_FRACTION.finditer(text))
    if fractions and fractions[-1].end() > numbers[-1].end():
        return _latex_fraction(fractions[-1])
    if not numbers:
        return None
    last = numbers[-1]
    if len(numbers) > 1 and _QUOTIENT.fullmatch(text, numbers[-2].end(), last.end()):
        last = numbers[-2]
    return _read(last)


def _boxed(text: str) -> Fraction | None:
    """The number in the brackets that open `text`; it may have a unit, but no operators."""
    content = _bracketed(text)
    if content is None:
        return None
    content = _WRAPPERS.sub(lambda match: match[1] or "", content).rpartition("=")[2].strip()
    if fraction := _FRACTION.fullmatch(content):
        return _latex_fraction(fraction)
    number = _NUMBER.search(content)
    if number is None:
        return None
    end = number.end()
    if quotient := _QUOTIENT.match(content, end):
        end = quotient.end()
    alone = _UNITS.fullmatch(content, 0, number.start()) and _UNITS.fullmatch(content, end)
    return _read(number) if alone else None


def _bracketed(text: str) -> str | None:
    """What stands in the matching curly brackets that begin `text`."""
    if not text.lstrip().startswith("{"):
        return None
    depth = 0
    start = text.index("{")
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
    return None


def _read(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER`, divided by what follows a slash behind it."""
    if len(match["digits"]) > MAX_DIGITS:
        return None
    value = _value(match["digits"])
    if value is None:
        return None
    signs = match[0][: match.start("digits") - match.start()]
    if "-" in signs or "−" in signs:  # noqa: RUF001
        value = -value
    quotient = _QUOTIENT.match(match.string, match.end())
    divisor = int(quotient[1]) if quotient else 1
    return value / divisor if divisor else None


def _latex_fraction(match: re.Match[str]) -> Fraction | None:
    denominator = int(match[3])
    if not denominator:
        return None
    value = Fraction(int(match[2]), denominator)
    return -value if match[1] else value


def _value(digits: str) -> Fraction | None:
    try:
        return Fraction(digits.replace(",", ""))
    except ValueError:
        return None
