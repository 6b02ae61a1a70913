"""Which steps count as wrong, and what is done about them."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.errors import JobFailure
from algorithms.faults import Fault, StepGuard, StepRefused
from algorithms.protocols import StepResult, Trial
from service.spec import FaultSpec, Reason, algorithm_specs

NORMS = st.floats(min_value=1e-6, max_value=1e6)


def result(norm: float, loss: float = 1.0) -> StepResult:
    finite = math.isfinite(norm) and math.isfinite(loss)
    return StepResult(loss=loss, gradient_norm=norm, metrics={}, finite=finite)


def guard(*, losses: bool = False, **fields: Any) -> StepGuard:
    return StepGuard(FaultSpec.model_validate(fields), losses=losses)


def refused(step: int, fault: Fault = Fault.NOT_FINITE) -> StepRefused:
    return StepRefused(step, fault, result(math.nan), result(math.nan))


@pytest.mark.parametrize("wrong", [result(math.nan), result(math.inf), result(1.0, math.nan)])
def test_what_is_no_number_is_a_fault_from_the_first_step_on(wrong: StepResult) -> None:
    assert guard().fault(wrong) is Fault.NOT_FINITE
    assert guard().fault(result(1e30)) is None


def test_a_spike_is_measured_against_the_median_of_the_window() -> None:
    watch = guard(on_spike="skip", spike_factor=10, spike_window=3)
    for norm in (1.0, 2.0):
        assert watch.norm_limit == math.inf  # too few steps to know what is usual
        watch.took(result(norm))
    watch.took(result(100.0))
    assert watch.norm_limit == 20.0
    assert watch.fault(result(20.0)) is None
    assert watch.fault(result(20.1)) is Fault.SPIKE
    watch.took(result(3.0))  # the first one leaves the window: 2, 100, 3
    assert watch.norm_limit == 30.0


def test_steps_with_nothing_to_learn_from_are_not_what_is_usual() -> None:
    """Else a median of 0 would make a spike of every other step."""
    watch = guard(on_spike="stop", spike_factor=10, spike_window=3)
    for norm in (1.0, 2.0, 3.0, 0.0, 0.0, 0.0):
        watch.took(result(norm))
    assert watch.norm_limit == 20.0
    assert watch.fault(result(0.0)) is None


def test_a_loss_that_jumps_with_a_usual_norm_is_a_spike_too() -> None:
    watch = guard(losses=True, on_spike="skip", spike_loss_factor=4, spike_window=3)
    for loss in (1.0, 2.0, 0.0, 30.0):  # one of 0 says nothing of what is usual
        assert watch.loss_limit == math.inf
        assert watch.fault(result(1.0, 1e30)) is None
        watch.took(result(1.0, loss))
    assert watch.loss_limit == 8.0
    assert watch.fault(result(1.0, 8.0)) is None
    assert watch.fault(result(1.0, 8.1)) is Fault.SPIKE
    watch.took(result(1.0, 3.0))  # the first one leaves the window: 2, 30, 3
    assert watch.loss_limit == 12.0


@pytest.mark.parametrize(
    ("losses", "on_spike"), [(False, "skip"), (True, "ignore")], ids=["incomparable", "ignored"]
)
def test_no_loss_is_a_spike_where_losses_are_not_judged(losses: bool, on_spike: str) -> None:
    watch = guard(losses=losses, on_spike=on_spike, spike_window=2)
    for _ in range(4):
        watch.took(result(1.0, 1.0))
    assert watch.loss_limit == math.inf
    assert watch.fault(result(1.0, 1e30)) is None


def test_losses_are_judged_of_all_but_policy_gradients_and_what_has_no_bound() -> None:
    judged = {"sft", "dpo", "simpo", "orpo", "kto", "reward_model", "distillation"}
    model = {"source": {"path": "/model"}}
    fields = {"distillation": {"teacher_model": model}}
    for name, spec in algorithm_specs().items():
        found = spec.model_validate({"type": name, **fields.get(name, {})})
        assert found.comparable_loss == (name in judged), name
    robust = {"type": "dpo", "loss": "robust", "label_smoothing": 0.1}
    assert not algorithm_specs()["dpo"].model_validate(robust).comparable_loss


@given(norms=st.lists(NORMS, max_size=20), factor=st.floats(1.01, 100), window=st.integers(2, 8))
def test_no_step_up_to_the_factor_times_the_smallest_of_the_window_is_a_spike(
    norms: list[float], factor: float, window: int
) -> None:
    watch = guard(on_spike="stop", spike_factor=factor, spike_window=window)
    for norm in norms:
        watch.took(result(norm))
    last = norms[-window:]
    if len(last) < window:
        assert watch.norm_limit == math.inf
    else:
        assert min(last) * factor * 0.999 <= watch.norm_limit <= max(last) * factor * 1.001


@given(norms=st.lists(NORMS, max_size=12), left_out=st.sets(st.integers(1, 50), max_size=5))
def test_a_resumed_guard_judges_as_the_uninterrupted_one(
    norms: list[float], left_out: set[int]
) -> None:
    def judgement(watch: StepGuard) -> tuple[float, float, set[int]]:
        return watch.norm_limit, watch.loss_limit, watch.left_out

    whole = guard(losses=True, on_spike="skip", spike_window=4)
    for norm in norms:
        whole.took(result(norm, 2 * norm))
    whole.left_out |= left_out
    resumed = guard(losses=True, on_spike="skip", spike_window=4)
    resumed.took(result(123.0))
    state = json.loads(json.dumps(whole.state()))
    resumed.restore(state)
    assert judgement(resumed) == judgement(whole)
    del state["losses"]  # as in a checkpoint from before losses were judged
    resumed.restore(state)
    assert judgement(resumed) == (whole.norm_limit, math.inf, whole.left_out)
    resumed.restore(None)
    assert judgement(resumed) == (math.inf, math.inf, set())


@pytest.mark.parametrize(
    ("fault", "field"), [(Fault.NOT_FINITE, "on_nan"), (Fault.SPIKE, "on_spike")]
)
def test_each_fault_has_its_own_policy(fault: Fault, field: str) -> None:
    other = {"on_nan": "skip", "on_spike": "skip"}
    with pytest.raises(JobFailure, match=f"step 7: .*faults.{field}") as caught:
        guard(**{**other, field: "stop"}).policy(refused(7, fault))
    assert caught.value.reason is Reason.NAN_LOSS
    for policy in ("skip", "rewind"):
        watch = guard(**{field: policy})
        assert watch.policy(refused(7, fault)) == policy
        assert watch.left_out == {7}


GOOD, NAN, SPIKE = result(1.0), result(math.nan), result(30.0)


@pytest.mark.parametrize(
    ("trials", "blamed"),
    [
        ([], ""),
        ([GOOD, NAN], "rank 1"),
        ([NAN, GOOD], "rank 0"),
        ([GOOD, SPIKE], "rank 1"),
        ([NAN, NAN], ""),  # whoever computes it: data, model or learning rate
        ([NAN, SPIKE], ""),
        ([GOOD, GOOD], ""),
        ([result(20.0), result(20.5)], ""),  # at the limit, and a rounding away from it
        ([result(20.0), result(20.5, 2.0)], "rank 1"),
    ],
)
def test_a_device_is_blamed_where_others_compute_the_step_well(
    trials: list[StepResult], blamed: str
) -> None:
    watch = guard(on_spike="skip", spike_factor=10, spike_window=2)
    for norm in (2.0, 2.0):
        watch.took(result(norm))
    assert watch.norm_limit == 20.0
    found = [Trial(ranks=f"rank {rank}", result=each) for rank, each in enumerate(trials)]
    assert watch.blamed(found) == blamed


@pytest.mark.parametrize("policy", ["skip", "rewind", "stop"])
def test_a_broken_device_ends_the_job_whatever_its_policy(policy: str) -> None:
    """Its other steps are no better than the one that would be left out."""
    watch = guard(on_nan=policy)
    wrong = StepRefused(7, Fault.NOT_FINITE, NAN, NAN, blamed="rank 3 (10.0.0.3)")
    with pytest.raises(JobFailure, match=r"step 7: .* by rank 3 \(10.0.0.3\) alone") as caught:
        watch.policy(wrong)
    assert caught.value.reason is Reason.NODE_FAILURE
    assert not watch.left_out


def test_only_so_many_steps_in_a_row_are_left_out() -> None:
    watch = guard(on_nan="rewind", max_skipped=2)
    for step in (3, 4, 6, 7):
        assert watch.policy(refused(step)) == "rewind"
    with pytest.raises(JobFailure, match="3 steps in a row went wrong") as caught:
        watch.policy(refused(5 + 3))
    assert caught.value.reason is Reason.NAN_LOSS
