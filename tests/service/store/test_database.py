import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from service.store import Store
from service.store.database import Database
from service.store.tables import api_keys
from tests.service.store.running_jobs import new_job


def test_sqlite_is_set_up_to_keep_what_it_answered(store: Store) -> None:
    with store.database.reading() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert found == {
        "journal_mode": "wal",
        "synchronous": 2,  # FULL
        "foreign_keys": 1,
        "busy_timeout": 30_000,
    }


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="on disk"):
        Database(url)


def test_sqlalchemy_does_not_quote_the_values_of_a_failed_statement(store: Store) -> None:
    store.keys.add("first", "hash-of-the-secret")
    with pytest.raises(IntegrityError) as failed, store.database.writing() as connection:
        connection.execute(
            insert(api_keys).values(
                id="key-1", name="n", secret_hash="hash-of-the-secret", created_at=0.0
            )
        )
    assert "hash-of-the-secret" not in str(failed.value)


def test_a_second_store_sees_what_the_first_wrote(store: Store, tmp_path: Path) -> None:
    job = new_job(store)
    other = Store.open(f"sqlite:///{tmp_path}/planish.db")
    assert other.jobs.get(job.id) == job
    other.close()


def test_a_reader_is_not_held_up_by_a_writer(store: Store) -> None:
    job = new_job(store)
    with store.database.writing():
        began = time.monotonic()
        assert store.jobs.get(job.id) == job
        assert time.monotonic() - began < 5


def test_the_service_imports_without_the_workers_world() -> None:
    code = (
        "import sys, service.store, service.reconciler, service.launchers.local; "
        "assert not {'torch', 'ray', 'megatron', 'transformers', 'alembic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
