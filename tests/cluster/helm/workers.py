"""Worker pods that run the tests' own Python as the control plane's user.

The interpreter and the project are volumes at the paths that they have here, as in
tests/cluster/sites/kuberay.py; but there the pods are root. Where the interpreter lies below a
folder that only root may enter (a pyenv in root's home), that folder is replaced in the pods by one
that holds a copy of the interpreter.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.cluster.sites.kuberay import cluster_for

_NOT_HERE = {"type", "kubeconfig", "namespace", "run_as_user", "queue", "volumes"}
"""What of the site's options the chart knows itself, and the volumes, which are others here."""


def options(folder: Path, kubeconfig: Path) -> dict[str, Any]:
    """A kuberay cluster for the chart's values.

    Args:
        folder: where the copy of an interpreter may be put.
        kubeconfig: only for the making of the options.
    """
    site = cluster_for(folder, "unused", kubeconfig=kubeconfig, python=Path(sys.executable))
    made = site.model_dump(mode="json", exclude_unset=True, exclude=_NOT_HERE)
    # Enough not to starve beside the control plane on two busy cores.
    return {"type": "kuberay", **made, "request_cpus": 0.5, "volumes": _code(folder)}


def _code(folder: Path) -> list[dict[str, Any]]:
    tree = Path(__file__).parents[3]
    mounts = {tree: tree}
    if not Path(sys.prefix).is_relative_to(tree):
        mounts[Path(sys.prefix)] = Path(sys.prefix)
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    mounts |= {Path(path): Path(path) for path in more}
    base = Path(sys.base_prefix)
    if not base.is_relative_to("/usr"):
        inside, outside = _readable(base, folder)
        mounts[inside] = outside
    return [
        {
            "name": f"code-{number}",
            "mount_path": str(inside),
            "host_path": str(outside),
            "read_only": True,
        }
        for number, (inside, outside) in enumerate(mounts.items())
    ]


def _readable(base: Path, folder: Path) -> tuple[Path, Path]:
    """Where to mount what, so that any user finds the interpreter at its own path."""
    closed = [parent for parent in reversed(base.parents) if not parent.stat().st_mode & 0o001]
    if not closed:
        return base, base
    copy = folder / "interpreter"
    target = copy / base.relative_to(closed[0])
    if not target.exists():
        target.parent.mkdir(parents=True)
        shutil.copytree(base, target, symlinks=True, copy_function=_link_or_copy)
    return closed[0], copy


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system
        shutil.copy2(source, target, follow_symlinks=False)
    return target
