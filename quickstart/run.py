"""A small model learns to use a calculator: SFT, then GRPO, over REST on this machine.

    make quickstart
    make quickstart ARGS="--seed 2"

It starts the service, uploads rows, runs two jobs, compares three models on held-out questions, and
leaves weights, curves and result.json in this folder. Only public calls are used: whatever happens
here can be done by any client of the API.
"""

import argparse
import json
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # so that it runs from the checkout, installed or not

import jobs  # noqa: E402
from data import write_rows  # noqa: E402
from model import write_model_folder  # noqa: E402
from report import draw_curves, how_to_go_on, results_table, transcript  # noqa: E402
from rich.console import Console  # noqa: E402
from server import PeakMemory, running_service  # noqa: E402

from service.api.resources import EventResource, JobResource  # noqa: E402
from service.cli.watching import Watch  # noqa: E402
from service.client import Client  # noqa: E402

OUT = HERE / "out"
RESULT = HERE / "result.json"


def main() -> int:
    """Runs all of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1, choices=range(1000), metavar="0..999")
    parser.add_argument("--held-out", type=int, default=200, help="held-out questions")
    parser.add_argument("--port", type=int, default=0, help="port of the service; 0 finds one")
    asked = parser.parse_args()
    console = Console()
    start = time.monotonic()
    RESULT.unlink(missing_ok=True)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()

    with PeakMemory() as memory:
        run = run_jobs(console, asked)
    if run is None:
        return 1
    result = summarise(run, seconds=time.monotonic() - start, peak=memory.bytes)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    show(console, run, result)
    return 0


class Run:
    """What the jobs said: each job as the API shows it, and its events."""

    def __init__(self, held_out: int) -> None:
        self.held_out = held_out
        self.jobs: list[JobResource] = []
        self.events: list[list[EventResource]] = []
        self.export = OUT / "export"

    def evaluations(self, job: int) -> list[dict[str, Mapping[str, Any]]]:
        """A job's evaluations in order of steps, each by mode."""
        steps: dict[int, dict[str, Mapping[str, Any]]] = {}
        for event in self.events[job]:
            if event.kind == "evaluation" and event.step is not None:
                steps.setdefault(event.step, {})[event.data["mode"]] = event.data
        return [steps[step] for step in sorted(steps)]

    def of_kind(self, job: int, kind: str) -> list[EventResource]:
        """A job's events of one kind."""
        return [event for event in self.events[job] if event.kind == kind]


def run_jobs(console: Console, asked: argparse.Namespace) -> Run | None:
    """Both jobs against a service of our own; None where one of them failed (it has been said)."""
    console.print("[bold]1[/] A model of half a million parameters, a tokenizer, training rows")
    config = write_model_folder(OUT / "model")
    rows = OUT / "train.jsonl"
    count = jobs.SFT_STEPS * jobs.SFT_ROWS
    write_rows(
        rows,
        seed=asked.seed,
        count=count,
        tool_share=jobs.TOOL_SHARE,
        held_out=asked.held_out,
    )
    run = Run(asked.held_out)
    console.print("[bold]2[/] The service, on SQLite and this machine")
    port = asked.port or free_port()
    with (
        running_service(OUT / "service", port=port, model_root=OUT / "model") as (url, key),
        Client(url, key) as client,
    ):
        file = client.upload(rows)
        console.print(f"  {url}: uploaded {file.lines} rows as {file.id}")
        console.print("[bold]3[/] SFT on two data-parallel ranks")
        document = jobs.sft(
            seed=asked.seed,
            config=config,
            tokenizer=OUT / "model",
            file_id=file.id,
            items=asked.held_out,
        )
        if not finish(console, client, run, document):
            return None
        console.print("[bold]4[/] GRPO on two tensor-parallel ranks, from that checkpoint")
        document = jobs.grpo(seed=asked.seed, sft_job=run.jobs[0].id, items=asked.held_out)
        if not finish(console, client, run, document):
            return None
        client.download_export(run.jobs[1].id, run.export)
    return run


