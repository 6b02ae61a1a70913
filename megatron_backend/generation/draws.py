"""Random numbers that depend on where they are used, and on nothing else.

A generator with a state would give other draws to a prompt when its neighbours change. Here the
number for a token is a hash of (seed, place of the prompt in the whole list, position of the token
in its sequence), so neither layout nor batching matters. The hash is the finalizer of SplitMix64
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), applied once for
each of the three.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(state: npt.NDArray[np.uint64], value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Folds `value` into `state`; multiplication wraps around at 2**64, as it should."""
    mixed = (state ^ value) + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> np.uint64(31))


def uniforms(
    seed: int, indices: Sequence[int], first_positions: Sequence[int], count: int
) -> npt.NDArray[np.float64]:
    """[len(indices), count] numbers in the open interval (0, 1).

    Args:
        seed: of the whole call, any non-negative int below 2**64.
        indices: place of each prompt in the whole list.
        first_positions: position of each prompt's first new token: its number of prompt tokens.
        count: numbers for each prompt, one a position.
    """
    state = _mix(np.zeros(1, dtype=np.uint64), np.array([seed], dtype=np.uint64))
    rows = _mix(state, np.array(indices, dtype=np.uint64))[:, None]
    steps = np.arange(count, dtype=np.uint64)
    positions = np.add(np.array(first_positions, dtype=np.uint64)[:, None], steps, dtype=np.uint64)
    bits = _mix(rows, positions) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
