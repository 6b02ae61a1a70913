"""`planish data check`, as a user calls it; the tokens come from another process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from service.cli import data

ROOT = Path(__file__).parents[3]
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def _planish(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from service.cli import main; main()", "data", "check", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_bad_rows_are_listed_and_the_exit_code_is_1(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + '{"messages": "text"}\n')
    done = _planish(str(path))
    assert done.returncode == 1, done.stderr
    assert "line 2: `messages` is a string, not a list" in done.stdout
    assert "conversation: OpenAI chat" in done.stdout


def test_a_file_that_is_not_there_is_2(tmp_path: Path) -> None:
    done = _planish(str(tmp_path / "missing.jsonl"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be read: No such file" in done.stderr


REPORT: dict[str, Any] = {
    "kind": "preference",
    "rows": 1300,
    "accepted": 1278,
    "dropped": 0,
    "truncated": 3,
    "rejected": 22,
    "formats": {"preference: chosen and rejected": 1300},
    "problems": [{"place": "line 7", "message": "[bold]x[/] \x1b[31m", "fix": "do"}] * 20,
    "tokens": 52000,
    "trained_tokens": 9000,
    "lengths": {
        "shortest": 3,
        "median": 20,
        "percentile_95": 60,
        "longest": 80,
        "histogram": [
            {"first": 1, "last": 40, "rows": 1000},
            {"first": 41, "last": 80, "rows": 1},
        ],
    },
    "sample_place": "line 1",
    "sample": [
        [{"text": "Question ", "trained": False}, {"text": "good", "trained": True}],
        [{"text": "Question ", "trained": False}, {"text": "bad", "trained": True}],
    ],
}


def _printed(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    console = Console(
        record=True,
        force_terminal=terminal,
        width=100,
        color_system="standard",
        no_color=False,
        highlight=False,
    )
    monkeypatch.setattr(data, "out", lambda: console)
    data.print_report(REPORT, "/somewhere/rows.jsonl")
    return console.export_text(styles=terminal)


def test_a_report_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _printed(monkeypatch, terminal=True)
    assert "\x1b[32mgood\x1b[0m" in text  # trained tokens are green
    assert "\x1b[2mQuestion \x1b[0m" in text
    assert "\\x1b[31m" in text  # what a file holds commands no terminal
    assert "[bold]x[/]" in text  # and is no markup
    assert "2 more rows are rejected" in text
    assert "█" * data.BAR_WIDTH in text
    assert "3 to 80, half have at most 20, 95% at most 60" in text


def test_a_report_without_colours_marks_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _printed(monkeypatch, terminal=False)
    assert "Question ⟦good⟧" in text
    assert "Question ⟦bad⟧" in text


def test_a_bound_in_tokens_needs_a_tokenizer(tmp_path: Path) -> None:
    done = _planish(str(tmp_path / "x"), "--max-length", "8")
    assert done.returncode == 2
    assert "name the model or its tokenizer" in done.stderr
