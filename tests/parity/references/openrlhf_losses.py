"""OpenRLHF: every loss, and estimates of the KL."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.parity.batches import BATCHES, Inputs
from tests.parity.references.openrlhf_parts import loss as losses
from tests.parity.references.openrlhf_parts import utils
from tests.parity.references.reference import (
    MILD,
    References,
    Values,
    leaf,
    loss_and_gradient,
    of_policy,
    tensor,
)


def _sft(inputs: Inputs, log_probs: Tensor, *, token_level: bool) -> Tensor:
    value: Tensor = losses.SFTLoss(token_level)(log_probs, tensor(inputs.mask))
    return value


def _pairs(inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of the whole pairs, what the chosen and the rejected have in a tensor of rows [B]."""
    kept, count = torch.tensor(inputs.whole_pairs), len(inputs.margins)
    return rows[:count][kept], rows[count:][kept]


def _reward_model(inputs: Inputs, *, loss: str, margin: bool) -> Values:
    margins = tensor(inputs.margins[inputs.whole_pairs]) if margin else None

    def value(scores: Tensor) -> Tensor:
        total: Tensor = getattr(losses, loss)()(*_pairs(inputs, scores), margins)
        return total

    return loss_and_gradient(inputs.scores, value)


def _dpo(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    mask = tensor(inputs.mask)
    policy = _pairs(inputs, (log_probs * mask).sum(1))
    reference = _pairs(inputs, (tensor(inputs.reference) * mask).sum(1))
    value: Tensor = losses.DPOLoss(**settings)(*policy, *reference)[0]
    return value


def _chosen_likelihood(inputs: Inputs, log_probs: Tensor, *, token_level: bool) -> Tensor:
    """The likelihood of the chosen answers of whole pairs."""
    kept, count = torch.tensor(inputs.whole_pairs), len(inputs.margins)
    of_chosen = losses.SFTLoss(token_level)
    value: Tensor = of_chosen(log_probs[:count][kept], tensor(inputs.mask)[:count][kept])
    return value


def _policy(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    mask = tensor(inputs.mask)
    advantages = tensor(inputs.advantages).unsqueeze(1).expand_as(mask)
    if settings.pop("advantages", None) == "of tokens":
        advantages = tensor(inputs.token_advantages)
    coef, estimator = settings.pop("kl_coef", 0.0), settings.pop("kl_estimator", None)
    value: Tensor = losses.PolicyLoss(**settings)(
        log_probs, tensor(inputs.old), advantages, mask, tensor(inputs.rollout)
    )[0]
    if estimator is not None:
        kl = utils.compute_approx_kl(log_probs, tensor(inputs.reference), kl_estimator=estimator)
        token_level = settings.get("token_level_loss", True)
        value = value + coef * losses.aggregate_loss(kl, mask, token_level)
    return value


def _value(inputs: Inputs, *, clip: float | None) -> Values:
    returns = tensor(inputs.token_advantages) + tensor(inputs.values)

    def loss(predicted: Tensor) -> Tensor:
        of_values = losses.ValueLoss(clip)
        total: Tensor = of_values(predicted, tensor(inputs.values), returns, tensor(inputs.mask))
        return total

    return loss_and_gradient(inputs.predicted, loss)


def _kl(inputs: Inputs, *, estimator: str) -> Values:
    mask, log_probs = tensor(inputs.mask), leaf(inputs.new)
    estimates = utils.compute_approx_kl(log_probs, tensor(inputs.reference), kl_estimator=estimator)
    (estimates * mask).sum().backward()
    assert log_probs.grad is not None
    kept = (estimates.detach() * mask).double().numpy()
    return {"estimates": kept, "gradient": log_probs.grad.numpy()}


def _log_probs(inputs: Inputs) -> Values:
    logits = tensor(inputs.student)
    labels = torch.full(inputs.mask.shape, 3)
    return {"log_probs": utils.log_probs_from_logits(logits, labels).numpy()}


REFERENCES = References("openrlhf", "models.")

_BY_ROW = {"token_level_loss": False}
_GSPO = {"policy_loss_type": "gspo"}
_CORRECTED = {"is_correction_level": "token", "is_correction_threshold": [0.5, 2.0]}
_POLICY_LOSSES: dict[str, dict[str, Any]] = {
    "clip/token-mean": {},
    "clip/seq-mean-token-mean": _BY_ROW,
    "clip-higher/token-mean": {"clip_eps_high": 0.28},
    "dual-clip/token-mean": {"dual_clip": 3.0},
    "clip-k1/token-mean": {"kl_coef": 0.04, "kl_estimator": "k1"},
    "clip-k2/token-mean": {"kl_coef": 0.04, "kl_estimator": "k2"},
    "clip-k3/token-mean": {"kl_coef": 0.04, "kl_estimator": "k3"},
    "gspo/wide": _GSPO,
    "gspo/narrow": {**_GSPO, "clip_eps_low": 3e-4, "clip_eps_high": 4e-4},
    "corrected-clip-both/token-mean": {**_CORRECTED, "is_correction_mode": "clip"},
    "corrected-clip-mask/token-mean": {**_CORRECTED, "is_correction_mode": "mask"},
}
for _case, _settings in _POLICY_LOSSES.items():
    _with_kl = "kl_coef" in _settings
    REFERENCES.add(
        _case,
        "loss.PolicyLoss" + (", utils.compute_approx_kl" if _with_kl else ""),
        _settings,
        of_policy(partial(_policy, **_settings)),
        batches=MILD if _with_kl else BATCHES,
        float32=_with_kl,
    )
for _mode, _by_token in (("token-mean", True), ("seq-mean-token-mean", False)):
    for _case, _likelihood in (("sft", _sft), ("chosen-likelihood", _chosen_likelihood)):
        REFERENCES.add(
            f"{_case}/{_mode}",
            "loss.SFTLoss",
            {"token_level_loss": _by_token},
            of_policy(partial(_likelihood, token_level=_by_token)),
        )
for _case, _loss, _margin in (
    ("reward-model/plain", "PairWiseLoss", False),
    ("reward-model/margin", "PairWiseLoss", True),
    ("reward-model/log-exp", "LogExpLoss", False),
):
    REFERENCES.add(
        _case,
        f"loss.{_loss}",
        {"margin": _margin},
        partial(_reward_model, loss=_loss, margin=_margin),
    )
_DPO: dict[str, dict[str, Any]] = {
    "dpo/sigmoid": {"beta": 0.1},
    "dpo/conservative": {"beta": 0.1, "label_smoothing": 0.1},
    "dpo/ipo": {"beta": 0.1, "ipo": True},
}
for _case, _settings in _DPO.items():
    REFERENCES.add(_case, "loss.DPOLoss", _settings, of_policy(partial(_dpo, **_settings)))
for _case, _clip in (("value/clip-0.2", 0.2), ("value/clip-0.5", 0.5), ("value/no-clip", None)):
    REFERENCES.add(_case, "loss.ValueLoss", {"clip_eps": _clip}, partial(_value, clip=_clip))
for _estimator in ("k1", "k2", "k3"):
    REFERENCES.add(
        f"kl/{_estimator}",
        "utils.compute_approx_kl",
        {"kl_estimator": _estimator},
        partial(_kl, estimator=_estimator),
        float32=True,
        differs={"extreme": "kl-cap"},
    )
REFERENCES.add(
    "distributions", "utils.log_probs_from_logits", {}, _log_probs, batches=("F", "one-token")
)
