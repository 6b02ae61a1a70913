"""The bytes that `torch.save` writes for a tensor, with one copy of the tensor's own.

A distributed checkpoint of torch is a row of such archives, one for each piece of a tensor.
`torch.save` takes half a millisecond for each, and reads a tensor twice: for a checksum and for the
copy. But all that is around the tensor's own bytes follows from its shape and dtype, as long as
there are no checksums (each file is hashed as a whole). So that is asked of `torch.save` once for
each shape, and kept.
"""

import functools
import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options


class Writer(Protocol):
    """What takes bytes."""

    def write(self, data: memoryview | bytes, /) -> int: ...


def write_tensor(tensor: Tensor, file: Writer) -> None:
    """Writes what `torch.load` reads as this tensor.

    Args:
        tensor: of any shape, on the CPU.
        file: takes all that it is given.
    """
    before, after = _frame(tensor.shape, tensor.dtype)
    file.write(before)
    file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
    file.write(after)


@functools.cache
def _frame(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What an archive has before and behind the tensor's own bytes."""
    tensor, archive = torch.zeros(shape, dtype=dtype), io.BytesIO()
    with _no_checksums():
        torch.save(tensor, archive)
    with archive.getbuffer() as view:
        start = _start_of_data(archive)
        return bytes(view[:start]), bytes(view[start + tensor.nbytes :])


def _start_of_data(archive: io.BytesIO) -> int:
    """Where the tensor's bytes begin: behind the zip format's local header, name and padding."""
    with zipfile.ZipFile(archive) as file:
        [entry] = [entry for entry in file.infolist() if entry.filename.endswith("/data/0")]
    header = struct.Struct("<26xHH")
    name, padding = header.unpack_from(archive.getbuffer(), entry.header_offset)
    return entry.header_offset + header.size + int(name) + int(padding)


@contextmanager
def _no_checksums() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
