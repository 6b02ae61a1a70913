"""Log-probs of the reference model, computed once for each row of a file.

The reference never changes, so a row's log-probs are the same in every epoch and in every attempt
of a job. They are kept in memory, and in a folder where there is one, under a key of all that they
depend on: the model, its number format, and the tokens and masks of the file, which hold the chat
template and the length rule.

On disk each process appends to a file of its own, so that two attempts that are alive at once never
write into each other. A record carries a digest over the key, the row and the values. Reading ends
at the first record that is not whole: what a crash tore, and what belongs to another key, is
computed again and never used.
"""

import hashlib
import json
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from algorithms.batch import Batch
from algorithms.data.dataset import Dataset
from algorithms.data.examples import sequences_of
from service.spec import JobContext

_HEAD = struct.Struct("<QI")  # row, number of values
_DIGEST_BYTES = 16
_VALUE_BYTES = 4  # float32


class ReferenceCache:
    """What the reference says of the trained tokens of each row."""

    def __init__(
        self,
        key: str,
        sizes: Sequence[int],
        *,
        folder: Path | None,
        warn: Callable[[str], None],
    ) -> None:
        """Reads what earlier processes have left.

        Args:
            key: see `reference_key`.
            sizes: trained tokens of each row of the file, both answers of a pair together.
            folder: where values are kept; None keeps them in memory only.
            warn: is told where the folder cannot be used; the job goes on without it.
        """
        self._key, self._sizes, self._warn = key, sizes, warn
        self._folder = folder
        self._name = f"{key}-{secrets.token_hex(8)}"
        self._values: dict[int, Tensor] = {}
        if folder is not None:
            try:
                self._read_all(folder)
            except OSError as error:
                self._give_up(error)

    def __len__(self) -> int:
        """How many rows are known."""
        return len(self._values)

    def log_probs(self, batch: Batch, rows: Sequence[int], compute: Callable[[], Tensor]) -> Tensor:
        """[B, T] log-probs of the batch's tokens, 0 where a token is not trained.

        Args:
            batch: its first units are `rows` of the file, whole; what follows has no trained token.
            rows: by their place in the data set.
            compute: asks the reference model for [B, T]. It is called where a row is not known,
                and always for the whole batch, which divides over the ranks.
        """
        trained = batch.loss_mask > 0
        missing = {row for row in rows if row not in self._values}
        fresh: dict[int, Tensor] = {}
        if missing:
            computed = compute().float()
            fresh = {
                row: computed[place : place + batch.unit][trained[place : place + batch.unit]]
                for row, place in zip(rows, range(0, len(batch), batch.unit), strict=False)
                if row in missing
            }
            # What is no number may come of a passing fault: it counts now, and is asked for again.
            self._keep({row: of for row, of in fresh.items() if of.isfinite().all()})
        found = torch.zeros(batch.loss_mask.shape, dtype=torch.float32)
        said = [fresh[row] if row in fresh else self._values[row] for row in rows]
        found[trained] = torch.cat(said)
        return found

    def _keep(self, fresh: dict[int, Tensor]) -> None:
        self._values |= fresh
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / self._name).open("ab") as file:
                for row, values in fresh.items():
                    file.write(self._record(row, values.numpy().astype("<f4").tobytes()))
        except OSError as error:
            self._give_up(error)

    def _record(self, row: int, values: bytes) -> bytes:
        body = _HEAD.pack(row, len(values) // _VALUE_BYTES) + values
        return body + self._digest(body)

    def _digest(self, body: bytes) -> bytes:
        return hashlib.blake2b(self._key.encode() + body, digest_size=_DIGEST_BYTES).digest()

    def _read_all(self, folder: Path) -> None:
        for path in sorted(folder.glob(f"{self._key}-*")):
            with path.open("rb") as file:
                for row, values in self._records(file):
                    numbers = np.frombuffer(bytearray(values), dtype="<f4")
                    self._values[row] = torch.from_numpy(numbers)

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Row and values of each whole record, up to the first that is none."""
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            row, count = _HEAD.unpack(head)
            if row >= len(self._sizes) or count != self._sizes[row]:
                return
            values = file.read(count * _VALUE_BYTES)
            if file.read(_DIGEST_BYTES) != self._digest(head + values):
                return
            yield row, values

    def _give_up(self, error: OSError) -> None:
        self._warn(
            f"log-probs of the reference are not kept on disk, and the next attempt computes them "
            f"again: {error}"
        )
        self._folder = None


def open_reference_cache(
    context: JobContext, dataset: Dataset, *, folder: Path | None, warn: Callable[[str], None]
) -> ReferenceCache | None:
    """The cache of one file; None where the algorithm keeps no reference."""
    if not context.spec.algorithm.keeps_reference:
        return None
    # Nothing predicts a sequence's first token, so no batch trains it.
    sizes = [
        sum(int(example.trained[1:].sum()) for example in sequences_of(item))
        for item in dataset.examples
    ]
    return ReferenceCache(reference_key(context, dataset), sizes, folder=folder, warn=warn)


def reference_key(context: JobContext, dataset: Dataset) -> str:
    """A name for all that the log-probs depend on: the model as the job starts, and the rows."""
    model, spec = context.model, context.spec
    known = {
        "model": model.model_dump(exclude={"tokenizer"}),
        "weights": None if model.weights is None else _stamps(Path(model.weights)),
        "seed": spec.training.seed if model.kind == "random" else None,
        "resume": None if context.resume is None else context.resume.model_dump(),
        "precision": spec.precision.model_dump(),
        "rows": dataset.digest(),
    }
    text = json.dumps(known, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each file: other weights in the same place are another model."""
    found = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in found]
