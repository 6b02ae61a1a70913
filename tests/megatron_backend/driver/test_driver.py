"""Whole attempts of tiny jobs, with real Ray and real ranks: to the end, or killed on the way."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_backend.checkpoint import contents
from service.spec import Reason, WorkerEvent
from service.spec.layout import Layout
from tests.megatron_backend.driver import tiny_job

pytestmark = pytest.mark.slow

STEPS = 24  # six epochs of 24 rows, 6 rows a step
SPEC = {
    "parallel": {"dp": 2},
    "checkpoint": {"every_steps": 4, "keep_last": 2},
    "training": {"steps": STEPS, "global_batch_size": 6, "max_length": 16},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that ran to its end in one go."""
    folder = tiny_job.write_job(tmp_path_factory.mktemp("jobs") / "finished", **SPEC)
    code = tiny_job.start(folder).wait(240)
    assert code == 0, tiny_job.log_text(folder)
    return folder


def steps_of(metrics: Sequence[WorkerEvent]) -> list[int | None]:
    return [event.step for event in metrics]


def test_a_job_from_start_to_end(finished: Path) -> None:
    assert tiny_job.outcome(finished).status == "succeeded"
    events = tiny_job.events(finished)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    (started,) = tiny_job.events(finished, kind="started")
    assert started.data == {
        "layout": Layout(dp=2).to_json(),
        "world_size": 2,
        "resumed_from_step": None,
        "device": "cpu",
    }
    metrics = tiny_job.events(finished, kind="metrics")
    assert steps_of(metrics) == list(range(1, STEPS + 1))
    assert metrics[-1].data["loss"] < metrics[0].data["loss"] / 2
    assert metrics[-1].data["flops_per_second"] > 0
    assert "mfu" not in metrics[-1].data  # of a CPU no peak is known
    saved = tiny_job.events(finished, kind="checkpoint")
    assert steps_of(saved) == [4, 8, 12, 16, 20, 24]
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [
        "latest",
        "step-00000020",
        "step-00000024",
    ]
    assert "step 3 metrics: " in tiny_job.log_text(finished)
    assert not tiny_job.processes(finished)


