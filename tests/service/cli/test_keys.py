"""`planish keys` on a real database, and beside a service that runs."""

import json
import logging
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from service.auth.keys import KEY_PATTERN, hash_secret
from service.cli.main import app
from service.store import Store
from tests.service.cli.test_serve import Served, get
from tests.waiting import wait_until

COMMANDS = (("list",), ("new", "laptop"), ("revoke", "key-" + "a" * 16))
NOWHERE = "key-" + "0" * 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A service's data folder, with a database that was migrated."""
    path = tmp_path / "data"
    Store.open(f"sqlite:///{path}/planish.db").close()
    return path


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """As the service has it."""
    opened = Store.open(f"sqlite:///{folder}/planish.db")
    yield opened
    opened.close()


def planish_keys(*arguments: str, url: str | None = None) -> Result:
    """Exit code, stdout and stderr of `planish keys ARGUMENTS`."""
    done = CliRunner().invoke(app, ["keys", *arguments], env={"PLANISH_DATABASE_URL": url})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def on(folder: Path, *arguments: str) -> Result:
    return planish_keys(*arguments, "--data-dir", str(folder))


def made(folder: Path, name: str) -> tuple[str, str]:
    """A new key's id and secret."""
    done = on(folder, "new", name)
    assert done.exit_code == 0, done.stderr
    return re.findall(r"key-[a-z0-9]{16}", done.stderr)[0], done.stdout.strip()


def rows(folder: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(folder / "planish.db")) as database:
        return database.execute("SELECT * FROM api_keys").fetchall()


def test_a_new_key_stands_alone_on_stdout_and_nowhere_else(
    folder: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    done = on(folder, "new", " CI of team :smile: [bold] ")
    assert done.exit_code == 0
    secret = done.stdout.removesuffix("\n")
    assert KEY_PATTERN.fullmatch(secret)
    key = store.keys.by_hash(hash_secret(secret))
    assert key is not None
    assert key.name == "CI of team :smile: [bold]"
    assert f"{key.id} ({key.name}) is accepted" in done.stderr
    for hidden in (secret, key.secret_hash):
        assert hidden not in done.stderr + caplog.text
    for path in folder.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes()


def test_the_list_shows_all_but_the_secret(folder: Path, store: Store) -> None:
    empty = on(folder, "list")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "no keys yet: planish keys new NAME" in empty.stderr
    assert json.loads(on(folder, "list", "--json").stdout) == []

    (old, old_secret), (young, young_secret) = made(folder, "[red]old"), made(folder, "young")
    store.keys.used(old)
    on(folder, "revoke", old)
    table, as_json = on(folder, "list"), on(folder, "list", "--json")
    first, second = store.keys.listed()
    assert first.last_used_at is not None
    assert first.revoked_at is not None
    assert json.loads(as_json.stdout) == [
        {
            "id": key.id,
            "name": key.name,
            "created_at": key.created_at,
            "last_used_at": key.last_used_at,
            "revoked_at": key.revoked_at,
        }
        for key in (first, second)
    ]
    head, *lines = table.stdout.splitlines()
    assert head.split() == ["ID", "NAME", "CREATED", "LAST", "USED", "REVOKED"]
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"
    assert re.fullmatch(rf"{old} +\[red\]old +{time} +{time} +{time} *", lines[0])
    assert re.fullmatch(rf"{young} +young +{time} +- +- *", lines[1])
    for secret in (old_secret, young_secret):
        for done in (table, as_json):
            assert secret not in done.output
            assert hash_secret(secret) not in done.output


def test_a_key_is_revoked_once_and_keeps_that_time(folder: Path, store: Store) -> None:
    key, secret = made(folder, "laptop")
    other, _ = made(folder, "another")
    first = on(folder, "revoke", key)
    assert (first.exit_code, first.stdout) == (0, "")
    assert first.stderr == f"{key} (laptop) is refused from now on\n"
    before = store.keys.listed()
    assert store.keys.by_hash(hash_secret(secret)) is None
    second = on(folder, "revoke", key)
    assert second.exit_code == 0
    assert f"{key} (laptop) was revoked before, 2" in second.stderr
    assert store.keys.listed() == before
    assert [found.id for found in before if found.revoked_at is None] == [other]


def test_the_last_key_can_be_revoked_and_the_command_says_what_that_means(folder: Path) -> None:
    key, _ = made(folder, "only")
    done = on(folder, "revoke", key)
    assert done.exit_code == 0
    assert "no key is accepted any more: planish keys new NAME makes one" in done.stderr
    made(folder, "next")
    assert "any more" not in on(folder, "revoke", key).stderr


@pytest.mark.parametrize("argument", [NOWHERE, "laptop", "planish_" + "s" * 43])
def test_an_unknown_id_is_refused_and_changes_nothing(folder: Path, argument: str) -> None:
    made(folder, "laptop")
    before = rows(folder)
    done = on(folder, "revoke", argument)
    assert done.exit_code == 2
    assert "there is no key with this id; planish keys list shows the ids" in done.stderr
    assert argument not in done.output
    assert rows(folder) == before


@pytest.mark.parametrize("name", ["", "  ", "a\x1b[31m", "a\nb", "x" * 101, "planish_" + "s" * 43])
def test_a_name_that_is_none_is_refused(folder: Path, name: str) -> None:
    done = on(folder, "new", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "s" * 43 not in done.stderr
    assert rows(folder) == []


def test_the_database_is_the_one_that_serve_takes_with_the_same_options(
    tmp_path: Path, folder: Path
) -> None:
    made(folder, "in the folder")
    other = tmp_path / "other"
    url = f"sqlite:///{other}/planish.db"
    Store.open(url).close()
    for arguments in (("--data-dir", str(folder)), ()):
        assert planish_keys("new", "in the url", *arguments, url=url).exit_code == 0
    assert planish_keys("new", "in the url", "--database-url", url).exit_code == 0
    assert [len(rows(place)) for place in (folder, other)] == [1, 3]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_database_it_asks_for_one(command: tuple[str, ...]) -> None:
    done = planish_keys(*command)
    assert (done.exit_code, done.stdout) == (2, "")
    for way in ("PLANISH_DATABASE_URL", "--database-url", "--data-dir"):
        assert way in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_database_that_is_not_there_is_not_made(command: tuple[str, ...], tmp_path: Path) -> None:
    for done in (
        on(tmp_path / "no:where", *command),
        planish_keys(*command, url=f"sqlite:///{tmp_path}/nowhere/planish.db"),
    ):
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"there is no file {tmp_path}/no" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("DROP TABLE alembic_version", "it has no schema of Planish yet"),
        ("UPDATE alembic_version SET version_num = '0001'", "its schema (0001) is older"),
        ("UPDATE alembic_version SET version_num = 'f00d'", "a newer version of Planish has used"),
    ],
)
def test_a_database_of_another_schema_stays_as_it_is(
    command: tuple[str, ...], change: str, says: str, folder: Path
) -> None:
    with closing(sqlite3.connect(folder / "planish.db")) as database:
        database.executescript(change)
        before = list(database.iterdump())
    done = on(folder, *command)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"the database cannot be used: {says}" in done.stderr
    with closing(sqlite3.connect(folder / "planish.db")) as database:
        assert list(database.iterdump()) == before


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "Could not parse"),
        ("nonsense://x", "nonsense"),
        ("sqlite://", "a database on disk"),
        (f"sqlite:///{__file__}", "file is not a database"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/planish", "refused"),
    ],
)
def test_a_database_that_cannot_be_used_has_a_plain_message(url: str, says: str) -> None:
    done = planish_keys("list", url=url)
    assert done.exit_code == 2
    assert "the database cannot be used" in done.stderr
    assert says in done.stderr
    assert "secret" not in done.output


