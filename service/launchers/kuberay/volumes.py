"""What an operator has mounted into the pods of a cluster's jobs."""

from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from service.launchers.cluster import ClusterPart
from service.spec.resources import DnsName

VolumeName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", max_length=63)
]

_OURS = frozenset({"tmp", "shm"})


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path} must be an absolute path without `..`")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class Volume(ClusterPart):
    """One volume, from exactly one source."""

    name: VolumeName
    """Of the volume in the pod; `tmp` and `shm` are taken."""
    mount_path: AbsolutePath
    """Where it is in the pods."""
    claim: DnsName | None = None
    """A PersistentVolumeClaim in the same namespace."""
    host_path: AbsolutePath | None = None
    """A folder of the node."""
    secret: DnsName | None = None
    """A Secret in the same namespace, by name; always read-only."""
    config_map: DnsName | None = None
    """A ConfigMap in the same namespace; always read-only."""
    sub_path: str | None = Field(default=None, pattern=r"^[^/].*$")
    """A folder of the volume to mount instead of all of it."""
    read_only: bool = False
    """Nothing in the pods may write there."""

    @model_validator(mode="after")
    def _one_source(self) -> "Volume":
        given = [
            name
            for name in ("claim", "host_path", "secret", "config_map")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                "needs one of `claim`, `host_path`, `secret` and `config_map`, "
                f"but has {' and '.join(given) or 'none'}"
            )
        if self.name in _OURS:
            raise ValueError(f"the name {self.name} is taken by a volume that every pod has")
        return self

    def source(self) -> dict[str, Any]:
        """The entry of a pod's `volumes`."""
        if self.claim is not None:
            return {"name": self.name, "persistentVolumeClaim": {"claimName": self.claim}}
        if self.host_path is not None:
            return {"name": self.name, "hostPath": {"path": self.host_path}}
        if self.secret is not None:
            return {"name": self.name, "secret": {"secretName": self.secret, "defaultMode": 0o440}}
        return {"name": self.name, "configMap": {"name": self.config_map}}

    def mount(self) -> dict[str, Any]:
        """The entry of a container's `volumeMounts`."""
        read_only = self.read_only or self.secret is not None or self.config_map is not None
        return {
            "name": self.name,
            "mountPath": self.mount_path,
            **({"subPath": self.sub_path} if self.sub_path is not None else {}),
            **({"readOnly": True} if read_only else {}),
        }
