"""`planish keys`: makes, lists and revokes API keys in the service's database.

These commands go past the service, as `planish migrate` does. Whoever can reach the database may do
anything anyway, while a route that makes keys would turn each key that leaks into many. No service
needs a word about it: it looks a key up for each request, so the next one is answered by what the
database holds then.

Nothing here makes or migrates a database. A path with a typing error must leave no empty file
behind that looks like a service without keys, and a migration is not what somebody asks for who
wants a key revoked while the service runs.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from service.auth.keys import KEY_PATTERN, hash_secret, new_key
from service.cli.context import Exit, err, out
from service.cli.jobs import AsJson
from service.cli.rendering import print_json, print_table, when

if TYPE_CHECKING:
    from service.store.keys import ApiKeys

keys = typer.Typer(help="API keys of a service, in its database.", no_args_is_help=True)

MAX_NAME_CHARACTERS = 100


def _named(name: str) -> str:
    """A name that can stand in a table, and is no key."""
    if not (name.strip() and name.isprintable() and len(name) <= MAX_NAME_CHARACTERS):
        raise typer.BadParameter(f"1 to {MAX_NAME_CHARACTERS} characters that can be printed")
    if KEY_PATTERN.search(name):
        raise typer.BadParameter("this is a key, not a name; the command makes the key")
    return name.strip()


DatabaseUrl = Annotated[
    str | None,
    typer.Option(envvar="PLANISH_DATABASE_URL", help="SQLAlchemy URL, as planish serve has it."),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Data folder of planish serve, for its SQLite file where no URL is given."),
]
KeyName = Annotated[
    str, typer.Argument(help="Who or what it is for.", callback=_named, show_default=False)
]
KeyId = Annotated[
    str, typer.Argument(help="Id of the key, as the list has it.", show_default=False)
]


class KeyResource(BaseModel):
    """What is shown of a key: all but the hash of its secret."""

    id: str
    name: str
    created_at: float
    last_used_at: float | None
    revoked_at: float | None


@keys.command("list")
def list_keys(
    database_url: DatabaseUrl = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Lists all keys, the revoked ones too, oldest first."""
    with _opened(database_url, data_dir) as stored:
        found = [KeyResource.model_validate(key, from_attributes=True) for key in stored.listed()]
    if as_json:
        print_json(out(), found)
    elif found:
        print_table(out(), _table(found))
    else:
        err().print("no keys yet: planish keys new NAME", markup=False)


@keys.command("new")
def new(name: KeyName, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Makes a key and prints it, this once."""
    secret = new_key()
    with _opened(database_url, data_dir) as stored:
        key = stored.add(name, hash_secret(secret))
    # Before the secret: where that cannot be written, it is known which key to revoke.
    err().print(Text(f"{key.id} ({key.name}) is accepted from now on; shown this once:"))
    out().print(secret, markup=False)


@keys.command("revoke")
def revoke(key_id: KeyId, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Has a key refused from the next request on, for good."""
    from service.store.errors import NotFound

    try:
        with _opened(database_url, data_dir) as stored:
            key, now = stored.revoke(key_id)
            left = stored.count()
    except NotFound:
        # The id is not repeated: it may be a key, given by mistake.
        err().print("there is no key with this id; planish keys list shows the ids", markup=False)
        raise typer.Exit(Exit.REFUSED) from None
    how = "is refused from now on" if now else f"was revoked before, {when(key.revoked_at)}"
    err().print(Text(f"{key.id} ({key.name}) {how}"))
    if not left:
        err().print("no key is accepted any more: planish keys new NAME makes one", markup=False)


def _table(found: list[KeyResource]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("ID", "NAME", "CREATED", "LAST USED", "REVOKED"):
        table.add_column(title, no_wrap=True)
    for key in found:
        times = (key.created_at, key.last_used_at, key.revoked_at)
        table.add_row(key.id, Text(key.name), *map(when, times))
    return table


@contextmanager
def _opened(database_url: str | None, data_dir: Path | None) -> Iterator["ApiKeys"]:
    """The keys of the database that the options name.

    Raises:
        typer.Exit: none is named, or it cannot be used as it is.
    """
    # Imported here: they take a while, and most commands need no database.
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    from service.store.database import Database
    from service.store.keys import ApiKeys
    from service.store.migrate import check

    url = _url(database_url, data_dir)
    try:
        _check_there(url)
        with closing(Database(url)) as database:
            check(database)
            yield ApiKeys(database)
    except DBAPIError as error:
        # PostgreSQL's details may quote a row, and so a key's hash; its first line does not.
        told = getattr(error.orig, "diag", None)
        raise _unusable((told and told.message_primary) or str(error.orig)) from None
    except (SQLAlchemyError, ImportError, OSError, ValueError) as error:
        raise _unusable(str(error)) from None


def _unusable(why: str) -> typer.Exit:
    """Says why; the URL may hold a password, so it is not repeated."""
    err().print(f"the database cannot be used: {why}", markup=False)
    return typer.Exit(Exit.REFUSED)


def _url(database_url: str | None, data_dir: Path | None) -> str:
    """The database that `planish serve` uses with the same options."""
    from service.settings import Settings

    if database_url:
        return database_url
    if data_dir is None:
        err().print(
            "which database? Give what planish serve was given: PLANISH_DATABASE_URL (or "
            "--database-url), or else --data-dir",
            markup=False,
        )
        raise typer.Exit(Exit.REFUSED)
    # Unchecked: whether a service may have this folder matters to one that starts.
    return Settings.model_construct(data_dir=data_dir.absolute()).store_url


def _check_there(url: str) -> None:
    """SQLite would make the file."""
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    path = parsed.database if parsed.get_backend_name() == "sqlite" else None
    if path and not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}; see --data-dir and --database-url")
