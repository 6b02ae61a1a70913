"""TRL: advantages, policy losses and corrections of GRPO and RLOO."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment

from tests.parity.batches import BATCHES, Inputs
from tests.parity.references import trl_parts
from tests.parity.references.reference import (
    MILD,
    RATIO_BOUND,
    References,
    Values,
    leaf,
    of_policy,
    tensor,
)

LENGTH_CONSTANT = 8


def _policy_inputs(inputs: Inputs) -> dict[str, Tensor]:
    mask = tensor(inputs.mask)
    prompt = torch.ones(len(mask), 1, dtype=torch.int64)
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones_like(mask, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": tensor(inputs.advantages),
        "old_per_token_logps": tensor(inputs.old),
        "ref_per_token_logps": tensor(inputs.reference),
        "num_items_in_batch": mask.sum(),
    }


def _policy_trainer(log_probs: Tensor, entropy: Tensor, settings: Mapping[str, Any]) -> Any:
    return trl_parts.trainer(
        GRPOTrainer,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        beta=settings.get("beta", 0.0),
        loss_type=settings["loss_type"],
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        use_vllm="vllm_importance_sampling_mode" in settings,
        vllm_importance_sampling_correction="vllm_importance_sampling_mode" in settings,
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH_CONSTANT,
        _entropy_bonus_enabled=bool(settings.get("entropy_coef")),
        entropy_coef=settings.get("entropy_coef"),
        use_adaptive_entropy=False,
        args=trl_parts.arguments(
            delta=settings.get("delta"),
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropy, None),
    )


def _grpo(inputs: Inputs, log_probs: Tensor, **settings: Any) -> Tensor:
    given = _policy_inputs(inputs)
    if "vllm_importance_sampling_mode" in settings:
        given["importance_sampling_ratio"] = _sampling_ratio(inputs, settings)
    trainer = _policy_trainer(log_probs, tensor(inputs.entropy), settings)
    loss: Tensor = trainer._compute_loss(None, given)
    return loss


def _grpo_entropy(inputs: Inputs, **settings: Any) -> Values:
    """With respect to both the log-probs and the entropy."""
    log_probs, entropy = leaf(inputs.new), leaf(inputs.entropy)
    trainer = _policy_trainer(log_probs, entropy, settings)
    loss = trainer._compute_loss(None, _policy_inputs(inputs))
    loss.backward()
    assert log_probs.grad is not None
    assert entropy.grad is not None
    return {
        "loss": float(loss),
        "gradient": log_probs.grad.numpy(),
        "entropy_gradient": entropy.grad.numpy(),
    }


def _rloo(inputs: Inputs, log_probs: Tensor) -> Tensor:
    trainer = trl_parts.trainer(
        RLOOTrainer,
        epsilon_low=0.2,
        epsilon_high=0.2,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            log_probs,
            torch.zeros_like(log_probs),
            None,
        ),
    )
    given = _policy_inputs(inputs)
    # An answer without reward gets the advantage 0 there. Its ratio is 1, whatever its tokens are.
    given["advantages"] = tensor(np.where(inputs.trained_rows, inputs.advantages, 0.0))
    given["old_logps"] = (tensor(inputs.old) * tensor(inputs.mask)).sum(1)
    loss: Tensor = trainer._compute_loss(None, given)
    return loss


def _completions(inputs: Inputs) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and tool masks up to each row's last trained token."""
    rows = [row[: max(int(row.nonzero()[0].max(initial=0)) + 1, 1)] for row in inputs.mask]
    rows[0] = inputs.mask[0]  # TRL pads to the longest row
    return [[3] * len(row) for row in rows], [row.astype(int).tolist() for row in rows]


