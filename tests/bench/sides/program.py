"""What every side's program does: reads its arguments, and writes what it found.

Nothing of the project is imported here: half of the sides run in the peers' environment.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(work: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    """Calls `work` with the case's folder and the options, and writes what it gives as JSON."""
    case, options, out = sys.argv[1:]
    result = work(Path(case), json.loads(options))
    Path(out).write_text(json.dumps(result), encoding="utf-8")
