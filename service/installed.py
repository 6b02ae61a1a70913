"""The clusters of a service, by name: read from its clusters file, made by what is installed."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from service.launchers import ClusterConfig, Launcher, Site
from service.launchers.local import LocalCluster
from service.settings import Settings
from service.spec.resources import ResourceSpec
from service.validation.problems import from_pydantic

GROUP = "planish.launchers"


class InvalidClusters(ValueError):
    """A clusters file that cannot be used; the message names the file, the place and the fault."""


def open_launchers(settings: Settings) -> Mapping[str, Launcher]:
    """A launcher for each cluster. Connects to none of them.

    Raises:
        InvalidClusters: the clusters file is not as `docs/clusters.md` says.
        ValueError: two packages offer the same type of cluster.
    """
    site = Site(jobs_dir=settings.jobs_dir, data_roots=settings.all_data_roots)
    return {name: config.open(site) for name, config in read_clusters(settings).items()}


def read_clusters(settings: Settings) -> Mapping[str, ClusterConfig]:
    """The clusters file; without one, this machine is the only cluster, named `local`.

    Raises:
        InvalidClusters: the clusters file is not as `docs/clusters.md` says.
        ValueError: two packages offer the same type of cluster.
    """
    if settings.clusters_file is None:
        return {"local": LocalCluster(max_jobs=settings.max_local_jobs)}
    document = _document(settings.clusters_file)
    kinds = _installed_types()
    return {
        name: _cluster(settings.clusters_file, name, options, kinds)
        for name, options in document.items()
    }


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidClusters(f"the clusters file {path} cannot be read: {error}") from error
    clusters = document.get("clusters") if isinstance(document, dict) else None
    if not isinstance(clusters, dict) or not clusters or len(document) > 1:
        raise InvalidClusters(
            f"{path} must hold one mapping `clusters`, with each cluster under its name"
        )
    return clusters


def _cluster(
    path: Path, name: object, options: object, kinds: Mapping[str, EntryPoint]
) -> ClusterConfig:
    try:
        ResourceSpec.model_validate({"cluster": name})
    except ValidationError as error:
        raise InvalidClusters(
            f"{path}: a cluster cannot be named {name!r}: lower-case letters, digits, - and _, "
            "at most 32, beginning with a letter"
        ) from error
    kind = options.get("type") if isinstance(options, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidClusters(
            f"{path}: clusters.{name}.type must be one of: {', '.join(sorted(kinds))}; "
            f"it is {kind!r}"
        )
    try:
        config: ClusterConfig = kinds[kind].load().model_validate(options)
        return config
    except ImportError as error:
        raise InvalidClusters(
            f"{path}: clusters.{name}: the type {kind} needs more to be installed: {error}"
        ) from error
    except ValidationError as error:
        faults = "; ".join(
            f"clusters.{name}.{fault.field}: {fault.message}"
            for fault in from_pydantic(error.errors(include_input=False))
        )
        raise InvalidClusters(f"{path}: {faults}") from error


def _installed_types() -> Mapping[str, EntryPoint]:
    """By name; each is loaded where it is used, since some need more than others."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        if entry.name in found:
            raise ValueError(f"two packages offer the type of cluster {entry.name!r}")
        found[entry.name] = entry
    return found
