"""How tests wait for what other processes and threads do.

A limit says how long it may take on a busy machine; a test that passes rarely waits for long.
"""

import time
from collections.abc import Callable


def wait_until[Found](
    condition: Callable[[], Found | None],
    what: str = "",
    seconds: float = 60.0,
    *,
    details: Callable[[], object] | None = None,
    pause: float = 0.05,
) -> Found:
    """The first answer of `condition` that counts as true.

    Args:
        condition: it may be asked many times. What it raises ends the waiting: so it can watch a
            process, and fail as soon as that has died.
        what: what is waited for, as in "the driver runs".
        seconds: the limit. It is asked at least once, and once more after the last pause.
        details: asked when it was all in vain: what tells why, such as a log's end.
        pause: seconds between two questions; more where a question costs much.

    Raises:
        AssertionError: the time is over.
    """
    __tracebackhide__ = True  # pytest shows the line that waited
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= deadline:
            message = f"not within {seconds:g} s" + (f": {what}" if what else "")
            raise AssertionError(message if details is None else f"{message}\n{details()}")
        time.sleep(pause)
