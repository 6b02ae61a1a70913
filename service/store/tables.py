"""The tables. A change here needs a migration; a test compares the two."""

from enum import StrEnum

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from service.jobs.states import AttemptState, JobState, Wish
from service.spec import Reason

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _words(words: type[StrEnum], length: int) -> Enum:
    """A column of text that holds an enum's values; a new member needs no migration."""
    return Enum(
        words,
        native_enum=False,
        length=length,
        values_callable=lambda members: [member.value for member in members],
    )


jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("cluster", String(32), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("resolved", JSON, nullable=False),
    Column("wish", _words(Wish, 16), nullable=False),
    Column("state", _words(JobState, 16), nullable=False),
    Column("reason", _words(Reason, 32)),
    Column("message", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("retry_at", Double),
    Column("event_count", BigInteger, nullable=False),
    Column("attempt_count", Integer, nullable=False),
    Column("created_by", String(64)),
    Column("lock_token", String(64)),
    Column("lock_expires_at", Double),
    Index(None, "created_at", "id"),
    Index(None, "name", "created_at"),
    # Jobs are counted, and the oldest that waits is found, without a look at their rows.
    Index(None, "state", "cluster", "reason", "created_at"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("launcher", String(32), nullable=False),
    Column("launcher_id", String(255), nullable=False),
    Column("state", _words(AttemptState, 16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("exit_code", Integer),
    Column("exit_signal", Integer),
    Column("reason", _words(Reason, 32)),
    Column("message", Text, nullable=False),
    Column("stop_reason", _words(Reason, 32)),
    Column("stop_asked_at", Double),
    Column("last_seq", BigInteger, nullable=False),
    Column("token_hash", String(64), nullable=False),
    CheckConstraint("number >= 1", name="number"),
    Index(None, "reason", "launcher"),
    Index(None, "state", "launcher", "created_at"),
)

events = Table(
    "events",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("attempt", Integer),
    Column("seq", BigInteger),
    Column("kind", String(32), nullable=False),
    Column("step", BigInteger),
    Column("data", JSON, nullable=False),
    ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.number"]),
    # The last line of defence against an event stored twice; the service's own have no seq.
    UniqueConstraint("job_id", "attempt", "seq"),
    Index(None, "job_id", "kind", "step"),
)

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("lines", BigInteger),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(64)),
    Index(None, "created_at", "id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", Text, nullable=False),
    Column("secret_hash", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("last_used_at", Double),
    Column("revoked_at", Double),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("scope", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("job_id", ForeignKey(jobs.c.id), nullable=False),
    Column("created_at", Double, nullable=False),
)
