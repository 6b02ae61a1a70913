import pytest

from service.launchers.protocol import Phase
from service.launchers.slurm.states import KNOWN, Standing, UnknownState, standing, words
from service.spec import Reason

ENDS = {
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": Reason.CANCELLED,
    "TIMEOUT": Reason.TIMEOUT,
    "DEADLINE": Reason.TIMEOUT,
    "OUT_OF_MEMORY": Reason.OUT_OF_MEMORY,
}
MAYBE_ENDS = {
    "PREEMPTED": Reason.PREEMPTED,
    "NODE_FAIL": Reason.NODE_FAILURE,
    "BOOT_FAIL": Reason.NODE_FAILURE,
}
QUEUED = [
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
]
RUNNING = ["RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "SUSPENDED", "STOPPED"]


def told(word: str) -> object:
    """As a release that knows base states and flags apart tells it."""
    flags = {"CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "STOPPED"}
    return ["RUNNING", word] if word in flags else [word]


def test_g03_every_state_of_slurm_has_a_meaning() -> None:
    for word, reason in ENDS.items():
        assert standing(word) == standing([word]) == (Standing.ENDED, reason)
    for word, reason in MAYBE_ENDS.items():
        assert standing(word) == standing([word]) == (Standing.BACK_SOON, reason)
    for word in QUEUED:
        assert standing(word)[0].phase is standing(told(word))[0].phase is Phase.QUEUED, word
    for word in RUNNING:
        assert standing(word)[0].phase is standing(told(word))[0].phase is Phase.RUNNING, word
    for word in KNOWN - {"LAUNCH_FAILED", "UPDATE_DB"}:
        standing(word)


@pytest.mark.parametrize(
    "state", ["NEWSTATE", "REVOKED", "RV", ["RUNNING", "NEWSTATE"], "", [], None, 3, [3], " "]
)
def test_g03_what_is_not_known_is_no_state(state: object) -> None:
    with pytest.raises(UnknownState, match="SLURM"):
        standing(state)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("CANCELLED by 1001", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("FAILED ", "FAILED"),
        (" COMPLETED\n", "COMPLETED"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY"),
        ("OOM", "OUT_OF_MEMORY"),
        ("running", "RUNNING"),
    ],
)
def test_g05_a_state_is_its_first_word(state: str, expected: str) -> None:
    assert words(state) == (expected,)
    assert standing(state) == standing(expected)


def test_a_flag_says_more_than_the_state_beside_it() -> None:
    assert standing(["COMPLETED", "COMPLETING"])[0] is Standing.RUNNING
    assert standing("PREEMPTED+COMPLETING") == (Standing.RUNNING, Reason.PREEMPTED)
    assert standing(["PENDING", "REQUEUED"])[0] is Standing.QUEUED
    assert standing(["FAILED", "LAUNCH_FAILED"])[0] is Standing.ENDED
    with pytest.raises(UnknownState):
        standing("LAUNCH_FAILED")
