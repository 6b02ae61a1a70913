"""`planish migrate`, and databases that cannot be used."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import inspect
from typer.testing import CliRunner

from service.cli.main import app
from service.store import tables
from service.store.database import Database


def planish_migrate(url: str | None) -> tuple[int, str]:
    """Exit code, and all that was said."""
    environment = {} if url is None else {"PLANISH_DATABASE_URL": url}
    done = CliRunner().invoke(app, ["migrate"], env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def test_migrate_makes_the_schema_and_may_be_repeated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/planish.db"
    for _ in range(2):
        assert planish_migrate(url) == (0, "the schema is up to date")
    assert set(tables.metadata.tables) < set(inspect(Database(url).engine).get_table_names())


def test_a_database_that_a_newer_version_has_used_stays_as_it_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/planish.db"
    planish_migrate(url)
    with sqlite3.connect(tmp_path / "planish.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'f00d'")
    code, said = planish_migrate(url)
    assert code == 2
    assert "a newer version of Planish has used it (schema f00d)" in said
    with sqlite3.connect(tmp_path / "planish.db") as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchall() == [("f00d",)]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense://x", "nonsense"),
        ("sqlite://", "a database on disk"),
        ("sqlite:////proc/planish.db", "unable to open"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/planish", "refused"),
    ],
)
def test_a_database_that_cannot_be_used_has_a_plain_message(url: str, says: str) -> None:
    code, said = planish_migrate(url)
    assert code == 2
    assert "the database cannot be used" in said
    assert says in said
    assert "secret" not in said


def test_migrate_asks_for_a_database() -> None:
    code, said = planish_migrate(None)
    assert code == 2
    assert "--database-url" in said
