"""`planish migrate`, and what `planish serve` does of it at its start."""

from contextlib import closing
from typing import Annotated

import typer

from service.cli.context import Exit, err, out


def migrate(
    database_url: Annotated[
        str, typer.Option(envvar="PLANISH_DATABASE_URL", help="SQLAlchemy URL.")
    ],
) -> None:
    """Brings a database to this version's schema. `planish serve` does so too at its start."""
    prepare_database(database_url)
    out().print("the schema is up to date")


def prepare_database(url: str) -> None:
    """Connects and migrates, so that a database that cannot be used has a plain message.

    Raises:
        typer.Exit: it cannot be reached, made or used by this version.
    """
    # Imported here: they take a while, and most commands need no database.
    from sqlalchemy.exc import SQLAlchemyError

    from service.store.database import Database
    from service.store.migrate import migrate as bring_up_to_date

    try:
        with closing(Database(url)) as database:
            bring_up_to_date(database)
    except (SQLAlchemyError, ImportError, OSError, ValueError) as error:
        # The URL may hold a password, so it is not repeated.
        err().print(f"the database cannot be used: {error}; see --database-url", markup=False)
        raise typer.Exit(Exit.REFUSED) from None
