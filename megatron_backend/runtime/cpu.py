"""Megatron-Core where there is no CUDA: the one place that knows.

Megatron-Core asks for CUDA in many places that have nothing to do with kernels: it makes small
tensors on `device="cuda"`, records events, switches streams, saves the CUDA generator's state, and
checks that a gradient's type is named `torch.cuda.FloatTensor`. None of that changes what is
computed, so it can be answered by the CPU:

- `torch.cuda.current_device()` is the CPU device, and a factory's or `.to()`'s "cuda" means it too;
- streams and events do nothing, since every CPU operation is already in order;
- the CUDA generator is the CPU generator;
- `Tensor.type()` names the CUDA type;
- pinned memory is ordinary memory;
- collectives take parts of different sizes (see `gloo`);
- `torch.compile` leaves a function as it is. Megatron-Core compiles small fusions while it is being
  imported, which costs each process five seconds for nothing, and would need a C++ compiler.

torch has an allocator of its own for CUDA, which keeps memory; on the CPU it asks the C library,
which gives large blocks back at once, and the next step pays for their pages again. Here the C
library is told to keep them.

`install` changes torch for the whole process. So it belongs into the processes of ranks only, comes
before the first import of `megatron.core`, does nothing where CUDA is present, and says so loudly
where it does something. What Megatron-Core cannot do on a CPU (its fused kernels, the dynamic
inference engine) stays impossible.
"""

import contextlib
import ctypes
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_backend.runtime import gloo

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "ones", "ones_like", "rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)
# Names of glibc's settings (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_installed = False


class _Event:
    """A CUDA event in a world where everything has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record(self, *_args: Any) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: "_Event") -> float:
        return 0.0


class _Stream(contextlib.nullcontext["_Stream"]):
    """A CUDA stream in a world with one order of execution."""

    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__(self)

    def wait_stream(self, _other: "_Stream") -> None: ...

    def wait_event(self, _event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Generators:
    """`torch.cuda.default_generators`: one for every device index, all the CPU's."""

    def __getitem__(self, _index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def active() -> bool:
    """True where this process runs Megatron-Core on the CPU."""
    return _installed


def install() -> None:
    """Lets Megatron-Core run on the CPU. Harmless where CUDA is present, and when repeated."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    logger.warning(
        "No CUDA device: Megatron-Core runs on the CPU in this process. Results are the same, "
        "speed is not; this is for trying out and for tests."
    )
    _keep_memory()
    _replace_cuda()
    _replace_generators()
    _replace_devices()
    _replace(torch, {"compile": _uncompiled})
    _replace(torch.distributed, gloo.replacements())


def _cpu_device(device: Any) -> Any:
    """What a caller's `device` means here: any CUDA device is the CPU."""
    if isinstance(device, int):
        return _CPU
    if device is not None and torch.device(device).type == "cuda":
        return _CPU
    return device


def _replace(owner: Any, replacements: dict[str, Any]) -> None:
    for name, value in replacements.items():
        setattr(owner, name, value)


def _constant(value: Any) -> Callable[..., Any]:
    """A new function that takes anything and gives `value`.

    New each time: torch's compiler keeps a table of torch's functions, and refuses one that stands
    there twice.
    """
    return lambda *_args, **_kwargs: value


def _uncompiled(function: Any = None, **_options: Any) -> Any:
    """`torch.compile`, as a call or as a decorator, that compiles nothing."""
    return function if function is not None else lambda decorated: decorated


def _keep_memory() -> None:
    """Lets glibc reuse blocks of up to 32 MiB, its largest choice, from a heap of up to 1 GiB that
    is free. Other C libraries have no such settings."""
    settings = getattr(ctypes.CDLL(None), "mallopt", None)
    if settings is not None:
        settings(_MMAP_THRESHOLD, 2**25)
        settings(_TRIM_THRESHOLD, 2**30)


def _replace_cuda() -> None:
    properties = SimpleNamespace(multi_processor_count=1, total_memory=0, name="cpu", major=0)
    _replace(
        torch.cuda,
        {
            "Event": _Event,
            "Stream": _Stream,
            "current_device": _constant(_CPU),
            "current_stream": lambda *_a, **_k: _Stream(),
            "default_stream": lambda *_a, **_k: _Stream(),
            "device_count": _constant(1),
            "empty_cache": _constant(None),
            "get_device_capability": _constant((0, 0)),
            "get_device_properties": _constant(properties),
            "is_current_stream_capturing": _constant(False),
            "max_memory_allocated": _constant(0),
            "memory_allocated": _constant(0),
            "set_device": _constant(None),
            "stream": lambda _stream: contextlib.nullcontext(),
            "synchronize": _constant(None),
            "_lazy_init": _constant(None),
            # Kept for the day that CUDA is there, each with a text of its whole stack: for ever.
            "_lazy_call": _constant(None),
        },
    )


def _replace_generators() -> None:
    replacements: dict[str, Any] = {
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
    }
    _replace(torch.cuda, replacements)
    _replace(torch.cuda.random, replacements)
    _replace(
        torch.cuda,
        {
            "default_generators": _Generators(),
            "initial_seed": torch.initial_seed,
            "manual_seed": lambda seed: torch.manual_seed(seed),
        },
    )


def _replace_devices() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _cpu_device(kwargs["device"])
        if args and isinstance(args[0], str | torch.device):
            args = (_cpu_device(args[0]), *args[1:])
        return original_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    _replace(torch.Tensor, {"to": to, "type": type_, "cuda": lambda self, *_a, **_k: self})
    _replace(torch.nn.Module, {"cuda": lambda self, *_a, **_k: self})


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that reads "cuda" as the CPU, and pins no memory."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _cpu_device(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    make.__name__ = factory.__name__
    return make