_PLAIN: dict[str, Any] = {
    "num_iterations": 1,
    "reward_weights": torch.ones(1, dtype=torch.float64),
    "reward_funcs": [None],
    "reward_func_names": ["reward"],
    "multi_objective_aggregation": "sum_then_normalize",
    "normalize_advantages": False,
    "reward_clip_range": None,
    "mask_truncated_completions": False,
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "pad_to_multiple_of": None,
    "log_multimodal": False,
    "_is_vlm": False,
    "_tokenizer": trl_parts.arguments(pad_token_id=0),
    "processing_class": None,
    "chat_template_kwargs": {},
}
"""Attributes of a trainer of one reward, without images, tools and environments."""


def _played(inputs: Inputs, of: type, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """What the trainer makes of canned completions and rewards. A row of which nothing is trained
    has no reward: NaN says so."""
    completions, tools = _completions(inputs)
    rows, pairs = len(inputs.mask), zip(inputs.rollout, completions, strict=True)
    rollout = [row[: len(ids)].tolist() for row, ids in pairs]
    rewards = tensor(np.where(inputs.trained_rows, inputs.rewards, np.nan)).unsqueeze(1)
    reference, near = torch.nn.Identity(), inputs.near_reference(RATIO_BOUND).reference

    def log_probs(model: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        return tensor(near if model is reference else inputs.old), None, None

    prompts = [[1]] * rows
    generated: tuple[Any, ...] = (prompts, completions, completions)
    if of is GRPOTrainer:
        generated = (prompts, completions, tools, completions, rollout, {}, None, None)
    corrected = "vllm_importance_sampling_mode" in settings
    corrections = {
        f"vllm_importance_sampling_{name}": settings.get(f"vllm_importance_sampling_{name}")
        for name in ("mode", "clip_min", "clip_max")
    }
    trainer = trl_parts.trainer(
        of,
        **_PLAIN,
        **corrections,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        ref_model=reference,
        beta=settings.get("beta", 0.0),
        num_generations=inputs.group_size,
        scale_rewards=settings.get("scale_rewards"),
        args=trl_parts.arguments(
            per_device_train_batch_size=rows, steps_per_generation=1, gradient_accumulation_steps=1
        ),
        _generate=lambda _: generated,
        _calculate_rewards=lambda *_: rewards,
        _get_per_token_logps_and_entropies=log_probs,
    )
    made: Mapping[str, Tensor] = trainer._generate_and_score_completions([{"prompt": "p"}] * rows)
    return made


def _advantages(inputs: Inputs, *, of: type, settings: Mapping[str, Any]) -> Values:
    return {"advantages": _played(inputs, of, settings)["advantages"].double().numpy()}


def _sampling_ratio(inputs: Inputs, settings: Mapping[str, Any]) -> Tensor:
    made = _played(inputs, GRPOTrainer, {"scale_rewards": "none", **settings})
    return made["importance_sampling_ratio"]


def _correction(inputs: Inputs, *, settings: Mapping[str, Any]) -> Values:
    weights = _sampling_ratio(inputs, settings).expand(inputs.mask.shape) * tensor(inputs.mask)
    return {"weights": weights.numpy()}


def _overlong(inputs: Inputs, *, longest: int, buffer: int) -> Values:
    """The penalties of answers of 1, 2, ... tokens: no batch is needed for it."""
    del inputs
    penalty = get_soft_overlong_punishment(max_completion_len=longest, soft_punish_cache=buffer)
    return {"penalties": np.array(penalty([[1] * n for n in range(1, longest + 3)]))}


REFERENCES = References("trl")

_LOSS, _PLAY = "GRPOTrainer._compute_loss", "_generate_and_score_completions"
_RATIO = {"extreme": "ratio-bound"}
_ROWS = {"empty-rows": "masked-rows"}
_SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
_POLICY_LOSSES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("clip/token-mean", {"loss_type": "bnpo"}, _RATIO),
    ("clip/seq-mean-token-mean", {"loss_type": "grpo"}, _RATIO | _ROWS),
    ("clip/seq-mean-token-sum", {"loss_type": "luspo"}, _RATIO | _ROWS),
    ("clip/seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}, _RATIO | _ROWS),
    ("clip-higher/token-mean", {"loss_type": "dapo", "epsilon_high": 0.28}, _RATIO),
    ("dual-clip/token-mean", {"loss_type": "dapo", "delta": 3.0}, _RATIO),
    ("clip-k3/token-mean", {"loss_type": "dapo", "beta": 0.04}, {}),
    ("clip-k3/seq-mean-token-mean", {"loss_type": "grpo", "beta": 0.04}, _ROWS),
    ("gspo/wide", _SEQUENCE, _ROWS),
    ("gspo/narrow", {**_SEQUENCE, "epsilon_low": 3e-4, "epsilon_high": 4e-4}, _ROWS),
    ("cispo/cap-5", {"loss_type": "cispo", "epsilon_high": 5.0}, {}),
    ("cispo/cap-1.2", {"loss_type": "cispo", "epsilon_high": 1.2}, {}),
]
for _case, _settings, _differs in _POLICY_LOSSES:
    REFERENCES.add(
        _case,
        _LOSS,
        _settings,
        of_policy(
            partial(_grpo, **_settings), bound=RATIO_BOUND if "extreme" in _differs else None
        ),
        batches=MILD if "beta" in _settings else BATCHES,
        differs=_differs,
    )
_BONUS = {"loss_type": "bnpo", "entropy_coef": 0.01}
REFERENCES.add(
    "entropy-bonus/token-mean", _LOSS, _BONUS, partial(_grpo_entropy, **_BONUS), batches=MILD
)
REFERENCES.add(
    "rloo/sequence-ratio",
    "RLOOTrainer._compute_loss",
    {"epsilon_low": 0.2, "epsilon_high": 0.2},
    of_policy(_rloo),
    differs=_ROWS,
)
for _case, _scale in (
    ("group-advantages/by-std", "group"),
    ("group-advantages/centered", "none"),
):
    _settings = {"scale_rewards": _scale}
    REFERENCES.add(
        _case,
        f"GRPOTrainer.{_PLAY}",
        _settings,
        partial(_advantages, of=GRPOTrainer, settings=_settings),
        differs=dict.fromkeys(BATCHES, "group-epsilon") if _scale == "group" else {},
    )
for _case, _beta in (("leave-one-out", 0.0), ("leave-one-out/kl-in-reward", 0.05)):
    REFERENCES.add(
        _case,
        f"RLOOTrainer.{_PLAY}",
        {"beta": _beta},
        partial(_advantages, of=RLOOTrainer, settings={"beta": _beta}),
        # Its answers have no tokens in between that are not the policy's own.
        batches=[name for name in BATCHES if name != "turns"],
        differs={"extreme": "kl-bound"} if _beta else {},
    )
_CORRECTIONS = {
    "token-truncate": {"mode": "token_truncate", "clip_max": 2.0},
    "token-truncate-both": {"mode": "token_truncate", "clip_min": 0.5, "clip_max": 2.0},
    "token-mask": {"mode": "token_mask", "clip_min": 0.5, "clip_max": 2.0},
    "sequence-truncate": {"mode": "sequence_truncate", "clip_max": 2.0},
    "sequence-mask": {"mode": "sequence_mask", "clip_min": 0.5, "clip_max": 3.0},
}
for _case, _short in _CORRECTIONS.items():
    _settings = {f"vllm_importance_sampling_{name}": value for name, value in _short.items()}
    REFERENCES.add(
        f"correction/{_case}",
        f"GRPOTrainer.{_PLAY}",
        _settings,
        partial(_correction, settings=_settings),
    )
_CORRECTED = {
    "loss_type": "bnpo",
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
REFERENCES.add(
    "corrected-clip/token-mean",
    _LOSS,
    _CORRECTED,
    of_policy(partial(_grpo, **_CORRECTED)),
    batches=MILD,
)
for _longest, _buffer in ((10, 4), (6, 6)):
    REFERENCES.add(
        f"overlong/{_longest}-{_buffer}",
        "rewards.get_soft_overlong_punishment",
        {"max_completion_len": _longest, "soft_punish_cache": _buffer},
        partial(_overlong, longest=_longest, buffer=_buffer),
        batches=["F"],
    )
