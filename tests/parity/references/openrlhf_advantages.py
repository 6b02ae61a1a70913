"""OpenRLHF: advantages, rewards with a KL term and a length penalty, the adaptive KL."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.parity.batches import BATCHES, GAE, KL_SEEN, Inputs
from tests.parity.references.openrlhf_parts import Maker, kl_controller, length_penalty, utils
from tests.parity.references.reference import References, Values, tensor

# Its groups are all of one size, and each row has a reward.
_FULL = tuple(name for name in BATCHES if name not in ("alone", "empty-rows"))


def _made(
    inputs: Inputs,
    estimator: str,
    *,
    discount: float = 1.0,
    kl_coef: float = 0.0,
    normalized: bool = True,
) -> Any:
    """An experience of the whole batch with its advantages and returns."""
    rows = len(inputs.mask)
    per_token = estimator in ("gae", "reinforce")
    arguments = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=1 if per_token else inputs.group_size),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator=estimator, gamma=discount, lambd=0.95, no_std_norm=not normalized
            )
        ),
        reward=SimpleNamespace(clip_range=None),
    )
    maker = Maker()
    maker.strategy = SimpleNamespace(args=arguments)
    maker.advantage_estimator = estimator
    maker.kl_ctl = SimpleNamespace(value=kl_coef)
    kl = utils.compute_approx_kl(tensor(inputs.old), tensor(inputs.reference), kl_estimator="k1")
    experience = SimpleNamespace(
        index=list(range(rows)),
        rewards=tensor(inputs.rewards),
        kl=kl.double() * tensor(inputs.mask),
        action_mask=tensor(inputs.mask),
        values=tensor(inputs.values),
        info={},
    )
    return maker.compute_advantages_and_returns([experience])[0]


def _of_rows(inputs: Inputs, *, estimator: str) -> Values:
    """The same at each token of a row."""
    mask = tensor(inputs.mask)
    advantages = _made(inputs, estimator).advantages.double()
    return {"advantages": ((advantages * mask).sum(1) / mask.sum(1)).numpy()}


def _of_tokens(inputs: Inputs, *, estimator: str, discount: float, kl_coef: float) -> Values:
    mask = tensor(inputs.mask)
    made = _made(inputs, estimator, discount=discount, kl_coef=kl_coef)
    return {
        "advantages": (made.advantages * mask).double().numpy(),
        "returns": (made.returns * mask).double().numpy(),
    }


def _gae(inputs: Inputs, *, discount: float, gae_lambda: float) -> Values:
    """Before whitening. Values of what the policy did not write count as 0, and take a step."""
    mask = tensor(inputs.mask)
    advantages, returns = Maker().get_advantages_and_returns(
        tensor(inputs.values), tensor(inputs.token_rewards), mask, discount, gae_lambda
    )
    return {
        "advantages": (advantages * mask).numpy(),
        "returns": (returns * mask).numpy(),
    }


def _controller(inputs: Inputs) -> Values:
    del inputs
    controller = kl_controller.AdaptiveKLController(0.1, 6.0, 10_000)
    values = []
    for seen in KL_SEEN:
        controller.update(seen, 256)
        values.append(float(controller.value))
    return {"coefficients": np.array(values)}


def _overlong(inputs: Inputs, *, longest: int, buffer: int) -> Values:
    del inputs
    lengths = torch.arange(1, longest + 3)
    rewards = torch.zeros(len(lengths), dtype=torch.float64)
    experience = SimpleNamespace(response_length=lengths, rewards=rewards)
    length_penalty.apply_overlong_penalty([experience], longest, buffer, 1.0)
    return {"penalties": rewards.numpy()}


REFERENCES = References("openrlhf", "trainer.ppo_utils.")

_MAKER = "experience_maker.compute_advantages_and_returns"
for _case, _estimator in (
    ("group-advantages/by-std", "group_norm"),
    ("group-advantages/centered", "dr_grpo"),
    ("leave-one-out", "rloo"),
):
    REFERENCES.add(
        _case,
        _MAKER,
        {"estimator": _estimator},
        partial(_of_rows, estimator=_estimator),
        batches=_FULL,
        differs=dict.fromkeys(_FULL, "group-epsilon") if _estimator == "group_norm" else {},
    )
REFERENCES.add(
    "reinforce-plus-plus-baseline",
    _MAKER,
    {"estimator": "reinforce_baseline"},
    partial(_of_tokens, estimator="reinforce_baseline", discount=1.0, kl_coef=0.0),
    batches=_FULL,
    float32=True,
    differs=dict.fromkeys(_FULL, "whitening-variance"),
)
for _discount, _kl_coef in ((1.0, 0.05), (0.9, 0.0)):
    REFERENCES.add(
        f"reinforce-plus-plus/last-reward/{_discount:g}-kl-{_kl_coef:g}",
        _MAKER,
        {"estimator": "reinforce", "gamma": _discount, "kl_coef": _kl_coef},
        partial(_of_tokens, estimator="reinforce", discount=_discount, kl_coef=_kl_coef),
        # A step that is no token of the policy discounts there; a KL is cut to +-10 there.
        batches=[
            name for name in _FULL if name != "turns" and not (_kl_coef and name == "extreme")
        ],
        float32=True,
        differs=dict.fromkeys(_FULL, "whitening-variance"),
    )
for _case, (_discount, _lambda) in GAE.items():
    REFERENCES.add(
        _case,
        "experience_maker.get_advantages_and_returns",
        {"gamma": _discount, "lambd": _lambda},
        partial(_gae, discount=_discount, gae_lambda=_lambda),
        # With lambda and discount 1, a step without reward and value changes nothing.
        batches=[name for name in BATCHES if name != "turns" or _discount * _lambda == 1.0],
    )
REFERENCES.add(
    "kl-controller",
    "kl_controller.AdaptiveKLController",
    {"init_kl_coef": 0.1, "target": 6.0, "horizon": 10_000, "n_steps": 256},
    _controller,
    batches=["F"],
)
for _longest, _buffer in ((10, 4), (6, 6)):
    REFERENCES.add(
        f"overlong/{_longest}-{_buffer}",
        "length_penalty.apply_overlong_penalty",
        {"max_new_tokens": _longest, "overlong_buffer_len": _buffer},
        partial(_overlong, longest=_longest, buffer=_buffer),
        batches=["F"],
    )
