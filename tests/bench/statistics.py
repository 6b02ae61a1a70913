"""Ratios of pairs: what a benchmark reports, and when it may."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

PAIRS = 7
MOST_SPREAD = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The peer's seconds over ours, pair by pair: above 1, ours is faster.

    Attributes:
        median: of the pairs' ratios.
        low, high: their 10% and 90% quantiles.
        our_seconds, peer_seconds: medians.
        peer_spread: (90% - 10% quantile) / median of the peer's own seconds.
    """

    median: float
    low: float
    high: float
    our_seconds: float
    peer_seconds: float
    peer_spread: float

    @classmethod
    def of(cls, ours: Sequence[float], peer: Sequence[float]) -> "Ratio":
        """Compares runs that were made in pairs.

        Raises:
            ValueError: the lists differ in length, are shorter than two, or hold a time that is
                not positive.
        """
        if len(ours) != len(peer) or len(ours) < 2:
            raise ValueError(f"{len(ours)} of our runs and {len(peer)} of the peer's are no pairs")
        if min(*ours, *peer) <= 0:
            raise ValueError("a run took no time at all")
        low, high = _tails([theirs / own for own, theirs in zip(ours, peer, strict=True)])
        return cls(
            median=median(theirs / own for own, theirs in zip(ours, peer, strict=True)),
            low=low,
            high=high,
            our_seconds=median(ours),
            peer_seconds=median(peer),
            peer_spread=(_tails(peer)[1] - _tails(peer)[0]) / median(peer),
        )


def order(pair: int) -> tuple[str, str]:
    """Who runs first in a pair: A B, B A, A B, ... so that a drift of the machine cancels."""
    return ("ours", "peer") if pair % 2 == 0 else ("peer", "ours")


def _tails(values: Sequence[float]) -> tuple[float, float]:
    """The 10% and 90% quantiles, interpolated between the values."""
    deciles = quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]
