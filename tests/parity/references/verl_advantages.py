"""verl: advantages, rewards with a KL term, the adaptive KL coefficient."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos

from tests.parity.batches import BATCHES, GAE, KL_SEEN, Inputs
from tests.parity.references.reference import RATIO_BOUND, References, Values, tensor


def at_last(inputs: Inputs) -> torch.Tensor:
    """[B, T] each row's reward at its last trained token; none where nothing is trained."""
    rewards = np.zeros_like(inputs.mask)
    for b, row in enumerate(inputs.mask):
        if row.any():
            rewards[b, row.nonzero()[0].max()] = inputs.rewards[b]
    return tensor(rewards)


def _of_rows(inputs: Inputs, *, estimator: str, settings: Mapping[str, Any]) -> Values:
    """One number a row. Rows of which nothing is trained have no reward, and are not handed over:
    their group is smaller then."""
    rows = torch.tensor(inputs.trained_rows)
    mask = tensor(inputs.mask)[rows]
    advantages, _ = core_algos.get_adv_estimator_fn(estimator)(
        token_level_rewards=at_last(inputs)[rows],
        response_mask=mask,
        index=inputs.groups[inputs.trained_rows],
        config=None,
        **settings,
    )
    found = np.zeros(len(inputs.mask))
    found[inputs.trained_rows] = (advantages * mask).sum(1) / mask.sum(1)
    return {"advantages": found}


def _baseline_plus_plus(inputs: Inputs) -> Values:
    rows = torch.tensor(inputs.trained_rows)
    advantages, _ = core_algos.get_adv_estimator_fn("reinforce_plus_plus_baseline")(
        token_level_rewards=at_last(inputs)[rows],
        response_mask=tensor(inputs.mask)[rows],
        index=inputs.groups[inputs.trained_rows],
        config=None,
    )
    found = np.zeros_like(inputs.mask)
    found[inputs.trained_rows] = advantages
    return {"advantages": found}


def _plus_plus(inputs: Inputs, *, discount: float) -> Values:
    advantages, returns = core_algos.get_adv_estimator_fn("reinforce_plus_plus")(
        token_level_rewards=tensor(inputs.token_rewards),
        response_mask=tensor(inputs.mask),
        config=SimpleNamespace(gamma=discount),
    )
    return {"advantages": advantages.numpy(), "returns": returns.numpy()}


def _remax(inputs: Inputs) -> Values:
    advantages, _ = core_algos.get_adv_estimator_fn("remax")(
        token_level_rewards=tensor(inputs.token_rewards),
        reward_baselines=tensor(inputs.baselines),
        response_mask=tensor(inputs.mask),
    )
    return {"advantages": advantages.numpy()}


def _gae(inputs: Inputs, *, discount: float, gae_lambda: float) -> Values:
    mask = tensor(inputs.mask)
    advantages, returns = core_algos.get_adv_estimator_fn("gae")(
        tensor(inputs.token_rewards), tensor(inputs.values), mask, discount, gae_lambda
    )
    return {"whitened": (advantages * mask).numpy(), "returns": (returns * mask).numpy()}


def _kl_in_reward(inputs: Inputs) -> Values:
    """With log-ratios within our bound."""
    reference = tensor(inputs.near_reference(RATIO_BOUND).reference)
    shaped = core_algos.compute_rewards(
        tensor(inputs.token_rewards), tensor(inputs.old), reference, 0.05
    )
    return {"rewards": (shaped * tensor(inputs.mask)).numpy()}


def _controller(inputs: Inputs) -> Values:
    """The coefficient after each of a row of measured KLs: no batch is needed for it."""
    del inputs
    controller = core_algos.AdaptiveKLController(0.1, 6.0, 10_000)
    values = []
    for seen in KL_SEEN:
        controller.update(seen, 256)
        values.append(float(controller.value))
    return {"coefficients": np.array(values)}


REFERENCES = References("verl", "trainer.ppo.core_algos.")

_ALONE = {"alone": "group-of-one", "empty-rows": "group-of-one"}
_ROWS: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("group-advantages/by-std", "grpo", {"norm_adv_by_std_in_grpo": True}, _ALONE),
    ("group-advantages/centered", "grpo", {"norm_adv_by_std_in_grpo": False}, _ALONE),
    ("leave-one-out", "rloo_vectorized", {}, {}),
]
for _case, _estimator, _settings, _differs in _ROWS:
    REFERENCES.add(
        _case,
        f"get_adv_estimator_fn('{_estimator}')",
        _settings,
        partial(_of_rows, estimator=_estimator, settings=_settings),
        differs=_differs,
    )
REFERENCES.add(
    "reinforce-plus-plus-baseline",
    "get_adv_estimator_fn('reinforce_plus_plus_baseline')",
    {},
    _baseline_plus_plus,
    batches=[name for name in BATCHES if name not in _ALONE],
)
for _discount in (1.0, 0.9):
    REFERENCES.add(
        f"reinforce-plus-plus/{_discount:g}",
        "get_adv_estimator_fn('reinforce_plus_plus')",
        {"gamma": _discount},
        partial(_plus_plus, discount=_discount),
    )
REFERENCES.add("remax", "get_adv_estimator_fn('remax')", {}, _remax)
for _case, (_discount, _lambda) in GAE.items():
    REFERENCES.add(
        _case,
        "get_adv_estimator_fn('gae')",
        {"gamma": _discount, "lam": _lambda},
        partial(_gae, discount=_discount, gae_lambda=_lambda),
    )
REFERENCES.add(
    "kl-in-reward",
    "compute_rewards",
    {"kl_ratio": 0.05},
    _kl_in_reward,
    differs={"extreme": "kl-bound"},
)
REFERENCES.add(
    "kl-controller",
    "AdaptiveKLController",
    {"init_kl_coef": 0.1, "target_kl": 6.0, "horizon": 10_000, "n_steps": 256},
    _controller,
    batches=["F"],
)
