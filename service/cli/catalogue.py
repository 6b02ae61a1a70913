"""Commands about what is installed."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.api.resources import AlgorithmResource
from service.cli.context import out, session_of
from service.cli.jobs import AsJson
from service.cli.rendering import print_json, print_table


def algorithms(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Shows one with its hyperparameters.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the algorithms that a job can name."""
    with session_of(context).client() as client:
        found = client.algorithms() if name is None else client.algorithm(name)
    if as_json:
        print_json(out(), found)
    elif isinstance(found, AlgorithmResource):
        _print_algorithm(out(), found)
    else:
        print_table(out(), _algorithm_table(found))


def _algorithm_table(rows: list[AlgorithmResource]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("TYPE", "LEARNS FROM", "SUMMARY"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(row.type, _learns_from(row), Text(row.summary))
    return table


def _learns_from(row: AlgorithmResource) -> str:
    return "its own episodes" if row.rows is None else f"{row.rows} rows"


def _print_algorithm(console: Console, row: AlgorithmResource) -> None:
    console.print(Text(f"{row.type}: {row.summary}"))
    trained = "a model that gives numbers" if row.head == "value" else "a model that writes tokens"
    console.print(f"[dim]learns from[/] {_learns_from(row)}[dim], trains[/] {trained}")
    if row.documentation:
        console.print(f"[dim]page[/] {row.documentation}")
    table = Table(box=None, pad_edge=False)
    for title in ("FIELD", "DEFAULT", "MEANING"):
        table.add_column(title, no_wrap=title == "FIELD")
    for field, default, meaning in _fields(row.json_schema):
        table.add_row(Text(field), Text(default), Text(meaning))
    console.print(table)


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each hyperparameter."""
    needed = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if name == "type":
            continue
        default = "needed" if name in needed else json.dumps(field.get("default"))
        yield name, default, " ".join(field.get("description", "").split())
