"""TRL: supervised fine-tuning, reward models, preferences."""

import itertools
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer

from tests.parity.batches import BATCHES, Inputs
from tests.parity.references import trl_parts
from tests.parity.references.reference import (
    References,
    Values,
    leaf,
    loss_and_gradient,
    of_policy,
    tensor,
)


def _sft(inputs: Inputs, log_probs: Tensor, *, count: int | None) -> Tensor:
    trainer = trl_parts.trainer(
        SFTTrainer,
        compute_loss_func=None,
        label_smoother=None,
        get_tp_size=lambda: 1,
        args=trl_parts.arguments(loss_type="nll", average_tokens_across_devices=False),
    )
    rows = trl_parts.tokens_of(tensor(inputs.mask))
    labels = rows["input_ids"].masked_fill(rows["completion_mask"] == 0, -100)
    given = {"input_ids": rows["input_ids"], "labels": labels}
    given["attention_mask"] = rows["attention_mask"]
    model = trl_parts.TokenModel(log_probs)
    loss: Tensor = trainer.compute_loss(model, given, num_items_in_batch=count)
    return loss


def _scored(scores: Tensor, **_: Any) -> SimpleNamespace:
    return SimpleNamespace(logits=scores.unsqueeze(-1))


def _reward_model(inputs: Inputs, *, margin: bool, center: float | None) -> Values:
    def loss(scores: Tensor) -> Tensor:
        trainer = trl_parts.trainer(
            RewardTrainer,
            args=trl_parts.arguments(center_rewards_coefficient=center),
        )
        given: dict[str, Any] = {"attention_mask": torch.ones(len(scores), 2)}
        if margin:
            given["margin"] = tensor(inputs.margins[inputs.whole_pairs])
        value: Tensor = trainer.compute_loss(partial(_scored, scores), given)
        return value

    kept = np.tile(inputs.whole_pairs, 2)
    values = loss_and_gradient(inputs.scores[kept], loss)
    gradient = np.zeros_like(inputs.scores)
    gradient[kept] = values["gradient"]
    return {**values, "gradient": gradient}


