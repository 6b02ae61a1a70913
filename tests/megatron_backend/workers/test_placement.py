"""How many groups each machine gets, and who is a neighbour of whom."""

import pytest

from megatron_backend.workers.placement import bundle_sizes, bundles_of_groups


@pytest.mark.parametrize(
    ("groups", "nodes", "sizes"),
    [
        (4, None, [1, 1, 1, 1]),  # each wherever it fits
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (7, 3, [3, 2, 2]),
        (2, 8, [1, 1]),  # no machine is without a rank
    ],
)
def test_machines_share_the_groups_evenly(groups: int, nodes: int | None, sizes: list[int]) -> None:
    assert bundle_sizes(groups, nodes=nodes) == sizes


def test_groups_on_one_machine_follow_each_other() -> None:
    """Ray puts single groups down in an order of its own."""
    assert bundles_of_groups([1, 1, 1, 1], {0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]
    assert bundles_of_groups([2, 2], {0: "b", 1: "a"}) == [0, 0, 1, 1]
    assert bundles_of_groups([3, 2], {0: "a", 1: "b"}) == [0, 0, 0, 1, 1]
