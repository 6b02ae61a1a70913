"""The durable store: one repository per noun, over SQLite or PostgreSQL.

    store = Store.open("sqlite:////data/planish.db")   # migrates the schema too
    job, created = store.jobs.create(context, spec)
    store.events.ingest(job.id, 1, token, batch.events)

Calls are synchronous, take milliseconds, may come from any thread, and are one transaction each. No
call talks to a network, a launcher or a job's folder.
"""

from service.store.changes import Changes
from service.store.claims import Claim
from service.store.errors import (
    ClaimLost,
    IdempotencyConflict,
    NotFound,
    StaleAttempt,
    StoreError,
    WrongToken,
)
from service.store.events import Ingested
from service.store.jobs import Idempotency
from service.store.pages import BadCursor, Page
from service.store.store import Store

__all__ = [
    "BadCursor",
    "Changes",
    "Claim",
    "ClaimLost",
    "Idempotency",
    "IdempotencyConflict",
    "Ingested",
    "NotFound",
    "Page",
    "StaleAttempt",
    "Store",
    "StoreError",
    "WrongToken",
]
