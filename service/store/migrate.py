"""Brings the schema up to date; run at every start of the service."""

import threading
from pathlib import Path

from sqlalchemy import Connection, func, select

from service.store.database import Database

SCRIPTS = Path(__file__).parent / "migrations"
_one_at_a_time = threading.Lock()
"""Alembic keeps what it works on in a module's globals, one for all threads of a process."""

_LOCK = 0x706C616E
"""PostgreSQL's lock (`pg_advisory_xact_lock`) of who migrates; any number that is nobody else's."""


class NewerSchema(ValueError):
    """The database was brought to a schema that this version does not know."""


def migrate(database: Database) -> None:
    """Runs the migrations that are missing, all in one transaction.

    A service that is killed on the way leaves the old schema whole. Two that start together wait
    for each other.

    Raises:
        NewerSchema: a newer version has used the database; nothing was changed.
    """
    # Alembic takes a quarter of a second to import, and only this needs it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    with _one_at_a_time, database.writing() as connection:
        _wait_for_turn(connection)
        if unknown := _revisions(connection) - _known():
            raise NewerSchema(
                f"a newer version of Planish has used it (schema {', '.join(sorted(unknown))}); "
                "run that version, or go back to a backup from before its start"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check(database: Database) -> None:
    """Returns where the schema is this version's; changes nothing.

    Raises:
        NewerSchema: a newer version has used the database.
        ValueError: it has no schema, or an older one.
    """
    from alembic.script import ScriptDirectory

    with database.reading() as connection:
        found = _revisions(connection)
    if found == set(ScriptDirectory(str(SCRIPTS)).get_heads()):
        return
    schema = ", ".join(sorted(found))
    if not found:
        raise ValueError("it has no schema of Planish yet; planish serve or migrate makes it")
    if found - _known():
        raise NewerSchema(
            f"a newer version of Planish has used it (schema {schema}); run the planish of that "
            "version, such as that in the service's container"
        )
    raise ValueError(
        f"its schema ({schema}) is older than this version of Planish; run the planish of the "
        "service's version, or planish migrate first"
    )


def _known() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}


def _wait_for_turn(connection: Connection) -> None:
    """Waits, on PostgreSQL, for the end of another's migration; SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def _revisions(connection: Connection) -> set[str]:
    from alembic.migration import MigrationContext

    return set(MigrationContext.configure(connection).get_current_heads())
