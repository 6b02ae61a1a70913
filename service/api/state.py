"""What the metrics show of the store and the reconciler."""

import time

from sqlalchemy import func, select

from service.api.context import ServiceContext
from service.api.health import reconcile_lag
from service.jobs import JobState
from service.metrics import ServiceState
from service.spec import Reason
from service.store import tables

_WAITING = frozenset({JobState.PENDING, JobState.QUEUED})


def read_state(service: ServiceContext) -> ServiceState:
    """Reads it, in three short queries."""
    failed = _failed_by_reason(service)
    waiting = [job.created_at for job in service.store.jobs.active() if job.state in _WAITING]
    return ServiceState(
        jobs_by_state={str(state): n for state, n in service.store.jobs.counts().items()},
        attempts_by_reason={str(reason): failed.get(reason, 0) for reason in Reason},
        queue_seconds=max(time.time() - min(waiting), 0.0) if waiting else 0.0,
        reconcile_lag_seconds=reconcile_lag(service),
    )


def _failed_by_reason(service: ServiceContext) -> dict[str, int]:
    reason = tables.attempts.c.reason
    query = select(reason, func.count()).where(reason.is_not(None)).group_by(reason)
    with service.store.database.reading() as connection:
        return {str(name): int(count) for name, count in connection.execute(query)}
