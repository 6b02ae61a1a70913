"""The loop on a real small model: SFT on rows, GRPO on episodes, and what a resume changes."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer
from algorithms.data.chat import ChatFormat
from algorithms.errors import JobFailure
from algorithms.loop import Loop, open_loop, run
from algorithms.protocols import StepResult, Workers
from algorithms.rollout.collector import Collector
from algorithms.rollout.questions import Questions
from algorithms.rollout.source import EpisodeSource
from service.spec import FaultSpec, JobContext, JobSpec, Reason, ResolvedModel, algorithm_specs
from tests.algorithms.letters import Letters, LettersConfig
from tests.algorithms.tiny_policy import EventList, FolderCheckpoints, TinyPolicy, tiny_model

TRAIN, VALIDATION = "file-" + "a" * 16, "file-" + "b" * 16


class Killed(Exception):
    """Stands for a process that is gone."""


class DyingPolicy(TinyPolicy):
    """Is killed in the middle of its update number `dies_at`, or never; updates of the numbers in
    `breaks_at` are not taken, and those in `skips` train nothing. Its two copies of a tied weight
    differ by `apart`."""

    dies_at: int | None = None
    breaks_at: Collection[int] = ()
    spikes: Literal["norm", "loss"] | None = None
    skips: Collection[int] = ()
    apart: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits: list[tuple[float, float]] = []

    def train_step(self, batch: Batch, normalizer: Normalizer, **kwargs: Any) -> StepResult:
        number = len(self.rates) + 1
        self.limits.append((kwargs["norm_limit"], kwargs["loss_limit"]))
        if number in self.breaks_at or number in self.skips:
            self.rates.append(kwargs["learning_rate"])
            loss = norm = 1.0
            if number in self.breaks_at:
                loss, norm = {"norm": (1.0, 1e9), "loss": (1e9, 1.0)}.get(
                    self.spikes or "", (math.nan, math.nan)
                )
            finite = math.isfinite(norm)
            return StepResult(loss=loss, gradient_norm=norm, metrics={}, finite=finite)
        result = super().train_step(batch, normalizer, **kwargs)
        if len(self.rates) == self.dies_at:
            raise Killed
        return result

    def tied_difference(self) -> float | None:
        return self.apart


def _context(spec: dict[str, Any], files: dict[str, str] | None = None) -> JobContext:
    base = {"name": "test", "model": {"path": "/model"}}
    return JobContext(
        job_id="job-1",
        spec=JobSpec.model_validate({**base, **spec}),
        dp=1,
        model=ResolvedModel(kind="random", config={}, tokenizer="/model"),
        files=files or {},
    )


def _policy(
    context: JobContext, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0
) -> DyingPolicy:
    return DyingPolicy(
        tiny_model(len(tokenizer), seed),
        load_algorithm(context.spec.algorithm),
        stop_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        temperature=context.spec.rollout.temperature,
        max_length=context.spec.training.max_length,
    )


def _workers(policy: TinyPolicy, folder: Path, *, generator: bool = True) -> Workers:
    folder.mkdir(exist_ok=True)
    return Workers(
        train=policy,
        generator=policy if generator else None,
        checkpoints=FolderCheckpoints(folder, policy),
    )


def _rows(path: Path, count: int) -> str:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} + 1?"},
                {"role": "assistant", "content": f"It is {i + 1}."},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _sft(tmp_path: Path, **training: Any) -> JobContext:
    return _context(
        {
            "algorithm": {"type": "sft"},
            "data": {"train": TRAIN, "validation": VALIDATION},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "schedule": "cosine"},
            "training": {"global_batch_size": 4, "max_length": 64, **training},
            "checkpoint": {"every_steps": 3},
        },
        {
            TRAIN: _rows(tmp_path / "train.jsonl", 10),
            VALIDATION: _rows(tmp_path / "validation.jsonl", 3),
        },
    )


def test_sft_learns_and_says_what_it_did(tmp_path: Path, chatml: PreTrainedTokenizerFast) -> None:
    context = _sft(tmp_path, steps=30)
    policy, recorder = _policy(context, chatml), EventList()
    assert run(context, _workers(policy, tmp_path / "c", generator=False), chatml, recorder) == 30
    metrics = recorder.of("metrics")
    assert [step for kind, step, _ in recorder.events if kind == "metrics"] == list(range(1, 31))
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"]
    assert set(metrics[0]) == {
        *("loss", "gradient_norm", "learning_rate", "entropy", "tokens", "samples"),
        *("data_epoch", "data_start", "data_end", "seconds_data", "seconds_update"),
    }
    # Which rows each step saw: one step goes on where the last ended.
    assert [(m["data_start"], m["data_end"]) for m in metrics] == [
        (4 * i, 4 * i + 4) for i in range(30)
    ]
    assert [m["data_epoch"] for m in metrics[:6]] == [0, 0, 0, 1, 1, 2]
    first, last = recorder.of("evaluation")
    assert (first["mode"], first["items"], last["mode"]) == ("validation", 3, "validation")
    assert last["loss"] < 0.5 * first["loss"]
    assert policy.rates[:2] == pytest.approx([0.005, 0.01])
    assert policy.rates[-1] == pytest.approx(0.001)
    assert recorder.of("progress")[-1]["total_steps"] == 30


def test_epochs_become_steps(tmp_path: Path, chatml: PreTrainedTokenizerFast) -> None:
    context = _sft(tmp_path, epochs=2)  # 20 rows in batches of 4
    workers = _workers(_policy(context, chatml), tmp_path / "c", generator=False)
    assert run(context, workers, chatml, EventList()) == 5


def test_d03_a_resumed_sft_job_is_the_uninterrupted_one(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _sft(tmp_path, steps=8)
    whole, events = _policy(context, chatml), EventList()
    run(context, _workers(whole, tmp_path / "whole", generator=False), chatml, events)

    killed, before = _policy(context, chatml), EventList()
    killed.dies_at = 6
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        run(context, _workers(killed, folder, generator=False), chatml, before)
    resumed, after = _policy(context, chatml, seed=99), EventList()
    assert run(context, _workers(resumed, folder, generator=False), chatml, after) == 8
    assert _same_weights(whole, resumed)
    steps = [step for kind, step, _ in after.events if kind == "metrics"]
    assert steps == [4, 5, 6, 7, 8]
    assert _timeless(after.of("metrics")) == _timeless(events.of("metrics"))[3:]


def test_a_checkpoint_from_before_algorithms_had_a_state_is_gone_on_from(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _sft(tmp_path, steps=3)
    run(context, _workers(_policy(context, chatml), tmp_path / "c"), chatml, EventList())
    file = tmp_path / "c" / "00000003.json"
    state = json.loads(file.read_text())
    del state["algorithm"]
    file.write_text(json.dumps(state))
    longer = _sft(tmp_path, steps=4)
    assert run(longer, _workers(_policy(longer, chatml), tmp_path / "c"), chatml, EventList()) == 4


def test_a_finished_job_does_nothing_more(tmp_path: Path, chatml: PreTrainedTokenizerFast) -> None:
    context = _sft(tmp_path, steps=3)
    run(context, _workers(_policy(context, chatml), tmp_path / "c"), chatml, EventList())
    again, recorder = _policy(context, chatml), EventList()
    assert run(context, _workers(again, tmp_path / "c"), chatml, recorder) == 3
    assert again.rates == []
    assert recorder.events == []


def test_a_bad_row_fails_the_job_before_the_first_step(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _sft(tmp_path, steps=3)
    with open(context.files[TRAIN], "a") as file:
        file.write('{"messages": "text"}\n')
    policy = _policy(context, chatml)
    with pytest.raises(JobFailure, match=rf"data.train \({TRAIN}\): line 11: `messages`") as caught:
        run(context, _workers(policy, tmp_path / "c"), chatml, EventList())
    assert caught.value.reason is Reason.USER_ERROR
    assert policy.log == []


def test_dropped_rows_are_said(tmp_path: Path, chatml: PreTrainedTokenizerFast) -> None:
    context = _sft(tmp_path, steps=1)
    long = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "x"}]
    with open(context.files[TRAIN], "a") as file:
        file.write(json.dumps({"messages": long}) + "\n")
    data = {**context.spec.model_dump(), "data": {"train": TRAIN, "too_long": "drop"}}
    context = context.model_copy(update={"spec": JobSpec.model_validate(data)})
    recorder = EventList()
    run(context, _workers(_policy(context, chatml), tmp_path / "c"), chatml, recorder)
    (warning,) = recorder.of("warning")
    assert (warning["dropped"], warning["truncated"]) == (1, 0)


def test_a_loss_that_is_not_a_number_ends_the_job(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _sft(tmp_path, steps=3)
    policy, recorder = _policy(context, chatml), EventList()
    policy.breaks_at = {2, 3}  # the second step, and its second run
    with pytest.raises(JobFailure, match=r"step 2: the loss is nan .* no passing fault") as caught:
        run(context, _workers(policy, tmp_path / "c"), chatml, recorder)
    assert caught.value.reason is Reason.NAN_LOSS
    assert len(recorder.of("metrics")) == 1


def _with_faults(context: JobContext, **faults: Any) -> JobContext:
    spec = context.spec.model_copy(update={"faults": FaultSpec.model_validate(faults)})
    return context.model_copy(update={"spec": spec})


def test_a_passing_fault_is_told_and_changes_nothing(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _sft(tmp_path, steps=4)
    whole, calm = _policy(context, chatml), EventList()
    run(context, _workers(whole, tmp_path / "whole"), chatml, calm)
    policy, recorder = _policy(context, chatml), EventList()
    policy.breaks_at = {2}
    run(context, _workers(policy, tmp_path / "c"), chatml, recorder)
    (warning,) = recorder.of("warning")
    assert warning["transient"] is True
    assert "step 2: the loss is nan" in warning["message"]
    assert _same_weights(whole, policy)
    assert _timeless(recorder.of("metrics")) == _timeless(calm.of("metrics"))


@pytest.mark.parametrize("spikes", [None, "norm", "loss"])
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_step_that_goes_wrong_is_left_out(
    policy: str,
    spikes: Literal["norm", "loss"] | None,
    tmp_path: Path,
    chatml: PreTrainedTokenizerFast,
) -> None:
    """The weights are those of a job whose batch of that step trains nothing."""
    plan = {"on_spike" if spikes else "on_nan": policy, "spike_window": 2}
    context = _with_faults(_sft(tmp_path, steps=6), **plan)
    sick, recorder = _policy(context, chatml), EventList()
    sick.spikes = spikes
    sick.breaks_at = {5, 6}  # step 5, twice; the last checkpoint is of step 3
    run(context, _workers(sick, tmp_path / "c"), chatml, recorder)
    (warning,) = recorder.of("warning")
    assert (warning["transient"], warning["policy"]) == (False, policy)
    assert ("goes back to step 3" in warning["message"]) == (policy == "rewind")

    healthy = _policy(context, chatml)
    healthy.skips = {5}
    run(context, _workers(healthy, tmp_path / "healthy"), chatml, EventList())
    assert _same_weights(sick, healthy)
    steps = [step for kind, step, _ in recorder.events if kind == "metrics"]
    again = [4] if policy == "rewind" else []  # a recorder of a job leaves it out
    assert steps == [1, 2, 3, 4, *again, 5, 6]
    assert [m["data_start"] for m in recorder.of("metrics")[-2:]] == [16, 20]
    assert [m.get("left_out") for m in recorder.of("metrics")[-2:]] == [1, None]


@pytest.mark.parametrize("type_", ["sft", "grpo"])
def test_steps_are_tried_under_the_limits(
    type_: str, tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    """Of losses only where one step's can be set beside another's; and a run in which nothing is a
    spike is, to the bit, the one in which nobody looks."""
    context = _sft(tmp_path, steps=3) if type_ == "sft" else _grpo(steps=3)
    found, events = [], []
    for faults in ({"on_spike": "stop", "spike_window": 2, "spike_factor": 50.0}, {}):
        policy, recorder = _policy(context, chatml), EventList()
        judged, folder = _with_faults(context, **faults), tmp_path / f"c{len(found)}"
        if type_ == "sft":
            run(judged, _workers(policy, folder), chatml, recorder)
        else:
            _letters_loop(judged, policy, chatml, folder, recorder, Letters()).run()
        found.append(policy)
        events.append(recorder.of("metrics"))
    watched, calm = found
    rows = events[0]
    norm = 50.0 * (rows[0]["gradient_norm"] + rows[1]["gradient_norm"]) / 2
    loss = 5.0 * (rows[0]["loss"] + rows[1]["loss"]) / 2 if type_ == "sft" else math.inf
    assert watched.limits[:2] == calm.limits[:2] == [(math.inf, math.inf)] * 2
    assert watched.limits[2] == (pytest.approx(norm), pytest.approx(loss))
    assert calm.limits[2] == (math.inf, math.inf)
    assert _same_weights(watched, calm)
    assert _timeless(events[0]) == _timeless(events[1])


class SlowCheckpoints(FolderCheckpoints):
    """A save is on its way until it is waited for, and given up by `load_latest`."""

    _under_way: Callable[[], None] | None = None

    def save(self, *args: Any, **kwargs: Any) -> None:
        self.drain()
        self._under_way = partial(super().save, *args, **kwargs)

    def drain(self) -> None:
        if self._under_way is not None:
            self._under_way()
        self._under_way = None

    def load_latest(self) -> Mapping[str, Any] | None:
        self._under_way = None
        return super().load_latest()


def test_a_rewind_waits_for_the_checkpoint_that_is_on_its_way(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _with_faults(_sft(tmp_path, steps=6), on_nan="rewind")
    policy, recorder = _policy(context, chatml), EventList()
    policy.breaks_at = {4, 5}  # the step after the first checkpoint, twice
    workers = _workers(policy, tmp_path / "c")
    checkpoints = SlowCheckpoints(tmp_path / "c", policy)
    assert run(context, replace(workers, checkpoints=checkpoints), chatml, recorder) == 6
    (warning,) = recorder.of("warning")
    assert "goes back to step 3" in warning["message"]


def test_a_rewind_without_a_checkpoint_leaves_the_step_out(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _with_faults(_sft(tmp_path, steps=3), on_nan="rewind")
    policy, recorder = _policy(context, chatml), EventList()
    policy.breaks_at = {2, 3}
    assert run(context, _workers(policy, tmp_path / "c"), chatml, recorder) == 3
    assert "it is left out" in recorder.of("warning")[0]["message"]
    metrics = recorder.of("metrics")
    assert [m.get("left_out") for m in metrics] == [None, 1, None]
    # No row is drawn twice: the data goes on where it was, and not from the start.
    assert [m["data_start"] for m in metrics] == [0, 4, 8]


def test_steps_that_are_left_out_count_without_a_checkpoint_too(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _with_faults(_sft(tmp_path, steps=4), on_nan="rewind", max_skipped=1)
    policy, recorder = _policy(context, chatml), EventList()
    policy.breaks_at = {1, 2, 3, 4}  # the first two steps
    with pytest.raises(JobFailure, match="2 steps in a row went wrong"):
        run(context, _workers(policy, tmp_path / "c"), chatml, recorder)


def test_a_loop_that_lost_its_workers_goes_on_from_the_checkpoint(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    """As after ranks were started anew: the same loop, and a model as it was at the start."""
    context = _sft(tmp_path, steps=8)
    whole, calm = _policy(context, chatml), EventList()
    run(context, _workers(whole, tmp_path / "whole", generator=False), chatml, calm)
    policy, recorder = _policy(context, chatml), EventList()
    loop = open_loop(context, _workers(policy, tmp_path / "c", generator=False), chatml, recorder)
    for dies_at, saved in ((2, 0), (6, 3)):  # before the first checkpoint, and after it
        policy.dies_at, policy.rates = dies_at, []
        with pytest.raises(Killed):
            loop.run()
        policy.model.load_state_dict(tiny_model(len(chatml)).state_dict())
        policy.optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0)
        assert sorted((tmp_path / "c").glob("*.json"))[-1:] == (
            [tmp_path / "c" / f"{saved:08d}.json"] if saved else []
        )
    policy.dies_at = None
    assert loop.run() == 8
    assert _same_weights(whole, policy)
    assert _timeless(recorder.of("metrics"))[-5:] == _timeless(calm.of("metrics"))[3:]


@pytest.mark.parametrize(("apart", "told"), [(None, 0), (0.0, 0), (0.25, 2)])
def test_e08_copies_of_a_tied_weight_are_compared_at_every_save(
    apart: float | None, told: int, tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _sft(tmp_path, steps=7)  # saved at 3 and 6; the end is saved too, and not compared
    policy, recorder = _policy(context, chatml), EventList()
    policy.apart = apart
    run(context, _workers(policy, tmp_path / "c"), chatml, recorder)
    found = {m["data_end"] // 4: m.get("tied_difference") for m in recorder.of("metrics")}
    assert found == {step: apart if step in (3, 6) else None for step in range(1, 8)}
    warnings = [(step, data) for kind, step, data in recorder.events if kind == "warning"]
    assert [step for step, _ in warnings] == [3, 6][:told]
    for step, data in warnings:
        assert data["message"].startswith(f"step {step}: the copies of the tied embedding")
        assert "differ by up to 0.25" in data["message"]


def test_a_job_that_is_told_to_end_finishes_its_step_and_saves(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _sft(tmp_path, steps=8)
    whole = _policy(context, chatml)
    run(context, _workers(whole, tmp_path / "whole"), chatml, EventList())
    told = JobFailure(Reason.PREEMPTED, "stopped by SIGTERM")
    policy = _policy(context, chatml)
    loop = open_loop(
        context,
        _workers(policy, tmp_path / "c"),
        chatml,
        EventList(),
        stop=lambda: told if len(policy.rates) == 5 else None,
    )
    with pytest.raises(JobFailure) as caught:
        loop.run()
    assert caught.value is told
    resumed, after = _policy(context, chatml, seed=99), EventList()
    run(context, _workers(resumed, tmp_path / "c"), chatml, after)
    assert [step for kind, step, _ in after.events if kind == "metrics"] == [6, 7, 8]
    assert _same_weights(whole, resumed)


def _grpo(steps: int, **fields: Any) -> JobContext:
    return _context(
        {
            "algorithm": {"type": "grpo", "group_size": 4, **fields},
            "environment": {"id": "tools/calculator", "config": _CHAIN_SUM},
            "rollout": {"max_new_tokens": 6, "temperature": 1.0},
            "optimizer": {"learning_rate": 0.02},
            "training": {"steps": steps, "global_batch_size": 16, "max_length": 600},
            "checkpoint": {"every_steps": 2},
            "evaluation": {"items": 5},
        }
    )


_CHAIN_SUM = {"questions": {"id": "reasoning_gym/chain_sum", "config": {}}}


def _letters_loop(
    context: JobContext,
    policy: TinyPolicy,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    recorder: EventList,
    environment: Letters,
) -> Loop:
    """The loop as `run` builds it, on an environment that random answers can learn from."""
    chat = ChatFormat(tokenizer)
    collector = Collector(
        environment=environment,
        config=LettersConfig(),
        max_turns=1,
        generator=policy,
        chat=chat,
        max_new_tokens=context.spec.rollout.max_new_tokens,
        timeout_seconds=5.0,
    )
    questions = Questions(environment, LettersConfig(), seed=1)
    return Loop(
        context=context,
        workers=_workers(policy, folder),
        recorder=recorder,
        algorithm=load_algorithm(context.spec.algorithm),
        source=EpisodeSource(context, chat, collector, questions),
        evaluator=None,
        validation=None,
        padding_id=chat.padding_id,
    )


def test_grpo_raises_the_reward(tmp_path: Path, chatml: PreTrainedTokenizerFast) -> None:
    context = _grpo(steps=25)
    policy, recorder = _policy(context, chatml), EventList()
    _letters_loop(context, policy, chatml, tmp_path / "c", recorder, Letters()).run()
    rewards = [m["reward_mean"] for m in recorder.of("metrics")]
    assert sum(rewards[-3:]) / 3 > 0.4 > 0.2 > sum(rewards[:3]) / 3
    metrics = recorder.of("metrics")[0]
    assert set(metrics) == {
        *("loss", "gradient_norm", "learning_rate", "tokens", "samples", "entropy"),
        *("ratio_clip_fraction", "ratio_deviation", "approx_kl"),
        *("rollout_kl", "rollout_ratio_deviation"),
        *("episodes", "episodes_failed", "episodes_unscored", "reward_mean", "reward_std"),
        *("tool_rate", "malformed_tool_rate", "truncated_rate", "policy_tokens_mean"),
        *("unfinished_rate", "groups_drawn", "groups_without_spread", "groups_masked"),
        *("groups_unscored", "groups_flat_rate", "batches_drawn"),
        *("pass_at_1", "pass_at_2", "pass_at_4"),
        "environment_letters",
        *(f"seconds_{p}" for p in ("rollout", "reward", "advantage", "update", "sync")),
    }
    assert policy.log[:4] == ["sync 0", "generate", "train", "sync 1"]
    # A13: trainer and generator compute the same function, at every step.
    assert max(m["rollout_ratio_deviation"] for m in recorder.of("metrics")) < 1e-4


@pytest.mark.parametrize("rule", [None, {"max_batches": 3}])
def test_a34_a_resumed_grpo_job_is_the_uninterrupted_one(
    rule: dict[str, int] | None, tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _grpo(steps=5, dynamic_sampling=rule)
    whole, events = _policy(context, chatml), EventList()
    _letters_loop(context, whole, chatml, tmp_path / "whole", events, Letters()).run()
    killed = _policy(context, chatml)
    killed.dies_at = 4
    loop = _letters_loop(context, killed, chatml, tmp_path / "k", EventList(), Letters())
    with pytest.raises(Killed):
        loop.run()
    resumed, after = _policy(context, chatml, seed=99), EventList()
    _letters_loop(context, resumed, chatml, tmp_path / "k", after, Letters()).run()
    assert resumed.log[0] == "sync 2"
    batches = [m["batches_drawn"] for m in events.of("metrics")]
    assert max(batches[:2]) > 1 if rule else batches == [1] * 5
    assert _same_weights(whole, resumed)
    assert _timeless(after.of("metrics")) == _timeless(events.of("metrics"))[2:]


def test_after_a_rewind_samples_are_of_the_weights_that_it_went_back_to(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _with_faults(_grpo(steps=4), on_nan="rewind")
    policy, recorder = _policy(context, chatml), EventList()
    policy.breaks_at = {4, 5}  # step 4, twice; the last checkpoint is of step 2
    _letters_loop(context, policy, chatml, tmp_path / "c", recorder, Letters()).run()
    assert "goes back to step 2" in recorder.of("warning")[0]["message"]
    # Steps 3 and 4, then step 2 again, from where 3 is taken anew.
    assert policy.log[7:15] == [
        *("generate", "train", "sync 3", "generate", "sync 2", "generate", "train", "sync 3"),
    ]
    deviations = [m.get("rollout_ratio_deviation", 0.0) for m in recorder.of("metrics")]
    assert max(deviations) < 1e-4


def test_log_probs_are_computed_only_where_the_algorithm_asks(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _grpo(steps=2, updates_per_rollout=2, kl_coef=0.1)
    policy, recorder = _policy(context, chatml), EventList()
    _letters_loop(context, policy, chatml, tmp_path / "c", recorder, Letters()).run()
    step = ["generate", "log_probs policy", "log_probs reference", "train", "train"]
    assert policy.log[1:7] == [*step, "sync 1"]
    first, second = recorder.of("metrics")
    assert "seconds_logprobs" in first
    assert first["kl"] > 0  # the second update is measured after the first
    assert second["kl"] > first["kl"]
    assert first["ratio_deviation"] > 0


def test_an_unscored_or_failed_episode_is_not_trained(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    class Faulty(Letters):
        def items(self, config: Any, *, seed: int, count: int) -> Any:
            items = [dict(item) for item in super().items(config, seed=seed, count=count)]
            for i, item in enumerate(items):
                item.update([{"fault": "step"}, {"rewards": [None]}, {}, {}][i % 4])
            return items

    context = _grpo(steps=1)
    policy, recorder = _policy(context, chatml), EventList()
    _letters_loop(context, policy, chatml, tmp_path / "c", recorder, Faulty()).run()
    (metrics,) = recorder.of("metrics")
    assert (metrics["episodes_failed"], metrics["episodes_unscored"]) == (4, 4)
    assert metrics["samples"] == 8
    (warning,) = recorder.of("warning")
    assert warning["errors"] == {"ZeroDivisionError": 4}


def test_a_real_environment_is_played_and_evaluated_on_held_out_questions(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _grpo(steps=1)
    policy, recorder = _policy(context, chatml), EventList()
    assert run(context, _workers(policy, tmp_path / "c"), chatml, recorder) == 1
    modes = [(e["mode"], e["items"], e["error_count"]) for e in recorder.of("evaluation")]
    assert modes == [("sampled", 5, 0), ("greedy", 5, 0)] * 2
    samples = recorder.of("sample")
    questions = {(sample["item"], json.dumps(sample["messages"][0])) for sample in samples}
    assert (len(samples), len(questions)) == (20, 5)
    assert 0.0 <= recorder.of("evaluation")[0]["accuracy"] <= 1.0


def test_a_batch_that_is_no_whole_number_of_groups_is_refused(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    context = _grpo(steps=1, group_size=5)
    with pytest.raises(JobFailure, match="multiple of the group size 5") as caught:
        run(context, _workers(_policy(context, chatml), tmp_path / "c"), chatml, EventList())
    assert caught.value.reason is Reason.USER_ERROR


def test_a_tokenizer_without_a_template_is_refused(
    tmp_path: Path, chatml: PreTrainedTokenizerFast
) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=chatml.backend_tokenizer)
    context = _sft(tmp_path, steps=1)
    workers = _workers(_policy(context, chatml), tmp_path / "c")
    with pytest.raises(JobFailure, match=r"the model's tokenizer: .* no chat template"):
        run(context, workers, bare, EventList())


def test_no_algorithm_s_name_is_in_the_loop() -> None:
    source = Path(run.__code__.co_filename).read_text().lower()
    for name, spec in algorithm_specs().items():
        assert name not in source
        assert spec.__name__.lower() not in source


def _same_weights(one: TinyPolicy, other: TinyPolicy) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("seconds_")} for row in metrics]