def _dpo(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    """Pairs with a side of which nothing is trained are no pairs, and are not handed over."""
    kept = torch.tensor(np.tile(inputs.whole_pairs, 2))
    return _dpo_loss(log_probs[kept], tensor(inputs.reference)[kept], kept, inputs, settings)


def _dpo_loss(
    log_probs: Tensor, reference: Tensor, rows: Tensor, inputs: Inputs, settings: Mapping[str, Any]
) -> Tensor:
    types = settings["loss_types"]
    trainer = trl_parts.trainer(
        DPOTrainer,
        ref_model=trl_parts.TokenModel(reference),
        precompute_ref_logps=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=types,
        loss_weights=settings.get("loss_weights", [1.0] * len(types)),
        beta=settings["beta"],
        label_smoothing=settings.get("label_smoothing", 0.0),
        use_weighting=False,
        args=trl_parts.arguments(),
    )
    given = trl_parts.tokens_of(tensor(inputs.mask)[rows])
    loss: Tensor = trainer._compute_loss(trl_parts.TokenModel(log_probs), given, False)
    return loss


def _dpo_pair_by_pair(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    """Each pair is a batch of its own; the mean over pairs."""
    count, reference, losses = len(inputs.margins), tensor(inputs.reference), []
    for pair in np.flatnonzero(inputs.whole_pairs):
        rows = torch.tensor([pair, pair + count])
        losses.append(_dpo_loss(log_probs[rows], reference[rows], rows, inputs, settings))
    return torch.stack(losses).mean()


def _kto(inputs: Inputs, *, beta: float, desirable: float, undesirable: float) -> Values:
    """Answers are mismatched by rotation, and their log-probs are those of `values`, below 0."""
    kept = torch.tensor(inputs.trained_rows)
    mask, reference = tensor(inputs.mask)[kept], tensor(inputs.reference)[kept]
    mismatched = -tensor(inputs.values)[kept].abs()
    trainer = trl_parts.trainer(
        KTOTrainer,
        ref_model=trl_parts.TokenModel(reference, mismatched=-tensor(inputs.predicted)[kept].abs()),
        precompute_ref_logps=False,
        calculate_KL=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=desirable,
        undesirable_weight=undesirable,
        args=trl_parts.arguments(),
    )
    other = trl_parts.tokens_of(mask, first=trl_parts.MISMATCHED)
    given = {
        **trl_parts.tokens_of(mask),
        **{f"KL_{name}": value for name, value in other.items()},
        "label": torch.tensor(inputs.desirable)[kept],
    }

    def loss(log_probs: Tensor) -> Tensor:
        model = trl_parts.TokenModel(log_probs[kept], mismatched=mismatched)
        value: Tensor = trainer._compute_loss(model, given, False)
        return value

    values = loss_and_gradient(inputs.new, loss)
    return {**values, "reference_point": trainer._metrics["train"]["kl"][-1]}


def mean_log_probs(inputs: Inputs, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Of the whole pairs: means over the tokens of the chosen answers, and of the rejected."""
    mask, count = tensor(inputs.mask), len(inputs.margins)
    means = (log_probs * mask).sum(1) / mask.sum(1).clamp(min=1.0)
    kept = torch.tensor(inputs.whole_pairs)
    return means[:count][kept], means[count:][kept]


def _simpo(inputs: Inputs, log_probs: Tensor, *, beta: float, gamma: float) -> Tensor:
    trainer = trl_parts.trainer(
        CPOTrainer, loss_type="simpo", beta=beta, simpo_gamma=gamma, label_smoothing=0.0, alpha=0.0
    )
    losses: Tensor = trainer.cpo_loss(*mean_log_probs(inputs, log_probs))[0]
    return losses.mean()


def _odds_ratio(inputs: Inputs, log_probs: Tensor, *, beta: float) -> Tensor:
    """The trainer subtracts this mean from the likelihood's loss."""
    trainer = trl_parts.trainer(ORPOTrainer, beta=beta)
    losses: Tensor = trainer.odds_ratio_loss(*mean_log_probs(inputs, log_probs))[0]
    return -losses.mean()


def _jensen_shannon(inputs: Inputs, *, beta: float, top_k: int | None) -> Values:
    student, teacher = leaf(inputs.student), tensor(inputs.teacher)
    labels = torch.where(tensor(inputs.mask) > 0, 1, -100)
    told = (student, teacher) if top_k is None else _told_of(student, teacher, top_k)
    loss = GKDTrainer.generalized_jsd_loss(*told, labels=labels, beta=beta)
    loss.backward()
    assert student.grad is not None
    return {"loss": float(loss), "gradient": student.grad.numpy()}


def _told_of(student: Tensor, teacher: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the teacher's likeliest tokens, and of all others together."""
    places = teacher.topk(top_k).indices
    likeliest = [logits.log_softmax(-1).gather(-1, places) for logits in (student, teacher)]
    rest = [torch.log1p(-told.exp().sum(-1, keepdim=True)) for told in likeliest]
    one, other = (torch.cat(parts, -1) for parts in zip(likeliest, rest, strict=True))
    return one, other


REFERENCES = References("trl")

for _case, _count in (("sft/token-mean", None), ("sft/token-mean-of-40", 40)):
    REFERENCES.add(
        _case,
        "SFTTrainer.compute_loss",
        {"loss_type": "nll", "num_items_in_batch": _count},
        of_policy(partial(_sft, count=_count)),
    )
for _case, _margin, _center in (
    ("reward-model/plain", False, None),
    ("reward-model/margin", True, None),
    ("reward-model/centered", False, 0.01),
):
    REFERENCES.add(
        _case,
        "RewardTrainer.compute_loss",
        {"margin": _margin, "center_rewards_coefficient": _center},
        partial(_reward_model, margin=_margin, center=_center),
    )
_DPO: dict[str, dict[str, Any]] = {
    "dpo/sigmoid": {"beta": 0.1, "loss_types": ["sigmoid"]},
    "dpo/sigmoid-length-normalized": {"beta": 0.1, "loss_types": ["sigmoid_norm"]},
    "dpo/hinge": {"beta": 0.1, "loss_types": ["hinge"]},
    "dpo/ipo-length-normalized": {"beta": 0.1, "loss_types": ["ipo"]},
    "dpo/robust": {"beta": 0.1, "loss_types": ["robust"], "label_smoothing": 0.1},
}
for _case, _settings in _DPO.items():
    REFERENCES.add(
        _case, "DPOTrainer._compute_loss", _settings, of_policy(partial(_dpo, **_settings))
    )
_BOTH = {"beta": 0.1, "loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}
REFERENCES.add(
    "dpo/sigmoid-and-likelihood",
    "DPOTrainer._compute_loss",
    {**_BOTH, "pairs_in_a_batch": 1},
    of_policy(partial(_dpo_pair_by_pair, **_BOTH)),
    differs=dict.fromkeys(BATCHES, "likelihood-mean"),
)
for _case, _settings in {
    "kto/equal-weights": {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0},
    "kto/weights": {"beta": 0.1, "desirable": 1.0, "undesirable": 1.33},
    "kto/strong": {"beta": 0.5, "desirable": 2.0, "undesirable": 0.5},
}.items():
    REFERENCES.add(_case, "KTOTrainer._compute_loss", _settings, partial(_kto, **_settings))
REFERENCES.add(
    "simpo",
    "experimental.cpo.CPOTrainer.cpo_loss",
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
    of_policy(partial(_simpo, beta=2.0, gamma=0.5)),
)
REFERENCES.add(
    "orpo/odds-ratio",
    "experimental.orpo.ORPOTrainer.odds_ratio_loss",
    {"beta": 0.1},
    of_policy(partial(_odds_ratio, beta=0.1)),
    float32=True,
)
_DIVERGENCES = {"forward-kl": 0.0, "js-0.5": 0.5, "js-0.3": 0.3, "reverse-kl": 1.0}
for (_name, _beta), _top_k in itertools.product(_DIVERGENCES.items(), (None, 3)):
    REFERENCES.add(
        f"distillation/{_name}" + (f"/top-{_top_k}" if _top_k else ""),
        "experimental.gkd.GKDTrainer.generalized_jsd_loss",
        {"beta": _beta, "reduction": "batchmean", "outcomes": _top_k or "all"},
        partial(_jensen_shannon, beta=_beta, top_k=_top_k),
        batches=["F"] if _top_k else ["F", "turns", "empty-rows"],
    )