def test_a_database_that_refuses_the_row_is_not_quoted_with_its_values(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "planish.db")) as database:
        database.executescript(
            "CREATE TRIGGER full BEFORE INSERT ON api_keys "
            "BEGIN SELECT RAISE(ABORT, 'no room'); END"
        )
    done = on(folder, "new", "laptop")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "the database cannot be used: no room\n"


def test_a_running_service_takes_a_new_key_and_refuses_a_revoked_one_at_once(
    tmp_path: Path,
) -> None:
    folder, brought = tmp_path / "data", "planish_" + "b" * 30
    saved = tmp_path / "config" / "planish" / "connection.json"
    served = Served(folder, key=brought)
    url = served.url()
    wait_until(saved.exists, "the connection is saved")
    assert json.loads(saved.read_text())["api_key"] == brought
    ci, secret = made(folder, "ci")
    assert [get(url, key) for key in (brought, secret)] == [200, 200]
    on(folder, "revoke", ci)
    assert [get(url, key) for key in (brought, secret)] == [200, 401]
    (bootstrap,) = (key for key in rows(folder) if "bootstrap" in key)
    on(folder, "revoke", str(bootstrap[0]))
    assert [get(url, key) for key in (brought, secret)] == [401, 401]
    assert served.end(signal.SIGTERM) == 0

    # Nobody is let in by the restart; a new key is taken, again without one.
    served = Served(folder, key=brought)
    url = served.url()
    assert get(url, brought) == 401
    wait_until(
        lambda: json.loads(saved.read_text())["api_key"] is None, "the revoked key is forgotten"
    )
    assert get(url, made(folder, "operator")[1]) == 200
    assert served.end(signal.SIGTERM) == 0
    assert "the key in PLANISH_BOOTSTRAP_KEY was revoked" in served.output
    assert "no API key is accepted, since all were revoked" in served.output
    assert "planish_" not in served.output


def test_every_command_is_documented() -> None:
    whole = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    (page,) = (part for part in re.split(r"^## ", whole, flags=re.M) if "planish keys new" in part)
    for command in ("list", "new", "revoke"):
        assert f"planish keys {command}" in page
        shown = planish_keys(command, "--help")
        assert shown.exit_code == 0
        for option in set(re.findall(r"--[a-z][a-z-]+", shown.output)) - {"--help"}:
            assert option in page, f"{option} of planish keys {command} is not in docs/cli.md"
