"""liger-kernel: the formulas inside its fused losses."""

from functools import partial
from typing import Any

import torch
from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction
from liger_kernel.chunked_loss.kto_loss import LigerFusedLinearKTOFunction
from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction
from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOFunction
from torch import Tensor

from tests.parity.batches import BATCHES, Inputs
from tests.parity.references.reference import (
    MILD,
    RATIO_BOUND,
    References,
    Values,
    leaf,
    loss_and_gradient,
    of_policy,
    tensor,
)

LENGTH_CONSTANT = 8


def _pairs(inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    kept, count = torch.tensor(inputs.whole_pairs), len(inputs.margins)
    return rows[:count][kept], rows[count:][kept]


def _both(inputs: Inputs) -> Tensor:
    """Only its number of rows is read."""
    return torch.zeros(2 * int(inputs.whole_pairs.sum()), 1)


def _dpo(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    mask = tensor(inputs.mask)
    value: Tensor = LigerFusedLinearDPOFunction.preference_loss_fn(
        *_pairs(inputs, (log_probs * mask).sum(1)),
        _both(inputs),
        *_pairs(inputs, (tensor(inputs.reference) * mask).sum(1)),
        **settings,
    )[0]
    return value


def _of_means(inputs: Inputs, log_probs: Tensor, *, function: Any, **settings: Any) -> Tensor:
    mask = tensor(inputs.mask)
    means = (log_probs * mask).sum(1) / mask.sum(1).clamp(min=1.0)
    value: Tensor = function(*_pairs(inputs, means), _both(inputs), **settings)[0]
    return value


def _kto(inputs: Inputs, *, beta: float) -> Values:
    """With the reference point that TRL's trainer would find for the same mismatched answers."""
    kept = torch.tensor(inputs.trained_rows)
    mask = tensor(inputs.mask)[kept]
    drift = (tensor(inputs.predicted).abs() - tensor(inputs.values).abs())[kept]
    point = (drift * mask).sum(1).mean().clamp(min=0.0)

    def loss(log_probs: Tensor) -> Tensor:
        value: Tensor = LigerFusedLinearKTOFunction.preference_loss_fn(
            (log_probs[kept] * mask).sum(1),
            torch.tensor(inputs.desirable)[kept],
            mask,
            (tensor(inputs.reference)[kept] * mask).sum(1),
            beta=beta,
            kl=point,
        )[0]
        return value

    return {**loss_and_gradient(inputs.new, loss), "reference_point": float(point)}


def _policy(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    mask = tensor(inputs.mask)
    value: Tensor = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        log_probs,
        mask,
        tensor(inputs.advantages),
        mask,
        tensor(inputs.reference),
        tensor(inputs.old),
        max_completion_length=LENGTH_CONSTANT,
        num_items_in_batch=mask.sum(),
        **{"beta": 0.0, **settings},
    )[0]
    return value


def _jensen_shannon(inputs: Inputs, *, beta: float) -> Values:
    """A sum over tokens there; divided here by their number."""
    student, teacher = leaf(inputs.student), tensor(inputs.teacher)
    target = torch.where(tensor(inputs.mask) > 0, 1, -100)
    total = LigerFusedLinearJSDFunction.distillation_loss_fn(student, teacher, beta, target)
    loss = total / float(inputs.mask.sum())
    loss.backward()
    assert student.grad is not None
    return {"loss": float(loss), "gradient": student.grad.numpy()}


REFERENCES = References("liger-kernel", "chunked_loss.")

_RATIO = {"extreme": "ratio-bound"}
_ROWS = {"empty-rows": "masked-rows"}
_SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
_POLICY_LOSSES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("clip/token-mean", {"loss_type": "dapo"}, _RATIO),
    ("clip/seq-mean-token-mean", {"loss_type": "grpo"}, _RATIO | _ROWS),
    ("clip/seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}, _RATIO | _ROWS),
    ("clip-higher/token-mean", {"loss_type": "dapo", "epsilon_high": 0.28}, _RATIO),
    ("dual-clip/token-mean", {"loss_type": "dapo", "delta": 3.0}, _RATIO),
    ("clip-k3/token-mean", {"loss_type": "dapo", "beta": 0.04}, {}),
    ("gspo/wide", _SEQUENCE, _ROWS),
    ("gspo/narrow", {**_SEQUENCE, "epsilon_low": 3e-4, "epsilon_high": 4e-4}, _ROWS),
    ("cispo/cap-5", {"loss_type": "cispo", "epsilon_high": 5.0}, {}),
    ("cispo/cap-1.2", {"loss_type": "cispo", "epsilon_high": 1.2}, {}),
]
for _case, _settings, _differs in _POLICY_LOSSES:
    REFERENCES.add(
        _case,
        "grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn",
        _settings,
        of_policy(
            partial(_policy, **_settings), bound=RATIO_BOUND if "extreme" in _differs else None
        ),
        batches=MILD if "beta" in _settings else BATCHES,
        differs=_differs,
    )

_DPO: dict[str, dict[str, Any]] = {
    "dpo/sigmoid": {"beta": 0.1, "loss_type": "sigmoid"},
    "dpo/hinge": {"beta": 0.1, "loss_type": "hinge"},
    "dpo/robust": {"beta": 0.1, "loss_type": "robust", "label_smoothing": 0.1},
}
for _case, _settings in _DPO.items():
    REFERENCES.add(
        _case,
        "dpo_loss.LigerFusedLinearDPOFunction.preference_loss_fn",
        _settings,
        of_policy(partial(_dpo, **_settings)),
    )
for _case, _class, _settings in (
    ("simpo", LigerFusedLinearSimPOFunction, {"beta": 2.0, "gamma": 0.5}),
    ("orpo/odds-ratio", LigerFusedLinearORPOFunction, {"beta": 0.1}),
):
    REFERENCES.add(
        _case,
        f"{_case.split('/')[0]}_loss.{_class.__name__}.preference_loss_fn",
        _settings,
        of_policy(partial(_of_means, function=_class.preference_loss_fn, **_settings)),
    )
REFERENCES.add(
    "kto/equal-weights",
    "kto_loss.LigerFusedLinearKTOFunction.preference_loss_fn",
    {"beta": 0.1},
    partial(_kto, beta=0.1),
)
for _name, _beta in {"forward-kl": 0.0, "js-0.5": 0.5, "js-0.3": 0.3, "reverse-kl": 1.0}.items():
    REFERENCES.add(
        f"distillation/{_name}",
        "jsd_loss.LigerFusedLinearJSDFunction.distillation_loss_fn",
        {"beta": _beta},
        partial(_jensen_shannon, beta=_beta),
        batches=("F", "turns", "empty-rows"),
    )
