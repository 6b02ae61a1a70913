"""What must be known of reasoning-gym's datasets before the package is imported (3 s).

Some scorers hand the policy's own text to Python's `eval`, or to sympy's `parse_expr`, which
evaluates it as well. For those, an answer reaches the scorer only where every character and word of
it is known to be harmless: a text without brackets for calls, without dots and without operators
cannot call anything; one whose only words are variables and elementary functions cannot reach a
module. Anything else scores 0 unseen.

A few others raise on an answer of the wrong form, which would make it unscorable where it is merely
wrong, or score one too well. Their answers must have the right form first.
"""

import json
import re
from collections.abc import Callable, Mapping

_NAMES = """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf
    binary_alternation binary_matrix bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic
    chain_sum circuit_logic codeio color_cube_rotation complex_arithmetic count_bits
    count_primes countdown course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice
    emoji_mystery family_relationships figlet_font fraction_simplification futoshiki
    game_of_life gcd graph_color group_anagrams gsm_symbolic
    intermediate_integration isomorphic_strings jugs kakurasu knight_swap knights_knaves
    largest_island lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle
    manipulate_matrix maze mini_sudoku modulo_grid n_queens needle_haystack number_filtering
    number_format number_sequence number_sorting palindrome_generation palindrome_partitioning
    path_star polynomial_equations polynomial_multiplication pool_matrix power_function
    prime_factorization products propositional_logic puzzle24 quantum_lock ransom_note rearc
    rectangle_count rotate_matrix rotten_oranges rubiks_cube rush_hour self_reference
    sentence_reordering shortest_path simple_equations simple_geometry simple_integration
    sokoban spell_backward spiral_matrix string_insertion string_manipulation string_splitting
    string_synthesis sudoku survo syllogism time_intervals tower_of_hanoi tsumego word_ladder
    word_sequence_reversal word_sorting zebra_puzzles
"""
NAMES = tuple(_NAMES.split())
"""Every dataset of the pinned release but those in `LEFT_OUT`."""

LEFT_OUT: Mapping[str, str] = {
    "composite": "a mixture of others, whose settings would pass unchecked",
    "coin_flip": "its scorer gives 1 for any prefix of the answer, so for 0 always",
    "game_of_life_halting": "its scorer gives 1 for any text",
}
"""Datasets that are no environments here, and why."""

_LITERAL = re.compile(r"[A-Za-z0-9_ ,\[\]'\"\r\n\t-]*")
_FORMULA = re.compile(r"[A-Za-z0-9 +*/^().,\r\n\t-]*")
# A dot is a decimal point: an attribute access would follow a name or a bracket.
_ATTRIBUTE = re.compile(r"[A-Za-z)]\s*\.|\.\s*[A-Za-z]")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_FUNCTIONS = """
    sin cos tan cot sec csc asin acos atan acot sinh cosh tanh asinh acosh atanh
    exp log ln sqrt Abs pi E C
"""
_KNOWN_WORDS = frozenset(_FUNCTIONS.split())


_FACTORS = re.compile(r"\s*\d{1,100}\s*(?:×\s*\d{1,100}\s*)*", re.A)  # noqa: RUF001
_COMPLEX = re.compile(r"[0-9ij+.\s-]*")


def may_be_scored(dataset: str, answer: str) -> bool:
    """Whether the dataset's scorer may see this answer; where not, it is wrong."""
    check = _CHECKS.get(dataset)
    return check is None or check(answer)


def _is_literal(answer: str) -> bool:
    return _LITERAL.fullmatch(answer) is not None


def _is_formula(answer: str) -> bool:
    return (
        _FORMULA.fullmatch(answer) is not None
        and _ATTRIBUTE.search(answer) is None
        and all(len(word) == 1 or word in _KNOWN_WORDS for word in _WORD.findall(answer))
    )


def _is_product(answer: str) -> bool:
    return _FACTORS.fullmatch(answer) is not None


def _is_complex_number(answer: str) -> bool:
    """No `nan` or `inf`, which lie at no distance from any number."""
    return _COMPLEX.fullmatch(answer) is not None


def _is_json_list(answer: str) -> bool:
    return isinstance(_json(answer), list)


def _is_plan(answer: str) -> bool:
    """A JSON list of objects that hold only texts."""
    steps = _json(answer)
    return isinstance(steps, list) and all(
        isinstance(step, dict) and all(isinstance(move, str) for move in step.values())
        for step in steps
    )


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_CHECKS: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": _is_literal,
    "n_queens": _is_literal,
    "spiral_matrix": _is_literal,
    "string_insertion": _is_literal,
    "countdown": _is_formula,
    "intermediate_integration": _is_formula,
    "polynomial_multiplication": _is_formula,
    "puzzle24": _is_formula,
    "simple_integration": _is_formula,
    "prime_factorization": _is_product,
    "complex_arithmetic": _is_complex_number,
    "game_of_life": _is_json_list,
    "boxnet": _is_plan,
}


# Settings that end in code, in a file name or in a font's file name.
SETTING_PATTERNS = {
    "operators": r"^[-+*/]$",
    "operations": r"^[-+*/]$",
    "symbols": r"^[A-Za-z]$",
    "variables": r"^[A-Za-z]$",
    "data_file": r"^[A-Za-z0-9_]+\.txt$",
    "static_font": r"^[A-Za-z0-9_-]+$",
}
"""What each string of these settings must look like, whichever dataset has them."""
