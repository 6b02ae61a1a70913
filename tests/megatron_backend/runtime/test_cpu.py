"""The CPU runtime, in a process of its own: it changes torch for good."""

import subprocess
import sys

from service.spec.layout import Layout
from tests.megatron_backend.ranks import Ranks

_LOUD = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from megatron_backend.runtime import cpu
assert not cpu.active()
cpu.install(); cpu.install()
assert cpu.active()
"""
_ELSEWHERE = """
import torch
torch.cuda.is_available = lambda: True
empty = torch.empty
from megatron_backend.runtime import cpu
cpu.install()
assert not cpu.active() and torch.empty is empty
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stderr


def test_it_says_once_that_it_is_in_use() -> None:
    assert run(_LOUD).count("WARNING No CUDA device: Megatron-Core runs on the CPU") == 1


def test_it_does_nothing_where_cuda_is() -> None:
    assert run(_ELSEWHERE) == ""


def fork_the_generator(_rank: int) -> int:
    """How many calls wait for CUDA after a tensor-parallel rank has switched generators."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    before = len(torch.cuda._queued_calls)  # type: ignore[attr-defined]
    with get_cuda_rng_tracker().fork():
        pass
    return len(torch.cuda._queued_calls) - before  # type: ignore[attr-defined]


def test_nothing_waits_for_cuda(ranks: Ranks) -> None:
    assert ranks.run(Layout(), fork_the_generator) == [0]


def use_cuda_names(_rank: int) -> list[str]:
    """What Megatron does with CUDA, and where the tensors end up."""
    import torch

    tensors = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.empty(2, pin_memory=True),
        torch.empty_like(torch.ones(2), device=0),
        torch.ones(2).to("cuda"),
        torch.ones(2).to(device="cuda", dtype=torch.float64),
        torch.ones(2).cuda(),
    ]
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        event.record(stream)
        stream.wait_event(event)
        stream.wait_stream(torch.cuda.default_stream())
        event.synchronize()
    assert event.query()
    assert stream.query()
    assert event.elapsed_time(torch.cuda.Event()) == 0
    assert tensors[0].type() == "torch.cuda.FloatTensor"
    assert tensors[0].type(torch.int64).dtype == torch.int64
    assert torch.compile(use_cuda_names) is use_cuda_names
    assert torch.compile(mode="default")(use_cuda_names) is use_cuda_names
    return [tensor.device.type for tensor in tensors]


def test_cuda_means_the_cpu(ranks: Ranks) -> None:
    assert ranks.run(Layout(), use_cuda_names) == [["cpu"] * 7]


def page_faults(_rank: int) -> list[int]:
    """Of each of several passes over tensors of 16 MiB that come and go."""
    import resource

    import torch

    faults = []
    for _ in range(24):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        first = torch.ones(2**22)
        second = first * 2
        del first, second
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults


def test_memory_of_large_tensors_is_kept(ranks: Ranks) -> None:
    """Two of them are 8192 pages. The first passes pay for them, until the heap has two places that
    are large enough and aligned."""
    (faults,) = ranks.run(Layout(), page_faults)
    assert max(faults[-3:]) < 1000
