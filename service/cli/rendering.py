"""Jobs, plans and errors as text. What comes from elsewhere is never read as rich markup."""

import itertools
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from service.api.plan_resources import FrozenRankMemory, Plan, Proposal, RankMemory
from service.api.resources import JobResource, JobSummary, Layout
from service.client import ApiError
from service.spec import layout as layouts

_STYLES = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan"}


def print_json(console: Console, value: BaseModel | list[Any]) -> None:
    """A resource, or a list of them, as JSON."""
    if isinstance(value, BaseModel):
        plain: Any = value.model_dump(mode="json")
    else:
        plain = [item.model_dump(mode="json") for item in value]
    console.print(Text(json.dumps(plain, indent=2, ensure_ascii=False)))


def print_api_error(console: Console, error: ApiError) -> None:
    """A problem: its detail, and each field with its fix."""
    console.print(
        f"[bold red]{escape(error.title or str(error.status))}[/]: {escape(error.detail)}"
    )
    for problem in error.errors:
        where = f"[bold]{escape(problem.field)}[/]: " if problem.field else ""
        console.print(f"  {where}{escape(problem.message)}")
        if problem.fix:
            console.print(f"    [dim]->[/] {escape(problem.fix)}")
    if error.status >= 500 and error.request_id:
        console.print(f"  [dim]the service's log has it under {escape(error.request_id)}[/]")


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_STYLES.get(state, ""))


def when(seconds: float | None) -> str:
    """A time as `2026-11-29 18:05:01Z`."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def span(seconds: float | None) -> str:
    """A duration as `1h02m`, `3m20s` or `12s`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def bytes_text(count: int) -> str:
    """A size as `1.4 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def layout_text(layout: Layout) -> str:
    """A layout as `tp2 pp1 dp1`, with whatever else it has."""
    sizes = layout.model_dump(exclude={"world_size"})
    return str(layouts.Layout.from_json(sizes))


def print_table(console: Console, table: Table) -> None:
    """A table, as wide as it is: half of an id is of no use to anybody."""
    anything = console.options.update(max_width=10_000)
    table.width = Measurement.get(console, anything, table).maximum
    console.print(table)


def job_table(jobs: list[JobSummary]) -> Table:
    """A list of jobs."""
    table = Table(box=None, pad_edge=False)
    for name in ("ID", "NAME", "ALGORITHM", "STATE", "LAYOUT", "AGE"):
        table.add_column(name, no_wrap=True)
    now = time.time()
    for job in jobs:
        table.add_row(
            job.id,
            job.name,
            job.algorithm,
            state_text(job.state),
            layout_text(job.layout),
            span(now - job.created_at),
        )
    return table


def print_job(console: Console, job: JobResource) -> None:
    """One job with its attempts."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    state = state_text(job.state)
    if job.reason:
        state.append(f" ({job.reason})")
    table.add_row("job", f"{job.id}  {job.name}")
    table.add_row("state", state)
    if job.message:
        table.add_row("message", Text(job.message))
    table.add_row("algorithm", job.algorithm)
    table.add_row("cluster", f"{job.cluster}, {layout_text(job.layout)}")
    table.add_row("created", when(job.created_at))
    if job.progress is not None:
        total = f" of {job.progress.total_steps}" if job.progress.total_steps else ""
        left = job.progress.remaining_seconds
        rest = f", about {span(left)} left" if left else ""
        table.add_row("progress", f"step {job.progress.step}{total}, {job.progress.phase}{rest}")
    for attempt in job.attempts:
        end = f" - {when(attempt.ended_at)}" if attempt.ended_at else ""
        why = f"  {attempt.reason}: {attempt.message}" if attempt.reason else ""
        line = Text(f"{attempt.state}  {when(attempt.started_at)}{end}{why}")
        table.add_row(f"attempt {attempt.number}", line)
    console.print(table)


def print_plan(console: Console, plan: Plan) -> None:
    """What a job would become."""
    layout = plan.layout
    batches = "micro-batches by length"
    if plan.micro_batch_size is not None:
        batches = f"{plan.micro_batches} micro-batches of {plan.micro_batch_size} on each rank"
    cluster = plan.spec.resources.cluster
    console.print(
        f"{layout_text(layout)}: {layout.world_size} ranks on {cluster}; {batches} a step"
    )
    console.print(f"{plan.parameters:,} parameters")
    console.print(_memory_table(plan.memory_per_rank, "Memory of a rank"))
    for group in plan.groups:
        console.print(
            f"{group.role}: {group.parameters:,} parameters on {_ranks_text(group.world_size)} of "
            f"its own, tp{group.layout.tp} pp{group.layout.pp} dp{group.layout.dp}"
        )
        console.print(_memory_table(group.memory_per_rank, f"Memory of its rank ({group.role})"))
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    if plan.submission is not None:
        console.print(f"What {cluster} would be given ({plan.submission.kind}):", markup=False)
        console.print(plan.submission.text, markup=False, highlight=False, soft_wrap=True)
    if plan.proposals:
        console.print(_proposal_table(plan.proposals))
    console.print("[dim]By formula, at the worst moment. --json shows the whole resolved job.[/]")


def _proposal_table(proposals: list[Proposal]) -> Table:
    """Layouts that fit, fastest first, with what each changes beside `parallel`."""
    table = Table(box=None, pad_edge=False, title="Layouts that fit", title_justify="left")
    for title in ("LAYOUT", "RECOMPUTE", "OFFLOAD", "MEMORY", "STEP", "WHY"):
        table.add_column(title, no_wrap=title != "WHY")
    for one in proposals:
        table.add_row(
            layout_text(one.layout),
            str(one.changes["training"]["recompute"]),
            "yes" if one.changes["optimizer"]["offload"] else "no",
            bytes_text(one.memory.total),
            f"x{one.relative_time:.2f}",
            Text(one.reason),
        )
    return table


_MEMORY_PARTS = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("rollout", "rollout_weights"),
    ("reference", "reference_weights"),
    ("critic", "critic"),
    ("activations", "activations"),
    ("logits", "logits"),
    ("packed rollout", "packed_weights"),
    ("KV cache", "kv_cache"),
    ("total", "total"),
)


def _ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _memory_table(stages: Sequence[RankMemory | FrozenRankMemory], name: str) -> Table:
    """Bytes of a rank, a column for each pipeline stage (equal neighbours share one); what the job
    does not have has no row."""
    sizes = [(stage, [getattr(stage, part, 0) for _, part in _MEMORY_PARTS]) for stage in stages]
    columns = [list(same) for _, same in itertools.groupby(sizes, key=lambda pair: pair[1])]
    table = Table(box=None, pad_edge=False, title=name, title_justify="left")
    table.add_column("STAGE")
    for column in columns:
        first, last = column[0][0].pp_rank, column[-1][0].pp_rank
        table.add_column(str(first) if first == last else f"{first} to {last}", justify="right")
    for row, (title, _) in enumerate(_MEMORY_PARTS):
        parts = [column[0][1][row] for column in columns]
        if any(parts):
            table.add_row(title, *map(bytes_text, parts))
    return table
