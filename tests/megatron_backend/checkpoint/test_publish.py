"""The publish protocol: what can be seen is whole (D01), whatever happens and whenever."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_backend.checkpoint import manifest as manifests
from megatron_backend.checkpoint.fence import Fence, StaleAttempt
from megatron_backend.checkpoint.hashed_file import FileEntry
from megatron_backend.checkpoint.manifest import (
    CorruptCheckpoint,
    ForeignCheckpoint,
    UnsupportedCheckpoint,
)
from megatron_backend.checkpoint.publish import CheckpointStore, Owner
from megatron_backend.checkpoint.retention import Retention
from service.spec import BestSpec
from service.spec.attempt import step_name
from service.spec.layout import Layout

LAYOUT = Layout(tp=2)
OWNER = Owner(job="job-1", model=manifests.model_digest({"hidden_size": 8}))


def open_store(job_dir: Path, attempt: int = 1, owner: Owner = OWNER) -> CheckpointStore:
    fence = Fence(job_dir, attempt)
    fence.take()
    store = CheckpointStore(job_dir, fence, owner)
    store.open()
    return store


def fill(folder: Path, text: str) -> None:
    (folder / "state").mkdir()
    for rank in range(2):
        (folder / "state" / f"__{rank}_0.distcp").write_text(f"{text} of rank {rank}\n" * 100)
    (folder / "loop_state.json").write_text(json.dumps({"text": text}))


def publish(
    store: CheckpointStore,
    step: int,
    *,
    text: str = "",
    keep_last: int = 2,
    retention: Retention | None = None,
    score: float | None = None,
) -> None:
    staged = store.stage(step)
    fill(staged, text or f"step {step}")
    store.publish(
        staged,
        step=step,
        layout=LAYOUT,
        files={},
        retention=retention or Retention(last=keep_last),
        score=score,
    )


def no_warning(message: str) -> None:
    pytest.fail(f"unexpected warning: {message}")


def text_of(folder: Path) -> str:
    return json.loads((folder / "loop_state.json").read_text())["text"]


def test_publish_then_retention(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for step in (10, 20, 30):
        publish(store, step)
    assert store.steps() == [20, 30]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000030\n"
    newest = store.newest(no_warning)
    assert newest is not None
    assert (newest.manifest.step, newest.manifest.attempt) == (30, 1)
    assert newest.manifest.layout == LAYOUT
    assert newest.manifest.files.keys() == {
        "loop_state.json",
        "state/__0_0.distcp",
        "state/__1_0.distcp",
    }
    assert newest.manifest.bytes == sum(
        (newest.path / name).stat().st_size for name in newest.manifest.files
    )
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "latest",
        "step-00000020",
        "step-00000030",
    ]


def test_nothing_saved_yet(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.newest(no_warning) is None


def test_step_is_saved_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, 10)
    publish(store, 20, text="first")
    publish(store, 20, text="second")
    newest = store.newest(no_warning)
    assert newest is not None
    assert text_of(newest.path) == "second"
    assert store.steps() == [10, 20]


def test_stale_attempt_publishes_nothing(tmp_path: Path) -> None:
    old = open_store(tmp_path, attempt=1)
    publish(old, 10)
    staged = old.stage(20)
    fill(staged, "late")
    new = open_store(tmp_path, attempt=2)
    staged_again = old.stage(20)  # the sweep of attempt 2 took the first away
    assert not staged.exists()
    fill(staged_again, "late")
    with pytest.raises(StaleAttempt, match="attempt 2"):
        old.publish(staged_again, step=20, layout=LAYOUT, files={}, retention=Retention())
    assert new.steps() == [10]
    with pytest.raises(StaleAttempt):
        Fence(tmp_path, 1).take()
    assert (tmp_path / "fence").read_text() == "2\n"


def test_fence_file_that_holds_no_number(tmp_path: Path) -> None:
    (tmp_path / "fence").write_text("two\n")
    with pytest.raises(ValueError, match="must hold an attempt's number"):
        Fence(tmp_path, 3).take()


def test_taking_the_fence_waits_for_a_publish(tmp_path: Path) -> None:
    # Attempt 1 is in the middle of its publish, and stays there for half a second.
    script = (
        "import sys, time; from pathlib import Path\n"
        "from megatron_backend.checkpoint.fence import Fence\n"
        "fence = Fence(Path(sys.argv[1]), 1); fence.take()\n"
        "with fence.held():\n"
        "    print('held', flush=True); time.sleep(0.5); Path(sys.argv[1], 'done').touch()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        Fence(tmp_path, 2).take()
        assert (tmp_path / "done").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damaged_newest_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    publish(store, 10)
    publish(store, 20)
    shard = tmp_path / "checkpoints" / step_name(20) / "state" / "__1_0.distcp"
    match damage:
        case "flip":
            shard.write_bytes(b"S" + shard.read_bytes()[1:])
        case "cut":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "remove":
            shard.unlink()
        case "manifest":
            (shard.parents[1] / manifests.NAME).write_text('{"format": 2}')
    store = open_store(tmp_path, attempt=2)
    warnings: list[str] = []
    newest = store.newest(warnings.append)
    assert newest is not None
    assert newest.manifest.step == 10
    assert len(warnings) == 1
    assert "step-00000020 is damaged" in warnings[0]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000010\n"
    publish(store, 20, text="again")
    assert store.steps() == [10, 20]
    assert store.newest(no_warning) is not None


def test_every_checkpoint_damaged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    publish(store, 10)
    (tmp_path / "checkpoints" / step_name(10) / manifests.NAME).unlink()
    warnings: list[str] = []
    assert store.newest(warnings.append) is None
    assert len(warnings) == 1
    assert not (tmp_path / "checkpoints" / "latest").exists()


def test_unreadable_storage_condemns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    publish(store, 10)

    def fail(folder: Path) -> manifests.Manifest:
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(manifests, "verify", fail)
    with pytest.raises(OSError, match="Input/output"):
        store.newest(no_warning)
    monkeypatch.undo()
    assert store.newest(no_warning) is not None


def test_a_damaged_one_stays_as_evidence(tmp_path: Path) -> None:
    for attempt in range(1, 5):
        store = open_store(tmp_path, attempt)
        publish(store, 10 * attempt)
        (tmp_path / "checkpoints" / step_name(10 * attempt) / "loop_state.json").unlink()
        assert store.newest([].append) is None
    store = open_store(tmp_path, 5)
    publish(store, 50)
    kept = [path.name for path in (tmp_path / "checkpoints").glob(".corrupt-*")]
    assert sorted(name.split("-")[2] for name in kept) == ["00000030", "00000040"]


@pytest.mark.parametrize("change", [{"format": 3}, {"format": 1}, {"colour": "red"}])
def test_a_checkpoint_of_another_release_is_refused_and_keeps_its_name(
    tmp_path: Path, change: dict[str, object]
) -> None:
    store = open_store(tmp_path)
    publish(store, 10)
    publish(store, 20)
    path = tmp_path / "checkpoints" / step_name(20) / manifests.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = sorted(os.listdir(tmp_path / "checkpoints"))
    with pytest.raises(
        UnsupportedCheckpoint, match=r"step-00000020 was written by another release"
    ):
        open_store(tmp_path, 2).newest(no_warning)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == before
    # One that is not the newest is not ours to delete either.
    store = open_store(tmp_path, 3)
    for step in (30, 40, 50):
        publish(store, step, keep_last=1)
    assert store.steps() == [20, 50]


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (Owner(job="job-2", model=OWNER.model), "is of the job job-1, and this is job-2"),
        (Owner(job="job-1", model="another"), "is of another model"),
    ],
)
def test_a_foreign_checkpoint_is_refused_and_keeps_its_name(
    tmp_path: Path, owner: Owner, message: str
) -> None:
    publish(open_store(tmp_path), 10)
    store = open_store(tmp_path, 2, owner)
    with pytest.raises(ForeignCheckpoint, match=message):
        store.newest(no_warning)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000010"]
    if owner.model == OWNER.model:  # what `resume` names is of another job, and known to be
        manifest = store.verify(tmp_path / "checkpoints" / step_name(10), job="job-1")
        assert manifest.step == 10


def test_files_of_the_ranks_are_compared_with_what_they_said(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    name = "state/__0_0.distcp"
    for entry in (FileEntry(size=1, sha256="0" * 64), None):
        staged = store.stage(10)
        fill(staged, "x")
        files = {name: entry} if entry else {"state/__7_0.distcp": FileEntry(size=1, sha256="")}
        with pytest.raises(CorruptCheckpoint, match="has .* bytes" if entry else "lacks"):
            store.publish(staged, step=10, layout=LAYOUT, files=files, retention=Retention())
    assert store.steps() == []


def test_d16_the_best_is_remembered_over_a_resume(tmp_path: Path) -> None:
    retention = Retention(last=1, best=BestSpec(metric="accuracy"))
    publish(open_store(tmp_path), 10, retention=retention, score=0.8)
    store = open_store(tmp_path, attempt=2)
    publish(store, 20, retention=retention, score=0.5)
    assert store.steps() == [10, 20]  # the best, and the newest to resume from
    publish(store, 30, retention=retention, score=0.8)
    assert store.steps() == [30]  # of equal ones the newest
    publish(store, 40, retention=retention)
    assert store.steps() == [30, 40]  # one without the number is never the best
    newest = open_store(tmp_path, attempt=3).newest(no_warning)
    assert newest is not None
    assert newest.manifest.step == 40


# Each system call that changes the disk is a place to be killed at. The child below counts them
# and sends itself SIGKILL in front of the n-th; the parent does this for every n.
KILLED_SAVE = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_publish import open_store, publish

def killing(call, counter):
    def wrapped(*args, **kwargs):
        counter[0] -= 1
        if counter[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped

for kill_at in range(1, 1000):
    job_dir = Path(sys.argv[2], str(kill_at))
    job_dir.mkdir()
    child = os.fork()
    if child == 0:
        store = open_store(job_dir)
        publish(store, 10, keep_last=1)
        counter = [kill_at]
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open", "write"):
            setattr(os, name, killing(getattr(os, name), counter))
        publish(store, int(sys.argv[3]), text="new", keep_last=1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
print(kill_at)
"""


