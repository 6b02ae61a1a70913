"""The golden values on disk: how they are written, read and compared.

One file a package. Numbers have nine digits, keys are sorted, and each batch of a case is a line,
so that a change shows what changed. Only numpy is needed here.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.batches import BATCHES, Inputs

FOLDER = Path(__file__).parent / "golden"

type Golden = dict[str, Any]
"""`versions` by package, `inputs` (a digest of each batch), and `cases`: name to what it is `of`
and its values by batch."""


def digest(inputs: Inputs) -> float:
    """A number that changes where any number of a batch does."""
    total = 0.0
    for name in inputs.__slots__:
        value = getattr(inputs, name)
        if isinstance(value, np.ndarray):
            flat = value.astype(np.float64).ravel()
            total += float(flat @ np.cos(np.arange(len(flat)) + len(name)))
    return _rounded(total)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them, with nine digits."""
    return {
        name: _rows(value.tolist()) if isinstance(value, np.ndarray) else _rounded(value)
        for name, value in values.items()
    }


def read(package: str) -> Golden:
    """The file of one package."""
    golden: Golden = json.loads((FOLDER / f"{package}.json").read_text())
    return golden


def packages() -> list[str]:
    """Those that have a file."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def write(package: str, golden: Golden) -> None:
    """Writes one package's file."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{package}.json").write_text(_text(golden))


def differences(old: Golden, new: Golden) -> Iterator[str]:
    """What stands in one and not in the other, in words."""
    for part in ("versions", "inputs"):
        if old[part] != new[part]:
            yield f"{part}: {old[part]} is written, {new[part]} is here"
    for case in sorted(old["cases"].keys() ^ new["cases"].keys()):
        yield f"{case}: {'is no more' if case in old['cases'] else 'is not written'}"
    for case in sorted(old["cases"].keys() & new["cases"].keys()):
        before, now = old["cases"][case], new["cases"][case]
        if before["of"] != now["of"]:
            yield f"{case}: {before['of']} is written, {now['of']} is here"
        bound = 2e-6 if now["of"]["float32"] else 1e-8
        for batch in sorted(before["batches"].keys() | now["batches"].keys()):
            apart = distance(before["batches"].get(batch), now["batches"].get(batch))
            if apart > bound:
                yield f"{case} on {batch}: {apart:.3g} apart"


def distance(one: Any, other: Any) -> float:
    """The largest |a - b| / max(1, |a|) in two values of one shape; infinite where it is not."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((distance(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max((distance(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) / max(1.0, abs(one))
    return math.inf


def _text(golden: Golden) -> str:
    lines = [
        "{",
        f'"versions": {_line(golden["versions"])},',
        f'"inputs": {_line(golden["inputs"])},',
    ]
    lines.append('"cases": {')
    for number, (case, entry) in enumerate(sorted(golden["cases"].items())):
        lines.append(f'{_line(case)}: {{"of": {_line(entry["of"])}, "batches": {{')
        batches = [f"{_line(name)}: {_line(entry['batches'][name])}" for name in entry["batches"]]
        lines.append(",\n".join(batches))
        lines.append("}}" + ("," if number + 1 < len(golden["cases"]) else ""))
    return "\n".join([*lines, "}", "}", ""])


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _rows(value: Any) -> Any:
    return [_rows(part) for part in value] if isinstance(value, list) else _rounded(value)


def _rounded(value: float) -> float | int:
    number = float(f"{value:.9g}")
    return int(number) if number.is_integer() and abs(number) < 1e6 else number


DIGESTS = {name: digest(inputs) for name, inputs in BATCHES.items()}