def finish(console: Console, client: Client, run: Run, document: Any) -> bool:
    """Submits a job and watches it to its end; False where it did not succeed."""
    job = client.submit(document)
    events: list[EventResource] = []
    with Watch(console, job.name) as watch:
        for event in client.events(job.id):
            events.append(event)
            watch.show(event)
    job = client.job(job.id)
    run.jobs.append(job)
    run.events.append(events)
    if job.state.value != "SUCCEEDED":
        console.print(
            f"[red]{job.name} ended as {job.state.value}[/] ({job.reason}): {job.message}"
        )
        console.print(client.log(job.id).text[-4000:], markup=False)
        return False
    return True


def summarise(run: Run, *, seconds: float, peak: int) -> dict[str, Any]:
    """result.json: shares are between 0 and 1; accuracies without a mode are sampled ones."""
    (base, sft), (_, grpo) = run.evaluations(0), run.evaluations(1)
    return {
        "base_accuracy": base["sampled"]["accuracy"],
        "sft_accuracy": sft["sampled"]["accuracy"],
        "grpo_accuracy": grpo["sampled"]["accuracy"],
        "sft_tool_rate": sft["sampled"]["tool_rate"],
        "grpo_tool_rate": grpo["sampled"]["tool_rate"],
        "sft_greedy_accuracy": sft["greedy"]["accuracy"],
        "grpo_greedy_accuracy": grpo["greedy"]["accuracy"],
        "held_out": run.held_out,
        "hf_max_logit_diff": run.of_kind(1, "export")[-1].data["max_logit_diff"],
        "seconds": round(seconds, 1),
        "peak_rss_bytes": peak,
        "export_dir": str(run.export),
        "jobs": [
            {
                "id": job.id,
                "name": job.name,
                "algorithm": job.algorithm,
                "layout": job.layout.model_dump(),
                "state": job.state.value,
                "attempts": job.attempt_count,
            }
            for job in run.jobs
        ],
    }


def show(console: Console, run: Run, result: Mapping[str, Any]) -> None:
    """The table, a transcript before and after, and where everything is."""
    (base, sft), (_, grpo) = run.evaluations(0), run.evaluations(1)
    picture = OUT / "curves.png"
    steps = [{"step": event.step, **event.data} for event in run.of_kind(1, "metrics")]
    models = {"untrained": base, "after SFT": sft, "after GRPO": grpo}
    draw_curves(
        picture,
        steps,
        [(name, e["sampled"]["accuracy"], e["greedy"]["accuracy"]) for name, e in models.items()],
    )
    before, after = learned_question(run)
    console.print()
    console.print(transcript("Before GRPO", before))
    console.print(transcript("After GRPO", after))
    console.print(results_table(models))
    console.print(
        f"{result['seconds']:.0f} s, at most {result['peak_rss_bytes'] / 2**30:.1f} GiB; "
        f"export equals Megatron to {result['hf_max_logit_diff']:.1e} in its logits"
    )
    how_to_go_on(
        console,
        data_dir=OUT / "service",
        job=run.jobs[1].name,
        export=run.export,
        picture=picture,
    )


def learned_question(run: Run) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Transcripts of one held-out question before and after GRPO: one that was learned, if any.

    Of the few whose transcripts are kept, sampled at temperature 1.
    """
    samples = [event for event in run.of_kind(1, "sample") if event.data["mode"] == "sampled"]
    before = {event.data["item"]: event.data for event in samples if event.step == 0}
    after = {event.data["item"]: event.data for event in samples if event.step != 0}
    gain = {i: (after[i]["reward"] or 0.0) - (before[i]["reward"] or 0.0) for i in before}
    chosen = max(gain, key=gain.__getitem__)
    return before[chosen], after[chosen]


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