@pytest.mark.parametrize("step", [20, 10], ids=["next step", "same step again"])
def test_kill_9_at_every_system_call(tmp_path: Path, step: int) -> None:
    """D01, with keep_last 1: the previous checkpoint goes only after the new one is there."""
    run = subprocess.run(
        [sys.executable, "-c", KILLED_SAVE, str(Path(__file__).parent), str(tmp_path), str(step)],
        capture_output=True,
        text=True,
        check=True,
    )
    tries = int(run.stdout)
    assert tries > 20
    seen = set()
    for kill_at in range(1, tries + 1):
        job_dir = tmp_path / str(kill_at)
        latest = job_dir / "checkpoints" / "latest"
        if step != 10:  # before anything is repaired, `latest` names a whole checkpoint
            manifests.verify(latest.parent / latest.read_text().strip())
        newest = open_store(job_dir, attempt=2).newest(no_warning)
        assert newest is not None
        manifests.verify(newest.path)
        assert latest.read_text().strip() == newest.path.name
        assert text_of(newest.path) in {"new", "step 10"}
        seen.add(text_of(newest.path))
        leftovers = {p.name for p in latest.parent.iterdir() if not p.name.startswith("step-")}
        assert leftovers == {"latest"}
    assert seen == {"new", "step 10"}  # some were killed before the rename, some after


def test_kill_9_while_a_rank_writes(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_publish import open_store, publish\n"
        "store = open_store(Path(sys.argv[2])); publish(store, 10); staged = store.stage(20)\n"
        "file = open(staged / '__0_0.distcp', 'wb')\n"
        "print('writing', flush=True)\n"
        "while True: file.write(b'x' * 100_000); file.flush(); time.sleep(0.01)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGKILL)
    store = open_store(tmp_path, attempt=2)
    newest = store.newest(no_warning)
    assert newest is not None
    assert newest.manifest.step == 10
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
