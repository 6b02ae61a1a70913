"""Commands about jobs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from service.api.resources import JobResource
from service.cli.context import Exit, err, out, session_of
from service.cli.documents import read_document
from service.cli.rendering import job_table, print_job, print_json, print_plan, print_table
from service.cli.watching import Watch
from service.client import Client

JobFile = Annotated[Path, typer.Argument(help="Job file: YAML or JSON.", show_default=False)]
JobName = Annotated[
    str, typer.Argument(help="Id of the job, or the newest job's name.", show_default=False)
]
# A watched job outlives restarts of the service.
WATCH_PATIENCE_SECONDS = 600.0

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def submit(
    context: typer.Context,
    file: JobFile,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow the job to its end.")
    ] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting twice with one key makes one job.")
    ] = None,
) -> None:
    """Submits a job and prints its id."""
    document = read_document(file)
    patience = WATCH_PATIENCE_SECONDS if watch else 3.0
    with session_of(context).client(patience_seconds=patience) as client:
        job = client.submit(document, idempotency_key=idempotency_key)
        out().print(job.id, markup=False)
        if watch:
            _watch(client, job)
        else:
            err().print(f"[dim]planish watch {job.id}[/]  follows it")


def plan(
    context: typer.Context,
    file: JobFile,
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="GiB of one GPU: proposes layouts that fit.", min=1, max=4096),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs of a machine to propose for.", min=1, max=64)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Machines to propose for.", min=1, max=1024)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows what a job would become, without submitting it."""
    document = read_document(file)
    with session_of(context).client() as client:
        found = client.plan(
            document, gpu_memory_gib=gpu_memory, gpus_per_node=gpus_per_node, nodes=nodes
        )
    print_json(out(), found) if as_json else print_plan(out(), found)


def list_jobs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Jobs, at most.")] = 20,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="Only jobs in this state; may be given again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists jobs, newest first."""
    filters = {
        key: value
        for key, value in (("name", name), ("state", [s.upper() for s in state or ()]))
        if value
    }
    with session_of(context).client() as client:
        found = list(client.jobs(limit=limit, **filters))
    if as_json:
        print_json(out(), found)
    elif found:
        print_table(out(), job_table(found))
    else:
        err().print("no jobs yet: planish submit FILE.yaml")


def show(context: typer.Context, job: JobName, as_json: AsJson = False) -> None:
    """Shows a job with its attempts and progress."""
    with session_of(context).client() as client:
        found = client.job(job)
    print_json(out(), found) if as_json else print_job(out(), found)


def watch(context: typer.Context, job: JobName) -> None:
    """Follows a job to its end; exit code 1 where that is not SUCCEEDED. Ctrl-C leaves it alone."""
    with session_of(context).client(patience_seconds=WATCH_PATIENCE_SECONDS) as client:
        _watch(client, client.job(job))


def cancel(context: typer.Context, job: JobName) -> None:
    """Asks for a job's end."""
    with session_of(context).client() as client:
        found = client.cancel(job)
    if found.ended:
        err().print(f"{found.id} has ended already: {found.state}")
    else:
        err().print(f"{found.id} is being cancelled")


def logs(
    context: typer.Context,
    job: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Which attempt; the newest, or with -f all.")
    ] = None,
) -> None:
    """Prints what the job's processes wrote."""
    console = out()
    with session_of(context).client(patience_seconds=WATCH_PATIENCE_SECONDS) as client:
        if follow:
            for chunk in client.follow_log(job, attempt=attempt):
                console.print(Text(chunk.text), end="")
            return
        chunk = client.log(job, attempt=attempt)
        while chunk.text:
            console.print(Text(chunk.text), end="")
            chunk = client.log(job, attempt=chunk.attempt, after=chunk.next_offset)


def _watch(client: Client, job: JobResource) -> None:
    console = err()
    try:
        with Watch(console, job.name) as shown:
            ended = client.wait(job.id, on_event=shown.show)
    except KeyboardInterrupt:
        console.print(f"{job.id} goes on; [dim]planish watch {job.id}[/] follows it again")
        raise typer.Exit(Exit.INTERRUPTED) from None
    print_job(console, ended)
    if ended.state != "SUCCEEDED":
        console.print(f"[dim]planish logs {ended.id}[/]  shows what it wrote")
        raise typer.Exit(Exit.JOB_FAILED)
    console.print(f"[dim]planish export {ended.id} --to DIR[/]  fetches the model")
