"""Which of the ranks that did not answer a call are the cause, and how long a call may take."""

from collections.abc import Mapping, Sequence

from megatron_backend.workers.errors import RanksHung
from megatron_backend.workers.heartbeat import Beat

BEAT_SECONDS = 5.0
"""How long a rank may take to tell what it is doing."""
_PHASES = {
    "setup": ("prepare", "setup", "setup_generation", "load_state", "shutdown"),
    "step": (
        *("train_step", "log_probs", "evaluate_loss", "tied_difference", "logits"),
        *("values", "likeliest", "scores"),
    ),
    "generate": ("generate", "sync_weights"),
    "save": ("begin_save", "save_again", "save_result", "export_hf", "check_export"),
}
PHASE_OF = {method: phase for phase, methods in _PHASES.items() for method in methods}
"""The field of `faults.deadlines` that bounds each call."""


def hang_of(
    silent: Sequence[int], beats: Mapping[int, Beat], method: str, limit: float, *, group: str = ""
) -> RanksHung:
    """What to make of ranks that did not answer in time.

    Args:
        silent: the ranks.
        beats: what those of them say that they are doing that still answer such a question.
        method: the call.
        limit: of its phase, in seconds.
        group: see `RanksFailed`.
    """
    frozen = [rank for rank in silent if rank not in beats]
    busy = [rank for rank in silent if rank in beats and not beats[rank].waiting]
    lines = [
        f"rank {rank} {beats.get(rank, f'did not answer for {BEAT_SECONDS:.0f} s')}"
        for rank in silent
    ]
    return RanksHung(
        frozen or busy or silent,
        f"ranks {', '.join(map(str, silent))} did not answer {method} within {limit:g} s "
        f"(`faults.deadlines.{PHASE_OF[method]}`; raise it where this is honest work): "
        + "; ".join(lines),
        group=group,
    )
