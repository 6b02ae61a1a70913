"""Launchers: what starts an attempt's driver somewhere, watches it and ends it."""

from service.launchers.protocol import (
    Launcher,
    LaunchError,
    LauncherUnavailable,
    LaunchRequest,
    Observation,
    Phase,
)

__all__ = [
    "LaunchError",
    "LaunchRequest",
    "Launcher",
    "LauncherUnavailable",
    "Observation",
    "Phase",
]
