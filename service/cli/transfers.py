"""Commands that move files: uploads and exports."""

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from service.cli.context import Exit, err, out, session_of
from service.cli.jobs import AsJson, JobName
from service.cli.rendering import bytes_text, print_json, print_table, when

files = typer.Typer(help="Uploaded files.", no_args_is_help=True)


def export(
    context: typer.Context,
    job: JobName,
    to: Annotated[Path, typer.Option(help="A new or an empty folder.")],
) -> None:
    """Fetches the job's newest Hugging Face export into a folder."""
    with session_of(context).client() as client, _bar(to.name) as advance:
        try:
            written = client.download_export(job, to, on_progress=advance)
        except (FileExistsError, tarfile.TarError) as error:
            err().print(str(error), markup=False)
            raise typer.Exit(Exit.REFUSED) from None
    out().print(str(to), markup=False)
    err().print(f"{len(written)} files, {bytes_text(sum(p.stat().st_size for p in written))}")


@files.command("upload")
def upload(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="The file.", show_default=False)],
    purpose: Annotated[
        str, typer.Option(help="fine-tune (rows to train on) or user_data.")
    ] = "fine-tune",
    as_json: AsJson = False,
) -> None:
    """Uploads a file and prints its id."""
    with session_of(context).client() as client, _bar(path.name) as advance:
        try:
            found = client.upload(path, purpose=purpose, on_progress=advance)
        except OSError as error:
            err().print(f"{path} cannot be read: {error.strerror}", markup=False)
            raise typer.Exit(Exit.REFUSED) from None
    if as_json:
        print_json(out(), found)
    else:
        out().print(found.id, markup=False)


@files.command("list")
def list_files(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Files, at most.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Lists uploaded files, newest first."""
    with session_of(context).client() as client:
        found = list(client.files(limit=limit))
    if as_json:
        print_json(out(), found)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("ID", "NAME", "PURPOSE", "ROWS", "SIZE", "CREATED"):
        table.add_column(name, no_wrap=True)
    for file in found:
        table.add_row(
            file.id,
            escape(file.filename),
            file.purpose,
            "-" if file.lines is None else str(file.lines),
            bytes_text(file.bytes),
            when(file.created_at),
        )
    print_table(out(), table)


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; yields what moves it."""
    console = err()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with progress:
        task = progress.add_task(escape(name), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
