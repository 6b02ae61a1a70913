"""What the metrics show of the store and the reconciler."""

import time

from service.api.context import ServiceContext
from service.api.health import reconcile_lag
from service.jobs import JobState
from service.metrics import ServiceState
from service.spec import Reason

_WAITING = frozenset({JobState.PENDING, JobState.QUEUED})


def read_state(service: ServiceContext) -> ServiceState:
    """Reads it, in three short queries."""
    failed = service.store.attempts.counts_by_reason()
    waiting = [job.created_at for job in service.store.jobs.active() if job.state in _WAITING]
    return ServiceState(
        jobs_by_state={str(state): n for state, n in service.store.jobs.counts().items()},
        attempts_by_reason={str(reason): failed.get(reason, 0) for reason in Reason},
        queue_seconds=max(time.time() - min(waiting), 0.0) if waiting else 0.0,
        reconcile_lag_seconds=reconcile_lag(service),
    )
