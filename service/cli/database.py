"""`planish migrate`, and how `planish serve` opens its database."""

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.context import Exit, err, out

if TYPE_CHECKING:
    from service.store import Store


def migrate(
    database_url: Annotated[
        str, typer.Option(envvar="PLANISH_DATABASE_URL", help="SQLAlchemy URL.")
    ],
) -> None:
    """Brings a database to this version's schema. `planish serve` does so too at its start."""
    open_store(database_url).close()
    out().print("the schema is up to date")


def open_store(url: str) -> "Store":
    """Connects and migrates; a database that cannot be used has a plain message.

    Raises:
        typer.Exit: it cannot be reached, made or used by this version.
    """
    # Imported here: they take a while, and most commands need no database.
    from sqlalchemy.exc import SQLAlchemyError

    from service.store import Store

    try:
        return Store.open(url)
    except (SQLAlchemyError, ImportError, OSError, ValueError) as error:
        # The URL may hold a password, so it is not repeated.
        err().print(f"the database cannot be used: {error}; see --database-url", markup=False)
        raise typer.Exit(Exit.REFUSED) from None
