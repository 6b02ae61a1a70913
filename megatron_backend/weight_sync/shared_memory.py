"""Weights that other processes of the machine can write into.

On a CPU, ranks of one machine need no messages: a target keeps its tensors in a piece of memory
that its neighbours map too, and each of them writes its slices where they belong. A weight is then
copied once, where a socket copies it four times.

The memory is an anonymous file (memfd). It has no name that could be left behind, belongs to no
mount with a size limit, and is gone with the last process that maps it. Others reach it through
`/proc`, which works for one user in one process namespace. That cannot be told in advance, so a
token at the front says whether what was opened is what was meant; whoever does not find it there
falls back to messages.
"""

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
_TOKEN_BYTES = 64


class SharedTensors:
    """A target's tensors, moved into memory that other processes can map.

    Args:
        tensors: parameters and buffers of this process. Their data moves; they stay the objects
            that they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        offsets, size = [], _TOKEN_BYTES
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._file = os.memfd_create("weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        memory = _mapped(self._file, size)
        memory[:_TOKEN_BYTES] = torch.frombuffer(bytearray(self._token.encode()), dtype=torch.uint8)
        for tensor, offset in zip(tensors, offsets, strict=True):
            place = _view(memory, offset, tensor.dtype, tensor.shape)
            place.copy_(tensor.detach())
            tensor.data = place
        self._size, self._offsets = size, offsets

    def address(self) -> dict[str, Any]:
        """How another process finds it, as JSON values."""
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._file}",
            "token": self._token,
            "size": self._size,
            "offsets": self._offsets,
        }


class RemoteTensors:
    """Another process's `SharedTensors`, mapped here."""

    def __init__(self, memory: Tensor, offsets: Sequence[int]) -> None:
        self._memory, self._offsets = memory, offsets

    @classmethod
    def open(cls, address: dict[str, Any]) -> "RemoteTensors | None":
        """The tensors at an `address`; None where this process cannot reach them."""
        try:
            file = os.open(address["path"], os.O_RDWR)
        except OSError:
            return None
        try:
            if os.fstat(file).st_size != address["size"]:
                return None
            memory = _mapped(file, address["size"])
        except (OSError, ValueError):
            return None
        finally:
            os.close(file)
        token = bytes(memory[:_TOKEN_BYTES].tolist())
        return cls(memory, address["offsets"]) if token == address["token"].encode() else None

    def view(self, number: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """One of the tensors."""
        return _view(self._memory, self._offsets[number], dtype, shape)


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _view(memory: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    size = torch.Size(shape)
    return memory[offset : offset + size.numel() * dtype.itemsize].view(dtype).view(size)
