"""Launchers: what starts an attempt's driver somewhere, watches it and ends it."""

from service.launchers.cluster import ClusterConfig, Site
from service.launchers.protocol import (
    Launcher,
    LaunchError,
    LauncherUnavailable,
    LaunchRequest,
    Observation,
    Phase,
    Submission,
)

__all__ = [
    "ClusterConfig",
    "LaunchError",
    "LaunchRequest",
    "Launcher",
    "LauncherUnavailable",
    "Observation",
    "Phase",
    "Site",
    "Submission",
]
