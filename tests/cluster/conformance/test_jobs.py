"""Jobs of several attempts on every site: the real reconciler, store and log stream above the real
launcher."""

import time
from collections.abc import Callable, Iterator

import pytest

from service.jobs import Job, JobState
from service.spec import Reason
from tests.cluster.conformance.services import Service
from tests.cluster.conformance.trial import Trial
from tests.cluster.sites.site import Ability, Site

BOTH_ATTEMPTS = ("print=from attempt", "events=2", "1:wait", "2-:succeed")


@pytest.fixture(scope="module")
def service(site: Site) -> Iterator[Service]:
    """The service, with the site as its only cluster."""
    with Trial.on(site) as trial, Service.running(site, trial) as running:
        yield running


@pytest.fixture
def trial(service: Service) -> Trial:
    """The jobs of the service."""
    return service.trial


def assert_went_on(service: Service, trial: Trial, job: Job, reasons: set[Reason]) -> None:
    """Two attempts, the first ended by one of `reasons`; each driver ran once, nothing is lost."""
    attempts = service.store.attempts.of_job(job.id)
    assert len(attempts) == 2, [(attempt.reason, attempt.message) for attempt in attempts]
    first, second = attempts
    assert first.reason in reasons, first.message
    assert second.reason is None
    assert trial.starts(job.id) == ["1", "2"]
    assert service.worker_events(job) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [trial.log(job.id, n).count("from attempt") for n in (1, 2)] == [1, 1]


def test_g01_g33_a_preempted_job_goes_on_as_the_next_attempt_and_its_log_is_followed(
    service: Service, trial: Trial, needs: Callable[..., None]
) -> None:
    needs(Ability.PREEMPT)
    job = service.submit(*BOTH_ATTEMPTS)
    service.wait_started(job)
    with service.following_log(job) as follower:
        service.site.preempt(service.newest(job).launcher_id)
        ended = service.wait_ended(job)
    assert ended.state is JobState.SUCCEEDED, ended.message
    assert_went_on(service, trial, job, {Reason.PREEMPTED})
    assert not follower.is_alive()
    for attempt in (1, 2):
        assert follower.text_of(attempt).splitlines() == trial.log(job.id, attempt)


def test_g11_a_job_that_lost_its_machine_goes_on_as_the_next_attempt(
    service: Service, trial: Trial, needs: Callable[..., None]
) -> None:
    needs(Ability.LOSE_NODE)
    job = service.submit(*BOTH_ATTEMPTS)
    service.wait_started(job)
    service.site.lose_node(service.newest(job).launcher_id)
    ended = service.wait_ended(job)
    assert ended.state is JobState.SUCCEEDED, ended.message
    assert_went_on(service, trial, job, {Reason.NODE_FAILURE})


def test_g21_an_error_of_the_job_is_tried_as_often_as_the_user_says(
    service: Service, trial: Trial
) -> None:
    never = service.submit("fail=USER_ERROR")
    once = service.submit("1:fail=USER_ERROR", "succeed", retry={"user_error": 1})
    failed, succeeded = service.wait_ended(never), service.wait_ended(once)
    assert (failed.state, failed.reason) == (JobState.FAILED, Reason.USER_ERROR)
    assert failed.message == "it went wrong"
    assert trial.starts(never.id) == ["1"]
    assert succeeded.state is JobState.SUCCEEDED, succeeded.message
    assert trial.starts(once.id) == ["1", "2"]


def test_a_job_whose_time_is_over_is_asked_to_end_and_not_tried_again(
    service: Service, trial: Trial
) -> None:
    job = service.submit("slow-term=1", "wait", time_limit_minutes=60)
    service.wait_started(job)
    service.let_time_pass(job, minutes=61)
    ended = service.wait_ended(job)
    assert (ended.state, ended.reason) == (JobState.FAILED, Reason.TIMEOUT)
    # By TERM, or by USR1 where the cluster takes TERM for something else.
    assert any(line.startswith("asked to end by SIG") for line in trial.log(job.id))
    assert trial.starts(job.id) == ["1"]


def test_a_job_runs_on_while_its_cluster_is_away(
    service: Service, trial: Trial, needs: Callable[..., None]
) -> None:
    needs(Ability.AWAY)
    job = service.submit("wait", "succeed")
    service.wait_started(job)
    with service.site.away():
        time.sleep(4 * service.launcher.poll_seconds)
        assert service.store.jobs.get(job.id).state is JobState.RUNNING
        cancelled_later = service.submit("wait")
        trial.go(job.id)
    ended = service.wait_ended(job)
    assert ended.state is JobState.SUCCEEDED, ended.message
    assert service.moves(job) == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    service.store.jobs.cancel(cancelled_later.id)
    assert service.wait_ended(cancelled_later).state is JobState.CANCELLED
