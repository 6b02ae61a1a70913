"""What algorithms share whose advantage is one number an answer, from the rewards of its group.

Several answers to one question are a group. They stand one behind the other in a batch, which is
whole on the driver: no group is ever split before its advantages are known.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from algorithms.advantages.group import has_spread
from algorithms.algorithm import Credit
from algorithms.policy_gradient import PolicyGradient
from algorithms.samples import Rollout
from service.spec import PolicyGradientSpec

type Rewards = Sequence[float | None]
"""Of the answers to one question; None could not be scored, and is not 0."""


class GroupRelative[Spec: PolicyGradientSpec](PolicyGradient[Spec]):
    """An algorithm that measures an answer against others to the same question."""

    @abstractmethod
    def of_group(self, rewards: Rewards) -> Rewards:
        """Advantages of one group's answers; what becomes of None does not matter."""

    def credit(self, rollout: Rollout) -> Credit:
        """Each answer's advantage at each of its tokens."""
        rows = by_group(rollout, self.of_group)
        return Credit(advantages=broadcast(rows, rollout), metrics=group_metrics(rollout))


def by_group(rollout: Rollout, of_group: Callable[[Rewards], Rewards]) -> Tensor:
    """[B] float64: `of_group` of each group's returns, each group on its own; 0 for None."""
    flat = [value or 0.0 for group in returns_by_group(rollout) for value in of_group(group)]
    return torch.tensor(flat, dtype=torch.float64)


def returns_by_group(rollout: Rollout) -> list[Rewards]:
    """The returns of each group's rows; None where a row was not scored."""
    pairs = zip(rollout.returns.tolist(), rollout.scored.tolist(), strict=True)
    returns = [value if scored else None for value, scored in pairs]
    size = rollout.group_size
    return [returns[start : start + size] for start in range(0, len(returns), size)]


def group_metrics(rollout: Rollout) -> dict[str, float]:
    """How many groups teach nothing.

    `groups_unscored` is a count of groups without any scored answer. `groups_flat_rate` is the
    share of the others whose answers all have the same return, shaped as it is: their advantages
    are 0. It is left out where there are none.
    """
    groups = returns_by_group(rollout)
    scored = [group for group in groups if any(value is not None for value in group)]
    metrics: dict[str, float] = {"groups_unscored": len(groups) - len(scored)}
    if scored:
        flat = sum(not has_spread(group) for group in scored)
        metrics["groups_flat_rate"] = flat / len(scored)
    return metrics


def broadcast(advantages: Tensor, rollout: Rollout) -> Tensor:
    """[B, T]: each row's advantage at each of its tokens."""
    return advantages.unsqueeze(1).expand(-1, rollout.batch.tokens.shape[1])
