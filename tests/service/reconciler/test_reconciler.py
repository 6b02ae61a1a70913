import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy.exc
from sqlalchemy import update

from service.jobs import Job, JobFolder, JobState
from service.launchers import LauncherUnavailable, Observation
from service.launchers.local import LocalLauncher
from service.reconciler import Reconciler, Timing
from service.spec import JobContext, Reason, WorkerEvent
from service.store import StaleAttempt, Store, tables
from tests.service.reconciler.services import (
    DRIVER,
    moves,
    starts,
    wait_for_state,
    worker_events,
)
from tests.waiting import wait_until

Submit = Callable[..., Job]
Serve = Callable[..., Reconciler]
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[Job], JobFolder]:
    return lambda job: JobFolder(tmp_path / "jobs" / job.id)


FolderOf = Callable[[Job], JobFolder]


def test_a_job_runs_to_its_end(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit()
    serve("events=3", "succeed")
    wait_for_state(store, job, JobState.SUCCEEDED)
    assert moves(store, job) == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    assert worker_events(store, job) == [(1, 1), (1, 2), (1, 3)]
    folder = folder_of(job)
    assert starts(folder.path) == ["1"]
    assert folder.fence() == 1
    assert (folder.path / "endpoint").read_text() == "http://127.0.0.1:1\n"
    text = (folder.path / "context.json").read_text()
    assert JobContext.model_validate_json(text) == job.context()
    (attempt,) = store.attempts.of_job(job.id)
    assert (attempt.exit_code, attempt.reason, attempt.last_seq) == (0, None, 3)


def test_the_token_on_disk_opens_the_attempt_until_it_ends(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit()
    serve("wait", "succeed")
    wait_for_state(store, job, JobState.RUNNING)
    token = folder_of(job).attempt(1).make_token()
    event = WorkerEvent(seq=1, time=0.0, kind="started")
    assert store.events.ingest(job.id, 1, token, [event]).last_seq == 1
    (folder_of(job).path / "go").touch()
    wait_for_state(store, job, JobState.SUCCEEDED)
    with pytest.raises(StaleAttempt):
        store.events.ingest(job.id, 1, token, [event])


def test_a_lost_driver_is_followed_by_another(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit()
    serve("events=2", "die-first", "succeed")
    wait_for_state(store, job, JobState.SUCCEEDED)
    assert moves(store, job) == [
        *("QUEUED", "STARTING", "RUNNING", "RECOVERING"),
        *("STARTING", "RUNNING", "SUCCEEDED"),
    ]
    first, second = store.attempts.of_job(job.id)
    assert (first.reason, first.exit_signal, second.reason) == (Reason.WORKER_LOST, 9, None)
    assert starts(folder_of(job).path) == ["1", "2"]
    assert worker_events(store, job) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert folder_of(job).fence() == 2


def test_retries_end_with_their_budget(store: Store, submit: Submit, serve: Serve) -> None:
    lost = submit(retry={"infrastructure": 2, "user_error": 0})
    serve("exit=4")
    failed = wait_for_state(store, lost, *ENDED)
    assert (failed.state, failed.reason) == (JobState.FAILED, Reason.WORKER_LOST)
    assert "code 4" in failed.message
    assert "last words" in failed.message
    assert len(store.attempts.of_job(lost.id)) == 3


def test_a_job_that_gets_on_does_not_use_up_its_retries(
    store: Store, submit: Submit, serve: Serve
) -> None:
    job = submit(retry={"infrastructure": 1, "user_error": 0})
    serve("checkpoint-until=3", "die")
    failed = wait_for_state(store, job, *ENDED)
    assert failed.state is JobState.FAILED
    # Three got further than any before; the fourth failed at the place of the third.
    assert len(store.attempts.of_job(job.id)) == 4


def test_g21_an_error_of_the_job_is_not_tried_again(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit()
    serve("fail=NAN_LOSS")
    failed = wait_for_state(store, job, *ENDED)
    assert (failed.state, failed.reason) == (JobState.FAILED, Reason.NAN_LOSS)
    assert failed.message == "it went wrong"
    assert starts(folder_of(job).path) == ["1"]


def test_a_job_waits_between_its_attempts(store: Store, submit: Submit, serve: Serve) -> None:
    job = submit(retry={"infrastructure": 1, "user_error": 0})
    serve("die", retry_base=0.5)
    wait_for_state(store, job, JobState.FAILED)
    first, second = store.attempts.of_job(job.id)
    assert first.ended_at is not None
    assert second.created_at - first.ended_at >= 0.45


def test_g31_a_cancelled_job_is_gone_and_its_neighbour_runs_on(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job, neighbour = submit(), submit()
    serve("children", "wait", "succeed")
    for one in (job, neighbour):
        wait_until((folder_of(one).path / "children").exists, "a driver has children")
    store.jobs.cancel(job.id)
    cancelled = wait_for_state(store, job, *ENDED)
    assert (cancelled.state, cancelled.reason) == (JobState.CANCELLED, Reason.CANCELLED)
    assert moves(store, job)[-2:] == ["CANCELLING", "CANCELLED"]
    (attempt,) = store.attempts.of_job(job.id)
    assert (attempt.reason, attempt.stop_reason) == (Reason.CANCELLED, Reason.CANCELLED)
    assert attempt.exit_signal == 15
    for pid in (folder_of(job).path / "children").read_text().split():
        wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), f"child {pid} is gone")
    assert store.jobs.get(neighbour.id).state is JobState.RUNNING
    for pid in (folder_of(neighbour).path / "children").read_text().split():
        os.kill(int(pid), 0)
    (folder_of(neighbour).path / "go").touch()
    wait_for_state(store, neighbour, JobState.SUCCEEDED)


def test_a_driver_that_ignores_the_request_is_killed(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit()
    serve("ignore-term", "events=1", "wait", grace=0.3)
    wait_for_state(store, job, JobState.RUNNING)
    written = folder_of(job).attempt(1).events_path  # after the driver began to ignore
    wait_until(written.exists, "the driver comes so far")
    store.jobs.cancel(job.id)
    wait_for_state(store, job, JobState.CANCELLED)
    (attempt,) = store.attempts.of_job(job.id)
    assert attempt.exit_signal == 9


def test_jobs_without_a_process_are_cancelled_at_once(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    running, queued, pending = submit(), submit(), submit()
    store.jobs.cancel(pending.id)
    serve("wait", "succeed", capacity=1)
    wait_for_state(store, running, JobState.RUNNING)
    wait_for_state(store, pending, JobState.CANCELLED)
    wait_for_state(store, queued, JobState.QUEUED)
    store.jobs.cancel(queued.id)
    wait_for_state(store, queued, JobState.CANCELLED)
    (folder_of(running).path / "go").touch()
    wait_for_state(store, running, JobState.SUCCEEDED)
    for job in (queued, pending):
        assert store.attempts.of_job(job.id) == []
        assert starts(folder_of(job).path) == []


def test_jobs_above_the_capacity_wait_in_their_order(
    store: Store, submit: Submit, serve: Serve
) -> None:
    jobs = [submit() for _ in range(4)]
    serve("succeed", capacity=1)
    for job in jobs:
        wait_for_state(store, job, JobState.SUCCEEDED)
    attempts = [store.attempts.get(job.id, 1) for job in jobs]
    for before, after in pairwise(attempts):
        assert before.ended_at is not None
        assert before.ended_at <= after.created_at


def test_an_attempt_is_stopped_when_its_time_is_over(
    store: Store, submit: Submit, serve: Serve
) -> None:
    job = submit(resources={"time_limit_minutes": 1})
    serve("wait")
    wait_for_state(store, job, JobState.RUNNING)
    with store.database.writing() as connection:
        connection.execute(update(tables.attempts).values(started_at=time.time() - 61))
    failed = wait_for_state(store, job, *ENDED)
    assert (failed.state, failed.reason) == (JobState.FAILED, Reason.TIMEOUT)
    assert "time_limit_minutes" in failed.message


def test_a_driver_that_hangs_after_its_last_word_is_ended(
    store: Store, submit: Submit, serve: Serve
) -> None:
    job = submit()
    serve("succeed", "wait", grace=0.2)
    wait_for_state(store, job, JobState.SUCCEEDED)
    (attempt,) = store.attempts.of_job(job.id)
    assert attempt.exit_signal == 9


def test_what_a_driver_left_behind_is_gone_before_the_next_attempt(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit(retry={"infrastructure": 1, "user_error": 0})
    serve("children", "die-first", "succeed")
    wait_for_state(store, job, JobState.SUCCEEDED)
    first, second = store.attempts.of_job(job.id)
    assert first.ended_at is not None
    assert first.ended_at <= second.created_at
    for pid in (folder_of(job).path / "children").read_text().split()[:2]:
        wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), f"child {pid} is gone")


def test_an_attempt_that_can_not_start_says_why(
    store: Store, submit: Submit, tmp_path: Path
) -> None:
    job = submit(retry={"infrastructure": 1, "user_error": 0})
    launcher = LocalLauncher(tmp_path / "jobs", command=["/nowhere/driver"])
    reconciler = Reconciler(
        store,
        {"local": launcher},
        tmp_path / "jobs",
        "http://127.0.0.1:1",
        timing=Timing(retry_base=0.01),
    )
    wait_until(lambda: reconciler.sweep() and store.jobs.get(job.id).state.terminal, "it goes on")
    failed = store.jobs.get(job.id)
    assert (failed.state, failed.reason) == (JobState.FAILED, Reason.LAUNCH_FAILED)
    assert "/nowhere/driver" in failed.message
    assert len(store.attempts.of_job(job.id)) == 2


def test_a_job_for_a_launcher_that_is_not_there_fails(
    store: Store, submit: Submit, serve: Serve
) -> None:
    job = submit(resources={"cluster": "moon"})
    serve("succeed")
    failed = wait_for_state(store, job, *ENDED)
    assert failed.reason is Reason.LAUNCH_FAILED
    assert "'moon'" in failed.message


def test_a_job_that_can_not_be_read_does_not_hold_up_the_others(
    store: Store, submit: Submit, serve: Serve
) -> None:
    broken = submit()
    with store.database.writing() as connection:
        connection.execute(update(tables.jobs).values(resolved={"from": "the future"}))
    job = submit()
    serve("succeed")
    wait_for_state(store, job, JobState.SUCCEEDED)
    failed = wait_for_state(store, broken, *ENDED)
    assert failed.reason is Reason.LAUNCH_FAILED
    assert "cannot read" in failed.message


def test_g17_a_job_that_has_ended_stays_so_after_a_restart(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit()
    first = serve("events=1", "succeed")
    wait_for_state(store, job, JobState.SUCCEEDED)
    first.stop()
    ended = store.jobs.get(job.id)
    outcome = folder_of(job).attempt(1).outcome_path
    outcome.write_text(json.dumps({"attempt": 1, "status": "failed", "reason": "NAN_LOSS"}))
    store.jobs.cancel(job.id)
    second = serve("succeed")
    marker = submit()
    wait_for_state(store, marker, JobState.SUCCEEDED)
    second.stop()
    assert store.jobs.get(job.id) == ended
    assert starts(folder_of(job).path) == ["1"]


def test_a_restarted_service_goes_on_with_a_running_job(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit()
    first = serve("events=2", "wait", "succeed")
    wait_for_state(store, job, JobState.RUNNING)
    first.stop()
    assert not first.alive
    (folder_of(job).path / "endpoint").write_text("http://gone\n")
    second = serve()
    wait_until(
        lambda: (folder_of(job).path / "endpoint").read_text() == "http://127.0.0.1:1\n",
        "the driver is told where the service is",
    )
    assert second.alive
    (folder_of(job).path / "go").touch()
    wait_for_state(store, job, JobState.SUCCEEDED)
    wait_until(lambda: second.got_on_at is not None, "the visit ends")
    assert starts(folder_of(job).path) == ["1"]
    assert worker_events(store, job) == [(1, 1), (1, 2)]
    (attempt,) = store.attempts.of_job(job.id)
    assert attempt.exit_code is None  # it was the first service's child


def test_an_outcome_that_can_not_be_read_counts_as_none(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    job = submit(retry={"infrastructure": 0, "user_error": 0})
    serve("wait", "exit=0")
    wait_for_state(store, job, JobState.RUNNING)
    folder_of(job).attempt(1).outcome_path.write_text('{"attempt": 1, "sta')
    (folder_of(job).path / "go").touch()
    failed = wait_for_state(store, job, *ENDED)
    assert failed.reason is Reason.WORKER_LOST
    assert "left no outcome" in failed.message


class FlappingLauncher(LocalLauncher):
    """Does not answer every third poll, as a cluster's controller does at times."""

    polls = 0

    def poll(self, launcher_id: str) -> Observation:
        self.polls += 1
        if self.polls % 3 == 1:
            raise LauncherUnavailable("the controller does not answer")
        return super().poll(launcher_id)


def test_g13_a_launcher_that_does_not_answer_changes_no_state(
    store: Store, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reconciler.reconciler._AFTER_FAULT_SECONDS", 0.01)
    job = submit()
    launcher = FlappingLauncher(tmp_path / "jobs", command=["/bin/true"], poll_seconds=0.0)
    reconciler = Reconciler(store, {"local": launcher}, tmp_path / "jobs", "http://x")
    attempt = tmp_path / "jobs" / job.id / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "outcome.json").write_text('{"attempt": 1, "status": "succeeded"}')

    def ended() -> bool:
        reconciler.sweep()
        return store.jobs.get(job.id).state.terminal

    wait_until(ended, "it ends")
    assert moves(store, job) == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    assert launcher.polls >= 4


class SilentLauncher(LocalLauncher):
    """Keeps everybody waiting, and then does not answer."""

    calls = 0

    def poll(self, launcher_id: str) -> Observation:
        self.calls += 1
        time.sleep(1.0)  # and it is left alone for as long
        raise LauncherUnavailable(f"nothing is heard of {launcher_id}")


def test_a_cluster_that_is_silent_is_asked_once_for_all_its_jobs(
    store: Store, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reconciler.reconciler._AFTER_FAULT_SECONDS", 0.1)
    jobs = [submit() for _ in range(4)]
    launcher = SilentLauncher(tmp_path / "jobs", command=["/bin/true"], capacity=None)
    reconciler = Reconciler(store, {"local": launcher}, tmp_path / "jobs", "http://x")
    for job in jobs:
        claim = store.claims.take(job.id, lease_seconds=60)
        assert claim is not None
        store.jobs.queue(claim)
        store.attempts.open(claim, launcher="local", launcher_id=f"{job.id}/1", capacity=None)
        store.claims.release(claim)
    reconciler.sweep()
    assert launcher.calls == 1

    def asked_again() -> bool:
        reconciler.sweep()
        return launcher.calls > 1

    wait_until(asked_again, "it is asked again")
    assert launcher.calls == 2


def test_a_job_that_cannot_be_looked_at_holds_up_no_other(
    store: Store, submit: Submit, serve: Serve, folder_of: FolderOf
) -> None:
    sick, well = submit(), submit()
    attempt = folder_of(sick).path / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "process.json").write_text("{")
    reconciler = serve("succeed")
    wait_for_state(store, well, JobState.SUCCEEDED)
    assert reconciler.alive
    assert store.jobs.get(sick.id).state is JobState.STARTING


def test_what_another_service_started_meanwhile_is_not_ended(
    store: Store, submit: Submit, tmp_path: Path, folder_of: FolderOf
) -> None:
    job = submit()
    command = [sys.executable, "-I", "-S", str(DRIVER), "wait", "succeed"]
    slow, quick = (
        Reconciler(
            store,
            {"local": LocalLauncher(tmp_path / "jobs", command=command, poll_seconds=poll)},
            tmp_path / "jobs",
            "http://127.0.0.1:1",
        )
        for poll in (60.0, 0.0)
    )
    claim = store.claims.take(job.id, lease_seconds=60)
    assert claim is not None
    store.jobs.queue(claim)
    store.attempts.open(claim, launcher="local", launcher_id=f"{job.id}/1", capacity=None)
    slow.sweep()  # finds it nowhere, and remembers so for a while
    store.claims.release(claim)

    def becomes(state: JobState) -> bool:
        quick.sweep()
        return store.jobs.get(job.id).state is state

    wait_until(lambda: becomes(JobState.RUNNING), "it runs")
    slow.sweep()
    (folder_of(job).path / "go").touch()
    wait_until(lambda: becomes(JobState.SUCCEEDED), "it ends")
    assert moves(store, job) == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]


def test_a_live_job_without_its_launcher_waits_for_it(
    store: Store, submit: Submit, serve: Serve, tmp_path: Path, folder_of: FolderOf
) -> None:
    job = submit()
    first = serve("wait", "succeed")
    wait_for_state(store, job, JobState.RUNNING)
    first.stop()
    before = store.jobs.get(job.id)
    without = Reconciler(store, {}, tmp_path / "jobs", "http://127.0.0.1:1")
    assert not without.sweep()
    assert store.jobs.get(job.id) == before
    serve("wait", "succeed")
    (folder_of(job).path / "go").touch()
    wait_for_state(store, job, JobState.SUCCEEDED)


def test_a_job_whose_cluster_is_gone_can_be_let_go_of(
    store: Store, submit: Submit, serve: Serve, tmp_path: Path, folder_of: FolderOf
) -> None:
    spoke, silent = submit(), submit()
    first = serve("wait", "succeed")
    for job in (spoke, silent):
        wait_for_state(store, job, JobState.RUNNING)
    first.stop()
    (folder_of(spoke).path / "go").touch()
    outcome = folder_of(spoke).path / "attempts" / "1" / "outcome.json"
    wait_until(outcome.exists, "it says how it ended")
    store.jobs.cancel(silent.id)
    without = Reconciler(store, {}, tmp_path / "jobs", "http://127.0.0.1:1")
    while without.sweep():
        pass
    assert store.jobs.get(spoke.id).state is JobState.SUCCEEDED
    ended = store.jobs.get(silent.id)
    assert ended.state is JobState.CANCELLED
    assert "no cluster 'local' any more" in ended.message


def test_a_cancel_between_two_attempts_reaches_what_the_cluster_queued_again(
    store: Store, submit: Submit, tmp_path: Path
) -> None:
    cancelled: list[tuple[str, float]] = []

    class Requeueing(LocalLauncher):
        def cancel(self, launcher_id: str, grace_seconds: float) -> None:
            cancelled.append((launcher_id, grace_seconds))
            super().cancel(launcher_id, grace_seconds)

    command = [sys.executable, "-I", "-S", str(DRIVER), "die"]
    launcher = Requeueing(tmp_path / "jobs", command=command, poll_seconds=0.0)
    job = submit()
    reconciler = Reconciler(
        store,
        {"local": launcher},
        tmp_path / "jobs",
        "http://127.0.0.1:1",
        timing=Timing(retry_base=600.0),
    )

    def becomes(state: JobState) -> bool:
        reconciler.sweep()
        return store.jobs.get(job.id).state is state

    wait_until(lambda: becomes(JobState.RECOVERING), "it is tried again")
    assert cancelled == []
    store.jobs.cancel(job.id)
    wait_until(lambda: becomes(JobState.CANCELLED), "it is cancelled")
    assert cancelled == [(f"{job.id}/1", 0.0)]


@pytest.mark.parametrize(
    "error",
    [
        sqlalchemy.exc.TimeoutError("QueuePool limit"),
        sqlalchemy.exc.InterfaceError("SELECT", {}, Exception("the connection is closed")),
        RuntimeError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_round_that_fails_is_not_the_last(
    store: Store,
    submit: Submit,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    monkeypatch.setattr("service.reconciler.reconciler._AFTER_FAULT_SECONDS", 0.01)
    active, failures = store.jobs.active, [error]

    def fail_once() -> list[Job]:
        if failures:
            raise failures.pop()
        return active()

    monkeypatch.setattr(store.jobs, "active", fail_once)
    reconciler = serve("succeed")
    wait_for_state(store, submit(), JobState.SUCCEEDED)
    assert not failures
    assert reconciler.alive


def test_a_database_that_is_away_for_a_while_ends_nothing(
    store: Store, submit: Submit, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reconciler.reconciler._AFTER_FAULT_SECONDS", 0.01)

    def rename(old: str, new: str) -> None:
        with store.database.writing() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}")

    reconciler = serve("succeed")
    wait_until(lambda: reconciler.got_on_at, "it sweeps")
    rename("jobs", "away")
    before = reconciler.got_on_at
    time.sleep(0.3)
    rename("away", "jobs")
    wait_until(lambda: reconciler.got_on_at != before, "it sweeps again")
    assert reconciler.alive
    wait_for_state(store, submit(), JobState.SUCCEEDED)
