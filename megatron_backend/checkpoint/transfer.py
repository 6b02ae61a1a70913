"""The process that copies checkpoints to and from a job's storage; see `remote`. Free of torch.

    python -m megatron_backend.checkpoint.transfer < REQUEST

REQUEST is one line of JSON: {"do": "list" | "upload" | "download", "url": ..., ...}. The answer on
stdout is JSON too, what was asked for or {"error": message}. Where the storage is and who may use
it comes from the environment, as botocore reads it (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...).

stdin stays open as long as the driver lives. When it ends so does this process: the next attempt
would delete, in the folder and in the storage, what this one is at.

A checkpoint in the storage is a prefix `step-XXXXXXXX/`, whole once its manifest is there: that is
uploaded last, and deleted first.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from megatron_backend.checkpoint import manifest as manifests
from megatron_backend.checkpoint.manifest import CorruptCheckpoint, Manifest, RefusedCheckpoint
from megatron_backend.checkpoint.retention import Retention
from service.spec import BestSpec
from service.spec.attempt import step_name, step_of
from service.spec.fence import read_fence


class Storage:
    """The checkpoints of one job in its storage.

    Args:
        url: `s3://BUCKET/PREFIX/JOB`.
    """

    def __init__(self, url: str) -> None:
        self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)

    def steps(self) -> list[int]:
        """Steps that have a manifest, rising."""
        manifests_there = self._files.glob(f"{self._root}/step-*/{manifests.NAME}")
        steps = (step_of(path.split("/")[-2]) for path in manifests_there)
        return sorted(step for step in steps if step is not None)

    def upload(self, folder: Path, check: Callable[[], None]) -> None:
        """Copies a published checkpoint, the manifest last; `check` raises where it may not."""
        target = f"{self._root}/{folder.name}"
        if self._files.exists(f"{target}/{manifests.NAME}"):
            there = self._files.cat_file(f"{target}/{manifests.NAME}")
            if there == (folder / manifests.NAME).read_bytes():
                return  # an attempt before this one has copied it
            self._delete(folder.name)  # the step was saved again
        names = manifests.file_names(folder)
        self._files.put(
            [str(folder / name) for name in names], [f"{target}/{name}" for name in names]
        )
        check()
        self._files.put_file(str(folder / manifests.NAME), f"{target}/{manifests.NAME}")

    def download(self, step: int, folder: Path) -> None:
        """Copies a checkpoint into an empty folder, the manifest last."""
        source = f"{self._root}/{step_name(step)}"
        found = [path.removeprefix(f"{source}/") for path in self._files.find(source)]
        for name in sorted(found, key=lambda name: name == manifests.NAME):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(f"{source}/{name}", str(folder / name))

    def retire(self, retention: Retention, *, newest: int) -> None:
        """Deletes the checkpoints that need not stay, and what failed uploads left behind.

        Those after `newest` are damaged, or the job would have gone on from them; they neither go
        nor count, as in the folder.
        """
        scores = {step: self._score(step) for step in self.steps() if step <= newest}
        kept = retention.kept(scores)
        for path in self._files.ls(self._root, detail=False):
            name = path.rsplit("/", 1)[-1]
            step = step_of(name)
            if step is not None and step <= newest and step not in kept:
                self._delete(name)

    def _score(self, step: int) -> float | None:
        text = self._files.cat_file(f"{self._root}/{step_name(step)}/{manifests.NAME}").decode()
        try:
            return Manifest.from_json(text).score
        except (CorruptCheckpoint, RefusedCheckpoint):
            return None

    def _delete(self, name: str) -> None:
        if self._files.exists(f"{self._root}/{name}/{manifests.NAME}"):
            self._files.rm_file(f"{self._root}/{name}/{manifests.NAME}")
        self._files.rm(f"{self._root}/{name}", recursive=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    storage = Storage(request["url"])
    match request["do"]:
        case "list":
            return {"steps": storage.steps()}
        case "download":
            storage.download(request["step"], Path(request["folder"]))
            return {}
        case "upload":

            def check() -> None:
                newest = read_fence(Path(request["job_dir"]))
                if newest > request["attempt"]:
                    raise PermissionError(f"attempt {newest} of this job has taken over")

            best, folder = request["best"], Path(request["folder"])
            check()
            storage.upload(folder, check)
            check()
            storage.retire(
                Retention(
                    last=request["last"],
                    every=request["every"],
                    best=None if best is None else BestSpec.model_validate(best),
                ),
                newest=manifests.read(folder).step,
            )
            return {}
        case unknown:
            raise ValueError(f"nothing is known about {unknown!r}")


def main() -> None:
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_driver, daemon=True).start()
    try:
        answer = _answer(request)
    except Exception as error:  # whatever a driver of a storage raises: it goes to the caller
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # threads of the storage's driver are not waited for


def _end_with_driver() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
