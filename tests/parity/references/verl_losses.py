"""verl: policy, value and entropy losses, KL estimates, corrections of a rollout's log-probs."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
from verl.workers.config import ActorConfig

from tests.parity.batches import BATCHES, Inputs
from tests.parity.references.reference import (
    MILD,
    References,
    Values,
    leaf,
    loss_and_gradient,
    of_policy,
    tensor,
)

# A dual clip is always on there; one so far off does nothing.
NO_DUAL_CLIP = 1e30
LENGTH_CONSTANT = 8
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
KL_KINDS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def _policy(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=3,
        ppo_micro_batch_size_per_gpu=2,
        clip_ratio=0.2,
        clip_ratio_low=settings.get("clip_ratio_low", 0.2),
        clip_ratio_high=settings.get("clip_ratio_high", 0.2),
        clip_ratio_c=settings.get("clip_ratio_c", NO_DUAL_CLIP),
    )
    if settings["loss_agg_mode"] == "seq-mean-token-sum-norm":
        config.global_batch_info["loss_scale_factor"] = LENGTH_CONSTANT
    mask = tensor(inputs.mask)
    advantages = tensor(inputs.advantages).unsqueeze(1).expand_as(mask)
    if settings.get("advantages") == "of tokens":
        advantages = tensor(inputs.token_advantages)
    weights = None
    if "rollout_is" in settings:
        weights = _weights(inputs, settings["rollout_is"], settings["rollout_is_threshold"])
    loss, _ = core_algos.get_policy_loss_fn(settings["policy_loss"])(
        tensor(inputs.old),
        log_probs,
        advantages,
        mask,
        settings["loss_agg_mode"],
        config,
        weights,
    )
    if "kl_loss_coef" in settings:
        kl = core_algos.kl_penalty(log_probs, tensor(inputs.reference), settings["kl_loss_type"])
        loss = loss + settings["kl_loss_coef"] * core_algos.agg_loss(
            kl, mask, settings["loss_agg_mode"]
        )
    total: Tensor = loss
    return total


def _entropy_bonus(inputs: Inputs, *, coef: float, mode: str) -> Values:
    """As verl's workers put it together: policy loss less the coefficient times the entropy."""
    mask, entropy = tensor(inputs.mask), leaf(inputs.entropy)

    def loss(log_probs: Tensor) -> Tensor:
        policy = _policy(inputs, log_probs, policy_loss="vanilla", loss_agg_mode=mode)
        return policy - coef * core_algos.agg_loss(entropy, mask, mode)

    values = loss_and_gradient(inputs.new, loss)
    assert entropy.grad is not None
    return {**values, "entropy_gradient": entropy.grad.numpy()}


def _likelihood(inputs: Inputs, log_probs: Tensor, *, mode: str) -> Tensor:
    loss: Tensor = core_algos.agg_loss(-log_probs, tensor(inputs.mask), mode)
    return loss


def _value(inputs: Inputs, *, clip: float) -> Values:
    """`token_advantages + values` stand in for the returns."""
    returns = tensor(inputs.token_advantages) + tensor(inputs.values)

    def loss(predicted: Tensor) -> Tensor:
        value, _ = core_algos.compute_value_loss(
            predicted, returns, tensor(inputs.values), tensor(inputs.mask), clip
        )
        total: Tensor = value
        return total

    return loss_and_gradient(inputs.predicted, loss)


def _kl(inputs: Inputs, *, kind: str) -> Values:
    """Each token's estimate, and the derivative of each by its own log-prob."""
    mask, log_probs = tensor(inputs.mask), leaf(inputs.new)
    estimates = core_algos.kl_penalty(log_probs, tensor(inputs.reference), kind)
    (estimates * mask).sum().backward()
    assert log_probs.grad is not None
    return {
        "estimates": (estimates.detach() * mask).numpy(),
        "gradient": log_probs.grad.numpy(),
    }


def _weights(inputs: Inputs, level: str, threshold: str | float) -> Tensor:
    log_ratio = tensor(inputs.old) - tensor(inputs.rollout)
    weights, _ = compute_rollout_correction_weights(
        log_ratio, tensor(inputs.mask), level, threshold
    )
    found: Tensor = weights
    return found


def _correction(inputs: Inputs, *, level: str, threshold: str | float) -> Values:
    return {"weights": (_weights(inputs, level, threshold) * tensor(inputs.mask)).numpy()}


def _distributions(inputs: Inputs) -> Values:
    """Entropy, and the log-prob of token 3, of each distribution; no mask."""
    logits = leaf(inputs.student)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    labels = torch.full(inputs.mask.shape, 3)
    log_probs = logprobs_from_logits(logits.detach(), labels)
    assert logits.grad is not None
    return {
        "entropy": entropy.detach().numpy(),
        "gradient": logits.grad.numpy(),
        "log_probs": log_probs.numpy(),
    }


