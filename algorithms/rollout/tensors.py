"""Episodes as tensors: what is trained of them, and what each token earned."""

from collections.abc import Sequence

import torch

from algorithms.batch import Batch
from algorithms.data.collation import collate
from algorithms.data.examples import Example
from algorithms.rollout.episode import Episode
from algorithms.samples import Rollout
from service.spec import RewardSpec


def is_scored(episode: Episode, reward: RewardSpec | None) -> bool:
    """Whether an episode takes part in training.

    What the environment could not score is not worth 0, and stays out. Where the environment's
    reward has no weight, a reward model scores all that was played to its end. Where nothing is
    learned from rewards (None), all that was played takes part.
    """
    if reward is None:
        return episode.played
    if reward.model is not None and reward.environment_weight == 0:
        return episode.played
    return episode.reward is not None


def episode_batch(
    episodes: Sequence[Episode], *, reward: RewardSpec | None, padding_id: int, max_length: int
) -> Batch:
    """Whole episodes as sequences, trained on the policy's tokens, with `rollout_log_probs`.

    An episode that failed or was not scored keeps its place, so that the batch keeps its size, but
    none of its tokens is trained. One that failed before its first token is a single padding.
    """
    examples = [
        Example(
            tokens=torch.tensor(episode.token_ids or [padding_id], dtype=torch.int32),
            trained=torch.tensor(
                episode.policy_mask if is_scored(episode, reward) else [], dtype=torch.uint8
            ),
        )
        for episode in episodes
    ]
    batch = collate(examples, padding_id=padding_id, max_length=max_length)
    rollout_log_probs = torch.zeros_like(batch.loss_mask)
    for row, episode in enumerate(episodes):
        log_probs = episode.log_probs
        rollout_log_probs[row, : len(log_probs)] = torch.tensor(log_probs)
    return Batch(
        tokens=batch.tokens,
        lengths=batch.lengths,
        loss_mask=batch.loss_mask,
        per_token={"rollout_log_probs": rollout_log_probs},
    )


def episode_rollout(
    episodes: Sequence[Episode], batch: Batch, *, reward: RewardSpec | None, group_size: int = 1
) -> Rollout:
    """What the episodes of a batch earned, each reward at the last token of its turn.

    That token is the stop token, or the last one before the cut; it is never padding. A reward
    model's scores are added later, when they are known.

    Args:
        episodes: one for each row of the batch.
        batch: see `episode_batch`.
        reward: weight of the environment's reward, and the penalty for a turn that was cut; None
            where nothing is learned from rewards, and then all are 0.
        group_size: so many episodes, one behind the other, have one question.
    """
    # In float32, 0.1 + 0.2 in two turns and 0.3 in one would differ by more than rounding in a
    # group's statistics is let pass.
    rewards = torch.zeros(batch.loss_mask.shape, dtype=torch.float64)
    scored = [is_scored(episode, reward) for episode in episodes]
    for row, episode in enumerate(episodes):
        if reward is None or not scored[row]:
            continue
        ends = episode.turn_ends
        for place, earned in zip(ends, episode.rewards, strict=True):
            rewards[row, place] = reward.environment_weight * (earned or 0.0)
        if episode.unfinished:
            rewards[row, ends[-1]] -= reward.unfinished_penalty
    return Rollout(
        batch=batch,
        rewards=rewards,
        scored=torch.tensor(scored),
        group_size=group_size,
    )
