"""What nothing on this machine can be faster than, measured on the spot."""

import time
from collections.abc import Callable

import torch


def gemm_rate(size: int = 1024) -> float:
    """Floating-point operations a second of one large matrix product in fp32."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return 2 * size**3 / _best(lambda: torch.mm(left, right, out=out))


def read_rate(megabytes: int = 256) -> float:
    """Bytes a second at which memory is read."""
    values = torch.ones(megabytes << 18)
    return values.nbytes / _best(lambda: values.sum())


def copy_rate(megabytes: int = 256) -> float:
    """Bytes a second at which memory is copied."""
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    return source.nbytes / _best(lambda: target.copy_(source))


def _best(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
