"""Follows a job: a bar for its steps, the newest reward and loss beside it, its events above."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from service.api.resources import EventResource
from service.spec.layout import Layout

# What is worth a place on the line, in this order.
_SHOWN = {
    "reward_mean": "reward",
    "loss": "loss",
    "tool_rate": "tool",
    "gradient_norm": "grad",
    "learning_rate": "lr",
}
_EVERY_STEPS_WITHOUT_TERMINAL = 10


def metrics_line(values: Mapping[str, Any]) -> str:
    """The main metrics of a step, as `reward 0.512  loss 0.0213`."""
    return "  ".join(
        f"{label} {values[name]:.4g}"
        for name, label in _SHOWN.items()
        if isinstance(values.get(name), int | float)
    )


class Watch:
    """Shows events as they come."""

    def __init__(self, console: Console, job_name: str) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}[/]"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]}", style="dim"),
            TextColumn("{task.fields[metrics]}", style="cyan"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(
            escape(job_name), total=None, phase="waiting", metrics=""
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, event: EventResource) -> None:
        """Shows one event."""
        data = event.data
        if event.kind == "progress":
            self._progress.update(
                self._task,
                completed=data.get("step"),
                total=data.get("total_steps"),
                phase=escape(str(data.get("phase", ""))),
            )
        elif event.kind == "metrics":
            line = metrics_line(data)
            self._progress.update(self._task, metrics=line)
            every = _EVERY_STEPS_WITHOUT_TERMINAL
            if not self._console.is_terminal and (event.step or 0) % every == 0:
                self._print(f"step {event.step}  {line}")
        else:
            text = describe(event)
            if text:
                self._print(text)

    def _print(self, text: str) -> None:
        self._progress.console.print(escape(text))


def describe(event: EventResource) -> str:
    """An event in a line; empty for those that are shown otherwise."""
    data, step = event.data, event.step
    match event.kind:
        case "state":
            reason = f" ({data['reason']})" if data.get("reason") else ""
            return f"{data.get('from') or 'new'} -> {data.get('to')}{reason}"
        case "started":
            layout = data.get("layout")
            shape = f": {Layout.from_json(layout)}" if layout else ""
            resumed = data.get("resumed_from_step")
            after = f", goes on after step {resumed}" if resumed is not None else ""
            return f"attempt {event.attempt} started{shape} on {data.get('device')}{after}"
        case "evaluation":
            names = ("accuracy", "reward_mean", "tool_rate", "loss")
            shown = [
                f"{name} {data[name]:.4g}"
                for name in names
                if isinstance(data.get(name), int | float)
            ]
            return f"step {step}: evaluation ({data.get('mode')}): {'  '.join(shown)}"
        case "checkpoint":
            return f"step {step or data.get('step')}: checkpoint saved"
        case "export":
            return f"step {step or data.get('step')}: exported to {data.get('path')}"
        case "warning":
            return f"warning: {data.get('message')}"
    return ""
