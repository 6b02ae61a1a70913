"""`ray ...`, with more patience: Ray gives its own processes 30 seconds to come up, and a machine
that is busy with other tests may take longer."""

import sys
import time
from typing import Any

from ray._private import services
from ray.scripts.scripts import main

SECONDS = 240

_ask = services.get_node


def get_node(*arguments: Any, **options: Any) -> Any:
    """What `ray start` asks for until it gives up."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return _ask(*arguments, **options)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


services.get_node = get_node
sys.exit(main())