def test_the_export_is_a_model_of_transformers(finished: Path) -> None:
    (event,) = tiny_job.events(finished, kind="export")
    assert event.data["max_logit_diff"] < 1e-4
    folder = Path(event.data["path"])
    assert folder == finished / "exports" / f"step-{STEPS:08d}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [0, 1]
    losses = []
    for index in range(tiny_job.ROWS):
        messages = tiny_job.row(index)["messages"]
        ids = torch.tensor(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
        assert tokenizer.decode(ids[-5:]) == messages[1]["content"] + "<|end|>"
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        losses += (-log_probs[range(-6, -1), ids[-5:]]).tolist()
    trained = tiny_job.events(finished, kind="metrics")[-1].data["loss"]
    assert sum(losses) / len(losses) == pytest.approx(trained, rel=0.25)


def test_a_checkpoint_holds_all_that_another_job_needs(finished: Path) -> None:
    folder = finished / "checkpoints" / f"step-{STEPS:08d}" / contents.HUGGING_FACE
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny_job.TEMPLATE
    job = tiny_job.write_job(
        finished.parent / "next",
        training={"steps": 1, "global_batch_size": 6, "max_length": 16},
        checkpoint={"export": False},
    )
    tiny_job.start_from_checkpoint(job, folder.parent)
    assert tiny_job.start(job).wait(240) == 0, tiny_job.log_text(job)
    first = tiny_job.events(job, kind="metrics")[0].data["loss"]
    last = tiny_job.events(finished, kind="metrics")[-1].data["loss"]
    assert first == pytest.approx(last, rel=0.5)  # where the other job left off, not at ln 15

    # Its source may be deleted once it has a checkpoint of its own.
    tiny_job.start_from_checkpoint(job, finished / "checkpoints" / "step-00000004")
    assert tiny_job.start(job, attempt=2).wait(240) == 0, tiny_job.log_text(job, 2)
    (started,) = tiny_job.events(job, 2, kind="started")
    assert started.data["resumed_from_step"] == 1


def test_an_attempt_that_has_ended_is_not_run_again(finished: Path) -> None:
    before = len(tiny_job.events(finished))
    assert tiny_job.start(finished).wait(60) == 0
    assert len(tiny_job.events(finished)) == before


def test_a_stale_attempt_does_not_start(finished: Path) -> None:
    (finished / "fence").write_text("7\n")
    assert tiny_job.start(finished, attempt=5).wait(60) == 2
    assert not (finished / "attempts" / "5" / "outcome.json").exists()
    assert "attempt 7 of this job has taken over" in tiny_job.log_text(finished, 5)


def kill_a_rank_after(job: Path, step: int) -> None:
    """kill -9 of one of two ranks, as soon as a checkpoint of this step is announced."""
    tiny_job.wait_for(lambda: step in steps_of(tiny_job.events(job, kind="checkpoint")))
    ranks = tiny_job.rank_processes(job)
    assert len(ranks) == 2
    ranks[1].kill()


@pytest.mark.long
def test_d03_kill_9_of_a_rank_inside_an_attempt_and_once_too_often(
    finished: Path, tmp_path: Path
) -> None:
    """Each row once an epoch on the way that counts, and the same end as without the kills."""
    job = tiny_job.write_job(tmp_path / "killed", **SPEC, faults={"restarts": 1})
    driver = tiny_job.start(job)
    kill_a_rank_after(job, 4)
    survivors = {process.pid for process in tiny_job.rank_processes(job)}
    tiny_job.wait_for(lambda: tiny_job.events(job, kind="warning"))
    (warning,) = tiny_job.events(job, kind="warning")
    assert warning.data["reason"] == Reason.WORKER_LOST
    assert len(warning.data["ranks"]) == 1
    assert "`faults.restarts` allows 0 more" in warning.data["message"]

    tiny_job.wait_for(lambda: 16 in steps_of(tiny_job.events(job, kind="checkpoint")))
    ranks = tiny_job.rank_processes(job)
    assert len(survivors & {process.pid for process in ranks}) == 1  # it kept its imports
    ranks[0].kill()
    assert driver.wait(240) == 1
    outcome = tiny_job.outcome(job)
    assert (outcome.status, outcome.reason) == ("failed", Reason.WORKER_LOST)
    assert "rank " in outcome.message
    assert not (job / "exports").exists()
    tiny_job.wait_for(lambda: not tiny_job.processes(job), seconds=30)

    (job / "fence").write_text("2\n")  # as the service does
    assert tiny_job.start(job, attempt=2).wait(240) == 0, tiny_job.log_text(job, 2)
    (started,) = tiny_job.events(job, 2, kind="started")
    resumed = started.data["resumed_from_step"]
    assert resumed >= 16
    assert len(tiny_job.events(job, 1, kind="started")) == 1
    first = tiny_job.events(job, 1, kind="metrics")
    second = tiny_job.events(job, 2, kind="metrics")
    assert steps_of(first) == list(range(1, len(first) + 1))  # none is told twice
    way = [event for event in first if event.step <= resumed] + second
    assert steps_of(way) == list(range(1, STEPS + 1))
    spans = [(event.data["data_start"], event.data["data_end"]) for event in way]
    assert spans == [(6 * step, 6 * step + 6) for step in range(STEPS)]
    whole = tiny_job.events(finished, kind="metrics")
    assert [event.data["loss"] for event in way] == [event.data["loss"] for event in whole]
    name = f"exports/step-{STEPS:08d}/model.safetensors"
    expected = load_file(finished / name)
    found = load_file(job / name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.long
def test_sigterm_and_kill_9_of_the_driver_leave_no_process(tmp_path: Path) -> None:
    endless = {**SPEC["training"], "steps": 1_000_000}
    job = tiny_job.write_job(tmp_path / "stopped", training=endless)
    driver = tiny_job.start(job)
    tiny_job.wait_for(lambda: tiny_job.events(job, kind="metrics"))
    everything = tiny_job.processes(job)
    assert {driver.pid, *(rank.pid for rank in tiny_job.rank_processes(job))} < {
        process.pid for process in everything
    }
    for process in everything:  # as a cluster does: ranks and Ray's processes get it too
        process.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 1, tiny_job.log_text(job)
    outcome = tiny_job.outcome(job)
    assert outcome.reason is Reason.PREEMPTED
    assert "stopped by SIGTERM; the step that was under way is done and saved" in outcome.message
    (saved,) = tiny_job.events(job, kind="checkpoint")
    assert saved.step == tiny_job.events(job, kind="metrics")[-1].step
    tiny_job.wait_for(lambda: not tiny_job.processes(job), seconds=60)

    driver = tiny_job.start(job, attempt=2)
    tiny_job.wait_for(lambda: tiny_job.events(job, 2, kind="metrics"))
    assert tiny_job.events(job, 2, kind="metrics")[0].step == saved.step + 1
    driver.kill()
    driver.wait()
    tiny_job.wait_for(lambda: not tiny_job.rank_processes(job), seconds=20)  # the ranks at once,
    tiny_job.wait_for(lambda: not tiny_job.processes(job), seconds=90)  # Ray's agents a bit later
    assert not (job / "attempts" / "2" / "outcome.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no folder"),
        ([".", "--attempt", "0"], "attempts are numbered from 1"),
        ([".", "--attempt", "x"], "invalid int value"),
    ],
)
def test_a_wrong_command(arguments: list[str], message: str, tmp_path: Path) -> None:
    code, output = tiny_job.run_command(arguments, cwd=tmp_path)
    assert code == 64
    assert message in output


def test_a_folder_that_is_no_job(tmp_path: Path) -> None:
    code, output = tiny_job.run_command([str(tmp_path)], cwd=tmp_path)
    assert code == 1
    assert "context.json is not there" in output
    assert tiny_job.outcome(tmp_path).reason is Reason.LAUNCH_FAILED
