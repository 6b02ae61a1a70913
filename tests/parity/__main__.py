"""`python -m tests.parity`: what other packages compute, against what is written in golden/.

It runs in `.venv-parity`; see scripts/parity.sh. `--write` writes the values anew.
"""

import argparse
import logging
import sys
import time
import warnings
from importlib import import_module
from importlib.metadata import version

from tests.parity.batches import BATCHES
from tests.parity.golden_files import DIGESTS, FOLDER, Golden, differences, plain, read, write

MODULES = (
    "liger",
    "openrlhf_advantages",
    "openrlhf_losses",
    "trl_offline",
    "trl_online",
    "verl_advantages",
    "verl_losses",
)
_SHOWN = 20


def main() -> int:
    """1 where a package computes something else than what is written."""
    parser = argparse.ArgumentParser(prog="make parity", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the values anew")
    arguments = parser.parse_args()
    began = time.perf_counter()
    computed = _computed()
    count = sum(len(c["batches"]) for golden in computed.values() for c in golden["cases"].values())
    failed = False
    for package, golden in computed.items():
        if arguments.write:
            write(package, golden)
            continue
        if not (FOLDER / f"{package}.json").exists():
            found = ["nothing is written"]
        else:
            found = list(differences(read(package), golden))
        for line in found[:_SHOWN]:
            _say(f"{package}: {line}")
        if len(found) > _SHOWN:
            _say(f"{package}: and {len(found) - _SHOWN} more")
        failed |= bool(found)
    if failed:
        _say("the packages do not agree with tests/parity/golden: find out why, then --write")
    did = "written" if arguments.write else "compared"
    _say(f"{count} values of {len(computed)} packages {did} in {time.perf_counter() - began:.0f} s")
    return int(failed)


def _computed() -> dict[str, Golden]:
    """By package."""
    made: dict[str, Golden] = {}
    for module in MODULES:
        for reference in import_module(f"tests.parity.references.{module}").REFERENCES:
            versions = {name: version(name) for name in (reference.package, "numpy", "torch")}
            empty = {"versions": versions, "inputs": DIGESTS, "cases": {}}
            cases = made.setdefault(reference.package, empty)["cases"]
            assert reference.case not in cases, f"{reference.package} has {reference.case} twice"
            cases[reference.case] = {
                "of": {
                    "function": reference.function,
                    "settings": dict(reference.settings),
                    "float32": reference.float32,
                    "differs": dict(reference.differs),
                },
                "batches": {
                    name: plain(reference.compute(BATCHES[name])) for name in reference.batches
                },
            }
    return made


def _say(line: str) -> None:
    sys.stderr.write(f"parity: {line}\n")


if __name__ == "__main__":
    # The packages tell of accelerators that are not there and of what they will change.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
