import multiprocessing
import sqlite3
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from service.store import Store, tables
from service.store.database import Database
from service.store.migrate import SCRIPTS, migrate
from tests.service.store.running_jobs import new_job


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(f"sqlite:///{tmp_path}/planish.db")


def names(database: Database) -> set[str]:
    return set(inspect(database.engine).get_table_names())


def names_after_migration(url: str) -> set[str]:
    database = Database(url)
    migrate(database)
    return names(database)


def test_the_migrations_make_the_tables_of_the_code(database: Database) -> None:
    migrate(database)
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
    assert names(database) == {*tables.metadata.tables, "alembic_version"}


def test_migrating_again_keeps_everything(store: Store) -> None:
    job = new_job(store)
    migrate(store.database)
    assert store.jobs.get(job.id) == job


def test_two_services_can_start_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/planish.db"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as services:
        assert (
            list(services.map(names_after_migration, [url, url]))
            == [{*tables.metadata.tables, "alembic_version"}] * 2
        )


def test_the_threads_of_a_process_can_open_databases_at_once(tmp_path: Path) -> None:
    """Alembic itself mixes up what its threads work on."""
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(8)]
    with ThreadPoolExecutor(len(urls)) as threads:
        for found in threads.map(names_after_migration, urls):
            assert found == {*tables.metadata.tables, "alembic_version"}


def test_a_new_file_that_another_service_holds_is_waited_for(tmp_path: Path) -> None:
    """SQLite refuses the change to WAL at once, whatever the busy timeout."""
    path = tmp_path / "planish.db"
    other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    other.execute("CREATE TABLE begun (id INTEGER)")
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(lambda: names(Database(f"sqlite:///{path}")))
        time.sleep(0.3)
        assert not opened.done()
        other.execute("COMMIT")
        assert opened.result(timeout=20) == {"begun"}
    other.close()


def test_a_migration_that_is_cut_short_leaves_nothing(database: Database) -> None:
    def migrate_half() -> None:
        with database.writing() as connection:
            config = Config()
            config.set_main_option("script_location", str(SCRIPTS))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            raise RuntimeError("power is gone")

    with pytest.raises(RuntimeError, match="power"):
        migrate_half()
    assert names(database) == set()


def test_each_migration_can_be_taken_back(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    migrate(database)
    with database.writing() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert names(database) == {"alembic_version"}
