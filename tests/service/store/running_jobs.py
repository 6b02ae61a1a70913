"""Brings a job to where a test begins, by the calls that the reconciler makes."""

from service.auth.keys import hash_secret
from service.jobs import Job
from service.store import Claim, Store
from tests.service.store.sample_jobs import context, document


def new_job(store: Store, name: str = "sample") -> Job:
    spec = document(name)
    return store.jobs.create(context(spec), spec)[0]


def claim(store: Store, job: Job) -> Claim:
    taken = store.claims.take(job.id, lease_seconds=60)
    assert taken is not None
    return taken


def open_attempt(store: Store, held: Claim, token: str) -> int:
    attempt = store.attempts.open(held, launcher="local", launcher_id="sample", capacity=None)
    assert attempt is not None
    store.attempts.set_token(held, attempt.number, hash_secret(token))
    return attempt.number


def starting_job(store: Store, token: str = "secret") -> tuple[Job, Claim]:
    """A STARTING job with attempt 1, whose events come with `token`."""
    job = new_job(store)
    held = claim(store, job)
    store.jobs.queue(held)
    open_attempt(store, held, token)
    return store.jobs.get(job.id), held
