"""The launcher's contract (`service.launchers.protocol`), attempt by attempt, on every site."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from service.jobs import JobFolder
from service.launchers import Launcher, LauncherUnavailable, Phase
from service.spec import Reason
from tests.cluster.conformance.trial import Trial
from tests.cluster.sites.site import Ability, Site


@pytest.fixture
def launcher(site: Site, trial: Trial) -> Iterator[Launcher]:
    opened = site.launcher(trial.jobs_dir)
    yield opened
    opened.close()


def test_g15_an_attempt_runs_once_to_its_end_whoever_asks_and_however_often(
    site: Site, trial: Trial, launcher: Launcher
) -> None:
    request = trial.job("print=hello", "wait", "succeed")
    job_id, name = request.job_id, launcher.identify(request.job_id, 1)
    assert launcher.poll(name).phase is Phase.UNKNOWN
    assert trial.submit(launcher, request) == name
    trial.submit(launcher, request)
    trial.wait_started(launcher, name, job_id)
    restarted = site.launcher(trial.jobs_dir)
    assert restarted.identify(job_id, 1) == name
    trial.submit(restarted, request)
    assert restarted.poll(name).phase is Phase.RUNNING
    restarted.close()
    trial.go(job_id)
    seen = trial.wait_exited(launcher, name)
    assert seen.exit_code in (0, None), seen
    assert seen.exit_signal is None, seen
    assert seen.reason is None, seen
    trial.submit(launcher, request)
    launcher.cancel(name, 0.0)
    assert trial.wait_exited(launcher, name).reason is None
    assert trial.starts(job_id) == ["1"]
    assert trial.log(job_id).count("hello") == 1


def test_an_exit_code_is_the_drivers_own_fault(trial: Trial, launcher: Launcher) -> None:
    request = trial.job("exit=3")
    seen = trial.wait_exited(launcher, trial.submit(launcher, request))
    assert seen.exit_code in (3, None), seen
    assert seen.reason is None, seen
    assert trial.starts(request.job_id) == ["1"]
    assert "last words" in trial.log(request.job_id)


def test_while_a_cluster_is_away_nothing_is_concluded(
    site: Site, trial: Trial, launcher: Launcher, needs: Callable[..., None]
) -> None:
    needs(Ability.AWAY)
    request, later = trial.job("wait", "succeed"), trial.job("succeed")
    name = trial.submit(launcher, request)
    trial.wait_started(launcher, name, request.job_id)
    with site.away():
        restarted = site.launcher(trial.jobs_dir)
        for one in (launcher, restarted):
            with pytest.raises(LauncherUnavailable):
                one.submit(later)
        with pytest.raises(LauncherUnavailable):
            restarted.poll(name)
        # What was seen shortly before may still be told.
        with suppress(LauncherUnavailable):
            assert launcher.poll(name).phase is Phase.RUNNING
        restarted.close()
    trial.wait_started(launcher, name, request.job_id)
    second = trial.submit(launcher, later)
    trial.go(request.job_id)
    for one in (name, second):
        assert trial.wait_exited(launcher, one).reason is None
    assert trial.starts(request.job_id) == ["1"]
    assert trial.starts(later.job_id) == ["1"]


def test_g31_a_cancelled_driver_may_say_how_it_ended_and_nothing_of_it_is_left(
    trial: Trial, launcher: Launcher
) -> None:
    request = trial.job("children", "slow-term=5", "wait")
    job_id, name = request.job_id, trial.submit(launcher, request)
    trial.wait_started(launcher, name, job_id)
    folder = JobFolder(request.job_dir).attempt(1)
    folder.write_stop(Reason.CANCELLED)
    trial.cancel(launcher, name, 30.0)
    outcome = folder.outcome()
    assert outcome is not None
    assert outcome.reason is Reason.CANCELLED
    trial.assert_children_ended(job_id)


def test_a_driver_that_does_not_end_is_killed_after_the_grace(
    trial: Trial, launcher: Launcher
) -> None:
    request = trial.job("ignore-term", "children", "wait")
    name = trial.submit(launcher, request)
    trial.wait_started(launcher, name, request.job_id)
    trial.cancel(launcher, name, 3.0)
    assert JobFolder(request.job_dir).attempt(1).outcome() is None
    trial.assert_children_ended(request.job_id)


def test_an_attempt_that_is_cancelled_in_the_queue_never_starts(
    site: Site, trial: Trial, launcher: Launcher, needs: Callable[..., None]
) -> None:
    needs(Ability.QUEUE)
    request, kept = trial.job("succeed"), trial.job("succeed")
    with site.fill():
        names = [trial.submit(launcher, one) for one in (request, kept)]
        for _ in range(3):
            time.sleep(launcher.poll_seconds)
            assert {launcher.poll(name).phase for name in names} == {Phase.QUEUED}
        trial.cancel(launcher, names[0], 0.0)
        assert launcher.poll(names[1]).phase is Phase.QUEUED
    # The queue moves on: what was behind it runs.
    assert trial.wait_exited(launcher, names[1]).reason is None
    assert trial.starts(kept.job_id) == ["1"]
    trial.submit(launcher, request)
    assert launcher.poll(names[0]).phase is Phase.EXITED
    assert trial.starts(request.job_id) == []


def test_an_attempt_that_is_cancelled_while_it_starts_ends_and_does_not_come_back(
    site: Site, trial: Trial, launcher: Launcher
) -> None:
    request, never = trial.job("children", "ignore-term", "wait"), trial.job("succeed")
    name = trial.submit(launcher, request)
    trial.cancel(launcher, name, 0.0)
    started = trial.starts(request.job_id)
    if (request.job_dir / "beats").exists():
        trial.assert_children_ended(request.job_id)
    # One that nobody has submitted yet is shut out for good: a submit that is late changes nothing.
    unsubmitted = launcher.identify(never.job_id, 1)
    launcher.cancel(unsubmitted, 0.0)
    restarted = site.launcher(trial.jobs_dir)
    for one, late in ((name, request), (unsubmitted, never)):
        trial.submit(restarted, late)
        assert trial.wait_exited(restarted, one).leftovers == 0
    restarted.close()
    # Long enough for another attempt to come and go.
    other = trial.job("succeed")
    trial.wait_exited(launcher, trial.submit(launcher, other))
    assert trial.starts(other.job_id) == ["1"]
    assert trial.starts(request.job_id) == started
    assert trial.starts(never.job_id) == []


def test_who_takes_more_memory_than_asked_for_is_out_of_memory(
    site: Site, trial: Trial, launcher: Launcher, needs: Callable[..., None]
) -> None:
    needs(Ability.LIMIT_MEMORY)
    limit = site.memory_limit_gib
    request = trial.job(f"eat-memory={4 * limit}", memory_gib_per_node=limit)
    seen = trial.wait_exited(launcher, trial.submit(launcher, request))
    assert seen.reason is Reason.OUT_OF_MEMORY, seen
    assert seen.evidence
