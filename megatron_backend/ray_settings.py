"""What all Rays of ours are told: one that a driver starts for itself, one over several machines.

Ray's processes read it from their environment, and the ranks inherit that.
"""

OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Batches and answers pass through it; Ray's default would take a third of the memory."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""No rank is to have it: each would compile anew what it imports."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
"""No reports to Ray's makers, and no colours in logs."""


def guarded(token: str) -> dict[str, str]:
    """The variables of a Ray of our own.

    Args:
        token: without one anybody on the machine could run code in the ranks' processes.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        # Ray gives its workers the lowest priority but few; here they are what it is for.
        "RAY_worker_niceness": "0",
    }
