"""The launchers that are installed, by name: the entry points `planish.launchers`."""

from collections.abc import Mapping
from importlib.metadata import entry_points

from service.launchers import Launcher
from service.settings import Settings

GROUP = "planish.launchers"


def installed_launchers(settings: Settings) -> Mapping[str, Launcher]:
    """Makes one launcher of each kind; its name is what jobs give as `resources.cluster`.

    An entry point names something that is called as
    `LAUNCHER(jobs_dir, capacity=N, data_roots=[...])`.

    Raises:
        ValueError: two packages offer the same name.
    """
    found: dict[str, Launcher] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        if entry.name in found:
            raise ValueError(f"two packages offer the launcher {entry.name!r}")
        found[entry.name] = entry.load()(
            settings.jobs_dir,
            capacity=settings.max_local_jobs,
            data_roots=settings.all_data_roots,
        )
    return found
