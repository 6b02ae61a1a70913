"""Environment variables by which a launcher tells the driver what its cluster does.

Each may be absent: a driver that somebody starts by hand knows of no cluster. What they are for is
told where the driver reads them.
"""

GRACE_SECONDS = "PLANISH_GRACE_SECONDS"
"""Seconds that the cluster leaves a driver after SIGTERM."""
SIGNAL_SECONDS = "PLANISH_SIGNAL_SECONDS"
"""Seconds that the cluster leaves a driver after SIGUSR1, which announces the time limit."""
NODE_WAIT_SECONDS = "PLANISH_NODE_WAIT_SECONDS"
"""Seconds in which the cluster puts another machine in the place of a lost one."""
METRICS_PORT = "PLANISH_METRICS_PORT"
"""Port for the driver's own /metrics, on all addresses; 0 takes a free one."""
