"""How many pods an attempt has, and what each of them takes.

Every machine of a job is one pod, and they are all of one shape: the head carries ranks as well, so
`nodes` machines are a head and `nodes - 1` workers. A tensor-parallel group stays inside a machine,
since the driver places it in one; the check at submit has seen to it that groups go in evenly.
"""

import math
from dataclasses import dataclass
from typing import Any

from service.launchers.kuberay.config import KubeRayCluster
from service.launchers.machines import ranks_per_node
from service.spec import JobContext

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One attempt's pods."""

    workers: int
    """Pods beside the head."""
    cpus: int
    """Cores that Ray hands out in each pod: one to a rank."""
    gpus: int
    """GPUs of each pod."""
    object_store_bytes: int
    """Of Ray, in each pod."""
    requests: dict[str, str]
    """What the scheduler puts aside for each pod."""
    limits: dict[str, str]
    """What each pod cannot go beyond."""

    def container_resources(self) -> dict[str, Any]:
        """`resources` of the container."""
        return {"requests": self.requests, "limits": self.limits}

    def ray_start_params(self) -> dict[str, str]:
        """What `ray start` is told in each pod."""
        return {
            "num-cpus": str(self.cpus),
            "num-gpus": str(self.gpus),
            "object-store-memory": str(self.object_store_bytes),
        }


def shape_of(cluster: KubeRayCluster, context: JobContext) -> Shape:
    """The pods that a job needs."""
    asked = context.spec.resources
    cpus = asked.cpus_per_node or ranks_per_node(context) + 1
    memory = asked.memory_gib_per_node or cluster.memory_gib_per_node
    gpus = asked.gpus_per_node
    whole = {name: str(count) for name, count in cluster.extra_resources.items()}
    if gpus:
        whole[cluster.gpu_resource] = str(gpus)
    requests = {"cpu": f"{cluster.request_cpus or cpus:g}", **whole}
    limits = dict(whole)
    if memory is not None:
        requests["memory"] = limits["memory"] = quantity(memory)
    if cluster.request_memory_gib is not None:
        least = min(cluster.request_memory_gib, memory or math.inf)
        requests["memory"] = quantity(least)
    if cluster.limit_cpus:
        limits["cpu"] = f"{cpus:g}"
    return Shape(
        workers=asked.nodes - 1,
        cpus=cpus,
        gpus=gpus,
        object_store_bytes=int(cluster.shm_gib * _GIB) // 2,
        requests=requests,
        limits=limits,
    )


def quantity(gib: float) -> str:
    """An amount of memory, in whole MiB, as Kubernetes writes it."""
    return f"{max(1, round(gib * 1024))}Mi"
