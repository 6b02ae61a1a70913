"""Run once where the worker's image is built: does the base have a torch that Planish can use?

NVIDIA's torch is a build of its own (2.14.0a0+b2c75dd062.nv26.09), so no pin of ours can name it;
what is compared is major and minor version. Nothing here needs a GPU.
"""

import sys
from importlib.metadata import requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.version import Version


def faults() -> list[str]:
    """What is wrong with this environment, in words."""
    (wanted,) = [
        one.specifier
        for one in map(Requirement, requires("planish") or [])
        if one.name == "torch" and not (one.marker and "extra" in str(one.marker))
    ]
    pinned = Version(next(iter(wanted)).version)
    found = Version(version("torch"))
    wrong = []
    if found.release[:2] != pinned.release[:2]:
        wrong.append(f"Planish is made for torch {pinned}; the base image has {found}")
    if find_spec("transformer_engine") is None:
        wrong.append("the base image has no Transformer Engine")
    # Imported last: it takes long, and without torch it only says so again.
    if not wrong:
        import torch

        import megatron_backend.__main__

        assert megatron_backend.__main__ is not None
        if torch.version.cuda is None:
            wrong.append("the base image's torch is built without CUDA")
    return wrong


def main() -> int:
    """Prints what is wrong; the exit code stops the build."""
    wrong = faults()
    for fault in wrong:
        sys.stderr.write(f"worker image: {fault}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
