"""`planish serve`: runs the service in this process."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.context import Exit, err
from service.settings import MIB, Settings

_SETTINGS = Settings.model_fields


def serve(
    data_dir: Annotated[
        Path, typer.Option(help="Folder for the database, uploads and jobs; made if absent.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _SETTINGS["host"].default,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = _SETTINGS[
        "port"
    ].default,
    model_root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that jobs may read models from; may be given again."),
    ] = None,
    data_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder that jobs read rows and environments files from; may be given again."
        ),
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(help="How workers reach the service, where not by host and port.")
    ] = None,
    clusters: Annotated[
        Path | None,
        typer.Option(help="YAML file that names the clusters; without it, this machine alone."),
    ] = None,
    max_local_jobs: Annotated[
        int, typer.Option(help="Jobs at once on this machine, without a clusters file.")
    ] = _SETTINGS["max_local_jobs"].default,
    max_upload_mib: Annotated[
        int, typer.Option(help="Largest file that is uploaded, in MiB.")
    ] = _SETTINGS["max_upload_bytes"].default // MIB,
    catalogue_timeout_seconds: Annotated[
        float, typer.Option(help="Limit for one call of the environments' own process.")
    ] = _SETTINGS["catalogue_timeout_seconds"].default,
    database_url: Annotated[
        str | None,
        typer.Option(envvar="PLANISH_DATABASE_URL", help="SQLAlchemy URL; SQLite by default."),
    ] = None,
    traces: Annotated[
        str | None,
        typer.Option(help="Send traces to this OTLP/HTTP receiver, as http://host:4318."),
    ] = None,
    save_connection: Annotated[
        bool, typer.Option(help="Leave address and key for the other commands of this user.")
    ] = True,
    access_log: Annotated[bool, typer.Option(help="Log each request.")] = False,
) -> None:
    """Runs the service. Ctrl-C or SIGTERM ends it; jobs go on and are found again."""
    # Imported here: the service's libraries take a second, and no other command needs them.
    from service.cli.server import run_server

    if traces is not None:
        _check_traces()
    options = {
        "data_dir": data_dir,
        "public_url": public_url,
        "model_roots": tuple(path.absolute() for path in model_root or ()),
        "data_roots": tuple(path.absolute() for path in data_root or ()),
        "clusters_file": None if clusters is None else clusters.absolute(),
        "max_local_jobs": max_local_jobs,
        "max_upload_bytes": max_upload_mib * MIB,
        "catalogue_timeout_seconds": catalogue_timeout_seconds,
        "database_url": database_url,
        "traces_endpoint": traces,
    }
    run_server(host, port, options, save_connection=save_connection, access_log=access_log)


def _check_traces() -> None:
    """Says what to install, where traces are wanted and cannot be made."""
    from service.tracing import check_installed

    try:
        check_installed()
    except ImportError as error:
        err().print(str(error), markup=False)
        raise typer.Exit(Exit.REFUSED) from None
