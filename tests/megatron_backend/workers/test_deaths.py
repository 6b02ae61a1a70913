from pathlib import Path

import pytest
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from megatron_backend.workers.deaths import death_of, is_network_error, oom_kills
from megatron_backend.workers.errors import (
    NodeLost,
    WorkerLost,
    WorkerOutOfMemory,
)

SILENT = RayActorError(error_msg="connection error code 2")


@pytest.mark.parametrize(
    ("error", "seen", "kind", "restartable"),
    [
        (SILENT, "", WorkerLost, True),
        (SILENT, "machine gone", NodeLost, True),
        (SILENT, "oom", WorkerOutOfMemory, False),
        (RayActorError(error_msg="Its node has died."), "", NodeLost, True),
        (RayActorError(error_msg="Detail: Owner's node has crashed."), "", NodeLost, True),
        (OutOfMemoryError("memory on the node was low"), "", WorkerOutOfMemory, False),
    ],
)
def test_what_a_death_means(
    error: RayError, seen: str, kind: type[WorkerLost], restartable: bool
) -> None:
    for group, said in (("", "rank 3 died: "), ("teacher", "the teacher's rank 3 died: ")):
        death = death_of(
            3,
            error,
            oom_killed=seen == "oom",
            machine_there=lambda: seen != "machine gone",
            group=group,
        )
        assert type(death) is kind
        assert (death.rank, death.ranks, death.restartable) == (3, (3,), restartable)
        assert death.group == group
        assert str(death).startswith(said)


def test_the_message_is_one_line_for_people() -> None:
    error = RayActorError(error_msg="The actor died.\n\tactor_id: 846f48a5\nIts process ended.\n")
    death = death_of(0, error, oom_killed=False, machine_there=lambda: True)
    assert str(death) == "rank 0 died: The actor died. Its process ended."


def test_only_lost_connections_count_as_the_network() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1")
    assert is_network_error(lost)
    assert is_network_error(torch.distributed.DistNetworkError("reset"))
    assert not is_network_error(RuntimeError("shape mismatch"))
    assert not is_network_error(ValueError("Connection closed by peer"))


def test_the_kernel_counts_its_kills() -> None:
    """The number itself is the machine's; it is read from where the kernel writes it."""
    sources = [Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")]
    source = next(path for path in sources if path.exists())
    assert f"oom_kill {oom_kills()}" in source.read_text().splitlines()