def _policy_cases() -> list[tuple[str, dict[str, Any], Iterable[str]]]:
    """Case, settings, batches."""
    vanilla = {"policy_loss": "vanilla", "loss_agg_mode": "token-mean"}
    cases: list[tuple[str, dict[str, Any], Iterable[str]]] = [
        (f"clip/{mode}", {**vanilla, "loss_agg_mode": mode}, BATCHES) for mode in AGGREGATIONS
    ]
    cases += [
        ("clip-higher/token-mean", {**vanilla, "clip_ratio_high": 0.28}, BATCHES),
        ("dual-clip/token-mean", {**vanilla, "clip_ratio_c": 3.0}, BATCHES),
    ]
    for name in ("k1", "k2", "k3"):
        settings = {**vanilla, "kl_loss_coef": 0.04, "kl_loss_type": KL_KINDS[name]}
        # Estimates beyond 10 and differences beyond 20 are the business of the cases `kl/...`.
        cases.append((f"clip-{name}/token-mean", settings, MILD))
    by_row = {"loss_agg_mode": "seq-mean-token-mean"}
    settings = {**vanilla, **by_row, "kl_loss_coef": 0.04, "kl_loss_type": KL_KINDS["k3"]}
    cases.append(("clip-k3/seq-mean-token-mean", settings, MILD))
    gspo = {"policy_loss": "gspo", **by_row}
    narrow = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    of_tokens = {"advantages": "of tokens"}
    cases += [
        ("gspo/wide", gspo, BATCHES),
        ("gspo/narrow", {**gspo, **narrow}, BATCHES),
        ("gspo/wide-token-mean", {**gspo, "loss_agg_mode": "token-mean"}, BATCHES),
        ("gspo-token/wide", {**gspo, **of_tokens}, BATCHES),
        ("gspo-token/narrow", {**gspo, **of_tokens, **narrow}, BATCHES),
    ]
    cispo = {"policy_loss": "cispo", "loss_agg_mode": "token-mean"}
    cases += [
        ("cispo/cap-5", {**cispo, "clip_ratio_low": 1.0, "clip_ratio_high": 4.0}, BATCHES),
        ("cispo/cap-1.2", {**cispo, "clip_ratio_low": 1.0, "clip_ratio_high": 0.2}, BATCHES),
        (
            "cispo/floor-0.8-cap-1.2",
            {**cispo, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
            BATCHES,
        ),
    ]
    by_sum = {"policy_loss": "gpg", "loss_agg_mode": "seq-mean-token-sum"}
    cases.append(("log-prob/seq-mean-token-sum", {**by_sum, **of_tokens}, BATCHES))
    corrected = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    masked = {**corrected, "rollout_is_threshold": "0.5_2.0"}
    cases += [
        ("corrected-clip/token-mean", {**vanilla, **corrected}, BATCHES),
        ("corrected-clip-mask/token-mean", {**vanilla, **masked}, BATCHES),
    ]
    return cases


REFERENCES = References("verl")

for _case, _settings, _batches in _policy_cases():
    REFERENCES.add(
        _case,
        f"trainer.ppo.core_algos.get_policy_loss_fn('{_settings['policy_loss']}')",
        _settings,
        of_policy(partial(_policy, **_settings)),
        batches=_batches,
    )
_CORE = "trainer.ppo.core_algos"
for _mode in AGGREGATIONS[:3]:
    REFERENCES.add(
        f"sft/{_mode}",
        f"{_CORE}.agg_loss",
        {"loss_agg_mode": _mode},
        of_policy(partial(_likelihood, mode=_mode)),
    )
for _mode in AGGREGATIONS[:2]:
    REFERENCES.add(
        f"entropy-bonus/{_mode}",
        f"{_CORE}.agg_loss",
        {"entropy_coeff": 0.01, "loss_agg_mode": _mode},
        partial(_entropy_bonus, coef=0.01, mode=_mode),
    )
for _clip in (0.2, 0.5):
    REFERENCES.add(
        f"value/clip-{_clip}",
        f"{_CORE}.compute_value_loss",
        {"cliprange_value": _clip},
        partial(_value, clip=_clip),
    )
for _name, _kind in KL_KINDS.items():
    REFERENCES.add(
        f"kl/{_name}",
        f"{_CORE}.kl_penalty",
        {"kl_penalty": _kind},
        partial(_kl, kind=_kind),
        differs={"extreme": "kl-cap" if _name == "k3" else "kl-bound"},
    )
_CORRECTIONS: dict[str, tuple[str, str | float]] = {
    "token-truncate": ("token", 2.0),
    "token-mask": ("token", "0.5_2.0"),
    "sequence-truncate": ("sequence", 2.0),
    "sequence-mask": ("sequence", "0.5_3.0"),
}
for _name, (_level, _threshold) in _CORRECTIONS.items():
    REFERENCES.add(
        f"correction/{_name}",
        "trainer.ppo.rollout_corr_helper.compute_rollout_correction_weights",
        {"rollout_is": _level, "rollout_is_threshold": _threshold},
        partial(_correction, level=_level, threshold=_threshold),
    )
REFERENCES.add(
    "distributions",
    "utils.torch_functional.entropy_from_logits, logprobs_from_logits",
    {},
    _distributions,
    batches=["F", "one-token"],
)
