"""`planish data check`: what a file is like as training data. The work is done in another process.

Tokens need torch and transformers, which this program does not import.
"""

import json
import os
import subprocess
import sys
import unicodedata
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from service.cli.context import Exit, err, out
from service.cli.jobs import AsJson
from service.spec.rows.location import is_url

data = typer.Typer(help="Training data.", no_args_is_help=True)

BAR_WIDTH = 40
MAX_SAMPLE_CHARACTERS = 4000


class TooLong(StrEnum):
    """As `data.too_long` of a job."""

    REFUSE = "refuse"
    DROP = "drop"
    TRUNCATE_LEFT = "truncate-left"
    TRUNCATE_RIGHT = "truncate-right"


class Strings(StrEnum):
    """As `data.strings` of a job."""

    CHAT = "chat"
    PLAIN = "plain"


@data.command("check")
def check(
    file: Annotated[str, typer.Argument(help="A path, or s3://BUCKET/KEY.", show_default=False)],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", "--model", help="Folder of the model, or of its tokenizer."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Decides which rows are wanted, such as dpo.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="As training.max_length of a job.")
    ] = None,
    too_long: Annotated[TooLong, typer.Option(help="As data.too_long.")] = TooLong.REFUSE,
    strings: Annotated[Strings, typer.Option(help="As data.strings.")] = Strings.CHAT,
    as_json: AsJson = False,
) -> None:
    """Reads a file of rows and shows what a job would train on; exit code 1 where rows are bad."""
    command = [file, "--too-long", too_long, "--strings", strings]
    for name, value in (
        ("--tokenizer", tokenizer),
        ("--algorithm", algorithm),
        ("--max-length", max_length),
    ):
        command += [] if value is None else [name, str(value)]
    if max_length is not None and tokenizer is None:
        err().print("--max-length counts tokens: name the model or its tokenizer", markup=False)
        raise typer.Exit(Exit.REFUSED)
    if missing := [name for name in ("algorithms", "torch", "transformers") if not find_spec(name)]:
        err().print(
            f"reading rows as training does needs {', '.join(missing)}, not installed here: run it "
            "where the workers' packages are (their image, or a checkout of Planish)",
            markup=False,
        )
        raise typer.Exit(Exit.REFUSED)
    report, code = _ask(command)
    if report is None:
        raise typer.Exit(Exit.REFUSED if code == Exit.REFUSED else Exit.UNREACHABLE)
    if as_json:
        out().print(Text(json.dumps(report, indent=2, ensure_ascii=False)))
    else:
        print_report(report, file)
    raise typer.Exit(code)


def _ask(arguments: list[str]) -> tuple[dict[str, Any] | None, int]:
    """The report of `python -m algorithms.data check`, and its exit code."""
    report: dict[str, Any] | None = None
    console = err()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    # The key of a service is not for the libraries that read a file.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANISH_")}
    command = [sys.executable, "-m", "algorithms.data", "check", *arguments]
    with (
        bar,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=kept
        ) as process,
    ):
        task = bar.add_task("reading", total=None)
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            report = message.get("report", report)
            if "progress" in message:
                seen = message["progress"]
                bar.update(
                    task,
                    description=f"{seen['rows']:,} rows",
                    completed=seen["bytes"],
                    total=seen["total"],
                )
    return report, process.returncode


def print_report(report: dict[str, Any], file: str) -> None:
    """A report of `algorithms.data.check` for people."""
    console = out()
    console.print(f"{file if is_url(file) else os.path.basename(file)}", markup=False)
    console.print(_counts(report))
    if report["lengths"]:
        lengths = report["lengths"]
        console.print(
            f"Tokens of a row: {lengths['shortest']} to {lengths['longest']}, half have at most "
            f"{lengths['median']}, 95% at most {lengths['percentile_95']}"
        )
        console.print(_histogram(lengths))
    for problem in report["problems"]:
        console.print(Text.assemble((problem["place"], "bold"), ": ", _visible(problem["message"])))
        if problem["fix"]:
            console.print(Text(f"  -> {_visible(problem['fix'])}", style="dim"))
    more = report["rejected"] - len(report["problems"])
    if more > 0:
        console.print(f"{more:,} more rows are rejected")
    if report["sample_place"]:
        _print_sample(report)


def _counts(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("rows", f"{report['rows']:,}")
    for name, count in report["formats"].items():
        table.add_row(f"  {name}", f"{count:,}")
    for name in ("accepted", "truncated", "dropped", "rejected"):
        style = "bold red" if name == "rejected" and report[name] else ""
        table.add_row(name, Text(f"{report[name]:,}", style=style))
    if report["tokens"] is not None:
        table.add_row("tokens", f"{report['tokens']:,}")
        table.add_row("trained tokens", f"{report['trained_tokens']:,}")
    return table


def _histogram(lengths: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    most = max(bucket["rows"] for bucket in lengths["histogram"])
    for bucket in lengths["histogram"]:
        width = -(-bucket["rows"] * BAR_WIDTH // most)
        table.add_row(f"{bucket['first']}-{bucket['last']}", f"{bucket['rows']:,}", "█" * width)
    return table


def _print_sample(report: dict[str, Any]) -> None:
    """The first row; what is trained is green, and in brackets where there are no colours."""
    console = out()
    plain = not console.is_terminal
    names = ["chosen", "rejected"] if len(report["sample"]) > 1 else ["as the model sees it"]
    for name, pieces in zip(names, report["sample"], strict=True):
        console.print(
            f"[bold]{report['sample_place']}, {name}[/], trained tokens "
            + ("in ⟦ ⟧:" if plain else "in [green]green[/]:")
        )
        text = Text()
        for piece in pieces:
            shown = _visible(piece["text"])
            if piece["trained"]:
                text.append(f"⟦{shown}⟧" if plain else shown, style="green")
            else:
                text.append(shown, style="dim")
        if len(text) > MAX_SAMPLE_CHARACTERS:
            text.truncate(MAX_SAMPLE_CHARACTERS)
            text.append(" ...")
        console.print(text)


def _visible(text: str) -> str:
    """Text of a file without characters that would command the terminal."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) != "Cc"
        else f"\\x{ord(character):02x}"
        for character in text
    )
