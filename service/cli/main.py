"""The root of the command line: global options, and one place where errors become exit codes."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from service.cli import catalogue, data, jobs, keys, transfers
from service.cli.connection import KEY_VARIABLE, URL_VARIABLE, NotConfigured
from service.cli.context import Exit, Session, err, out
from service.cli.database import migrate
from service.cli.documents import BadDocument
from service.cli.rendering import print_api_error
from service.cli.serve import serve
from service.client import ApiError, ConnectionLost

app = typer.Typer(
    name="planish",
    help="Post-training of language models on Megatron-Core.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        out().print(f"planish {version('planish')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(envvar=URL_VARIABLE, help="Address of the service.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="API key; better in the variable, since others see a command's options.",
        ),
    ] = None,
    _version_asked: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Global options; on the machine of `planish serve` none is needed."""
    context.obj = Session(url=url, api_key=key)


app.command("serve")(serve)
app.command("migrate")(migrate)
app.command("submit")(jobs.submit)
app.command("list")(jobs.list_jobs)
app.command("show")(jobs.show)
app.command("watch")(jobs.watch)
app.command("logs")(jobs.logs)
app.command("cancel")(jobs.cancel)
app.command("plan")(jobs.plan)
app.command("export")(transfers.export)
app.command("algorithms")(catalogue.algorithms)
app.add_typer(transfers.files, name="files")
app.add_typer(data.data, name="data")
app.add_typer(keys.keys, name="keys")


def main() -> None:
    """Runs the command line."""
    try:
        app()
    except ApiError as error:
        print_api_error(err(), error)
        sys.exit(Exit.UNREACHABLE if error.temporary else Exit.REFUSED)
    except ConnectionLost as error:
        err().print(f"{error}; is the service running? planish serve starts one", markup=False)
        sys.exit(Exit.UNREACHABLE)
    except (NotConfigured, BadDocument) as error:
        err().print(str(error), markup=False)
        sys.exit(Exit.REFUSED)
