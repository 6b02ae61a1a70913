"""Which environments there are, by id and version.

A distribution adds its own under the entry-point group `planish.environments`: each entry point
names a sequence of `Entry`. Entries are cheap: the module that lists them is imported when the
registry is first asked, but an environment's own code only when its `load` is called, so asking
for one environment never pays for another's imports.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from environments.config import ID_PATTERN
from environments.protocol import EnvironmentType

GROUP = "planish.environments"


class RegistryError(Exception):
    """The registry itself is wrong: an entry point that does not load, or a name taken twice."""


class UnknownEnvironment(LookupError):
    """No environment has this id."""


class UnknownVersion(UnknownEnvironment):
    """The environment is there, this version of it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the registry knows of an environment before it is loaded.

    Attributes:
        id: lower-case words and slashes, such as `math/gsm8k`.
        version: 1 or more; raised when the same config would give other questions or rewards.
        load: makes the type; called at most once.
    """

    id: str
    version: int
    load: Callable[[], EnvironmentType]


class Registry:
    """Environments by id and version."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        """Raises RegistryError for an id or version that is malformed or given twice."""
        self._entries: dict[str, dict[int, Entry]] = {}
        self._loaded: dict[tuple[str, int], EnvironmentType] = {}
        for entry in entries:
            if not re.fullmatch(ID_PATTERN, entry.id) or entry.version < 1:
                raise RegistryError(
                    f"environment {entry.id!r} version {entry.version} is malformed"
                )
            versions = self._entries.setdefault(entry.id, {})
            if entry.version in versions:
                raise RegistryError(
                    f"environment {entry.id} version {entry.version} is there twice"
                )
            versions[entry.version] = entry

    def get(self, id: str, version: int | None = None) -> EnvironmentType:
        """The environment's type; its newest version where none is named.

        Raises:
            UnknownEnvironment: with names that look like it.
            UnknownVersion: with the versions that there are.
        """
        versions = self._entries.get(id)
        if versions is None:
            raise UnknownEnvironment(self._not_found(id))
        wanted = max(versions) if version is None else version
        if wanted not in versions:
            there = ", ".join(map(str, sorted(versions)))
            raise UnknownVersion(f"{id} has no version {wanted}; it has {there}")
        if (id, wanted) not in self._loaded:
            self._loaded[id, wanted] = self._load(versions[wanted])
        return self._loaded[id, wanted]

    def list_environments(self) -> Sequence[tuple[str, int]]:
        """Every id and version, sorted. Loads nothing."""
        return sorted(
            (id, version) for id, versions in self._entries.items() for version in versions
        )

    def _load(self, entry: Entry) -> EnvironmentType:
        loaded = entry.load()
        if (loaded.id, loaded.version) != (entry.id, entry.version):
            raise RegistryError(
                f"{entry.id} version {entry.version} loads as {loaded.id} version {loaded.version}"
            )
        return loaded

    def _not_found(self, id: str) -> str:
        near = difflib.get_close_matches(id[:128], self._entries, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"no environment is called {id[:128]!r}{hint} (GET /v1/environments lists them)"


@cache
def installed() -> Registry:
    """The registry of every installed distribution's environments, made once per process.

    Raises:
        RegistryError: naming the entry point that failed.
    """
    entries: list[Entry] = []
    for point in entry_points(group=GROUP):
        try:
            entries.extend(point.load())
        except (ImportError, AttributeError, TypeError) as error:
            raise RegistryError(f"entry point {point.name} ({point.value}): {error}") from error
    return Registry(entries)


def get(id: str, version: int | None = None) -> EnvironmentType:
    """`Registry.get` of the installed environments."""
    return installed().get(id, version)


def list_environments() -> Sequence[tuple[str, int]]:
    """`Registry.list_environments` of the installed environments."""
    return installed().list_environments()
