"""Writes a safetensors file tensor by tensor.

The library's own writer wants all tensors of a file at once, and copies each: twice the file in
memory. The format needs neither (8 bytes with the header's length, the header, the tensors in the
header's order), and where all shapes are known beforehand tensors can come in any order.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SafetensorsFile:
    """A file that is being written; equal to the byte to what the library writes.

    Args:
        path: of the file.
        shapes: of all tensors that will come.
        dtype: of all of them.
    """

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._missing = dict(shapes)
        self._start: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        stop = 0
        for name in sorted(shapes):
            start, stop = stop, stop + torch.Size(shapes[name]).numel() * dtype.itemsize
            header[name] = {
                "dtype": _DTYPES[dtype],
                "shape": list(shapes[name]),
                "data_offsets": [start, stop],
            }
            self._start[name] = start
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + stop)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one whole tensor in its place.

        Raises:
            ValueError: the file is to have no such tensor, or has it already, or of another shape.
        """
        if self._missing.pop(name, None) != tuple(tensor.shape) or tensor.dtype != self._dtype:
            raise ValueError(
                f"{name} of shape {list(tensor.shape)} and {tensor.dtype} is not what "
                f"{self._file.name} is to have"
            )
        self._file.seek(self._data + self._start[name])
        flat = tensor.cpu().contiguous().flatten()
        self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Ends the file.

        Raises:
            ValueError: a tensor was never written.
        """
        self._file.close()
        if self._missing:
            raise ValueError(f"{self._file.name} lacks {', '.join(list(self._missing)[:5])}")
