"""Brings the schema up to date; run at every start of the service."""

import threading
from pathlib import Path

from service.store.database import Database

SCRIPTS = Path(__file__).parent / "migrations"
_one_at_a_time = threading.Lock()
"""Alembic keeps what it works on in a module's globals, one for all threads of a process."""


def migrate(database: Database) -> None:
    """Runs the migrations that are missing, all in one transaction.

    A service that is killed on the way leaves the old schema whole. Two that start together wait
    for each other.
    """
    # Alembic takes a quarter of a second to import, and only this needs it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    with _one_at_a_time, database.writing() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
