"""What the quickstart shows at its end: a table, the curves, a transcript before and after."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

mpl.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREY = "#1f5fa8", "#d9741c", "#8a8a8a"
COLUMNS = ("", "accuracy, sampled", "accuracy, greedy", "calls the tool")


def results_table(stages: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """A row a stage; `stages[name][mode]` holds an evaluation's `accuracy` and `tool_rate`."""
    table = Table(*COLUMNS, title="Held-out questions, never trained on", title_justify="left")
    for name, modes in stages.items():
        sampled, greedy = modes["sampled"], modes["greedy"]
        shares = (sampled["accuracy"], greedy["accuracy"], sampled["tool_rate"])
        table.add_row(name, *(f"{share:.0%}" for share in shares))
    return table


def transcript(title: str, sample: Mapping[str, Any]) -> RenderableType:
    """One episode as people read it, with its reward."""
    lines = []
    for message in sample["messages"]:
        parts = [message.get("content") or ""]
        for call in message.get("tool_calls") or []:
            function = call["function"]
            arguments = function["arguments"]
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            parts.append(f"calls {function['name']} with {written}")
        text = " ".join(part for part in parts if part)
        lines.append(Text.assemble((f"{message['role']:>9}  ", "dim"), text))
    reward = sample["reward"]
    lines.append(
        Text.assemble((f"{'reward':>9}  ", "dim"), "none" if reward is None else f"{reward:g}")
    )
    return Panel(Group(*lines), title=title, title_align="left")


def draw_curves(
    path: Path,
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[tuple[str, float, float]],
) -> None:
    """Reward and tool calls over GRPO's steps, and the held-out accuracy of the three models.

    Args:
        path: PNG to write.
        steps: a job's metrics, each with `step`, `reward_mean` and `tool_rate`.
        evaluations: (name, sampled accuracy, greedy accuracy) a model, in order.
    """
    figure, (curves, bars) = plt.subplots(
        1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained"
    )
    numbers = [row["step"] for row in steps]
    curves.plot(numbers, [row["reward_mean"] for row in steps], color=BLUE, label="reward")
    curves.plot(numbers, [row["tool_rate"] for row in steps], color=ORANGE, label="calls the tool")
    curves.set(title="GRPO: training episodes", xlabel="step", ylim=(0, 1.02))
    curves.legend(loc="lower right", frameon=False)

    places = range(len(evaluations))
    for offset, column, color, label in ((-0.2, 1, BLUE, "sampled"), (0.2, 2, GREY, "greedy")):
        heights = [evaluation[column] for evaluation in evaluations]
        drawn = bars.bar(
            [place + offset for place in places], heights, 0.4, color=color, label=label
        )
        bars.bar_label(drawn, labels=[f"{height:.2f}" for height in heights], fontsize=9)
    bars.set(title="Held-out accuracy", ylim=(0, 1.12))
    bars.set_xticks(list(places), [name for name, _, _ in evaluations])
    bars.legend(loc="upper left", frameon=False)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def how_to_go_on(
    console: Console, *, data_dir: Path, job: str, export: Path, picture: Path
) -> None:
    """Paths and commands, one a line, that work as they stand."""
    console.print(f"\n[bold]Curves[/]   {picture}")
    console.print(f"[bold]Weights[/]  {export} (AutoModelForCausalLM, AutoTokenizer)")
    console.print("[bold]Go on[/]")
    console.print(f"  .venv/bin/planish serve --data-dir {data_dir}   # API docs at /docs")
    console.print("  .venv/bin/planish list")
    console.print(f"  .venv/bin/planish show {job}")
