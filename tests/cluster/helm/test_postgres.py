"""Services on one real PostgreSQL; no Kubernetes is needed."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import inspect

from service.store import tables
from service.store.database import Database
from service.store.keys import ApiKeys
from service.store.migrate import migrate
from tests.cluster.helm.postgres import postgres

pytestmark = pytest.mark.cluster

SERVICES = 3
SECONDS = 60.0
_together: Barrier


def _meet(barrier: Barrier) -> None:
    global _together
    _together = barrier


def _id_of_the_same_key(url: str) -> str:
    database = Database(url)
    with database.reading():
        _together.wait(SECONDS)
    key = ApiKeys(database).add("bootstrap", "a" * 64)
    database.close()
    return key.id


def _names_after_migration(url: str) -> set[str]:
    database = Database(url)
    with database.reading():
        _together.wait(SECONDS)
    migrate(database)
    found = set(inspect(database.engine).get_table_names())
    database.close()
    return found


def test_services_that_start_at_once_on_an_empty_database_migrate_it_once() -> None:
    """PostgreSQL lets two make one table, and refuses the second to write it down. So it is with
    the key that all of them bring."""
    spawning = multiprocessing.get_context("spawn")
    with (
        postgres("127.0.0.1") as url,
        ProcessPoolExecutor(SERVICES, spawning, _meet, (spawning.Barrier(SERVICES),)) as services,
    ):
        driver = url.replace("postgresql://", "postgresql+psycopg://")
        found = list(services.map(_names_after_migration, [driver] * SERVICES))
        keys = list(services.map(_id_of_the_same_key, [driver] * SERVICES))
    assert found == [{*tables.metadata.tables, "alembic_version"}] * SERVICES
    assert len(set(keys)) == 1  # brought by all, accepted once
