"""Where a driver's output goes when its launcher did not say: into its attempt's log.

A local launcher hands the log over as stdout. In a cluster stdout belongs to the cluster (a pod's
log, a batch job's file), which is gone with the pod or is another file for each start. So `--log`
makes the driver point its own stdout and stderr at attempts/N/log. That is done to the file
descriptors and not to Python's `sys.stdout`, so what native code and child processes write lands
there too. It is appended to: a batch script, or a start that was lost, may have written before.
"""

import os
import sys
from pathlib import Path


def redirect_output(log: Path) -> None:
    """From now on this process and its children write their output to the end of `log`.

    Raises:
        OSError: the file cannot be opened; nothing was changed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
