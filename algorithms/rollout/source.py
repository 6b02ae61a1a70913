"""Episodes as steps: the policy is asked, plays, and its own tokens become the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from algorithms.batch import Batch
from algorithms.data.chat import ChatFormat
from algorithms.data.collation import collate
from algorithms.data.dataset import Example
from algorithms.errors import JobFailure
from algorithms.phases import PhaseClock
from algorithms.rollout.collector import Collector
from algorithms.rollout.episode import Episode
from algorithms.rollout.questions import Questions
from algorithms.rollout.statistics import episode_metrics, episode_warnings, refuse_many_errors
from algorithms.samples import Rollout, Samples
from algorithms.seeds import derive_seed
from service.spec import JobContext, Reason


class EpisodeSource:
    """Steps of `global_batch_size` episodes; see `algorithms.samples.Source`."""

    online = True

    def __init__(
        self, context: JobContext, chat: ChatFormat, collector: Collector, questions: Questions
    ) -> None:
        spec = context.spec
        self._collector = collector
        self._questions = questions
        self._rollout = spec.rollout
        self._seed = spec.training.seed
        self._group_size = spec.algorithm.samples_per_prompt
        self._batch_size = spec.training.global_batch_size
        self._padding_id = chat.padding_id
        if self._batch_size % self._group_size:
            raise JobFailure(
                Reason.USER_ERROR,
                f"`training.global_batch_size` {self._batch_size} must be a multiple of the group "
                f"size {self._group_size}",
            )
        if spec.training.steps is None:
            raise JobFailure(Reason.USER_ERROR, "`training.steps` is needed: episodes never end")
        self.total_steps = spec.training.steps

    def draw(self, step: int, clock: PhaseClock) -> Samples:
        """Plays the step's questions, each `samples_per_prompt` times.

        Raises:
            JobFailure: ENVIRONMENT_ERRORS where too many episodes failed; USER_ERROR where no
                question is left to train on.
        """
        try:
            items = self._questions.of_step(step, self._batch_size // self._group_size)
        except ValueError as error:
            raise JobFailure(Reason.USER_ERROR, str(error)) from error
        episodes = self._collector.collect(
            items,
            repeats=self._group_size,
            temperature=self._rollout.temperature,
            seed=derive_seed(self._seed, "rollout", step),
            clock=clock,
        )
        refuse_many_errors(episodes, self._rollout.max_error_rate)
        batch = self._batch(episodes)
        return Samples(
            batch=batch,
            rollout=episode_rollout(episodes, batch, group_size=self._group_size),
            metrics=episode_metrics(episodes),
            warnings=episode_warnings(episodes),
        )

    def _batch(self, episodes: Sequence[Episode]) -> Batch:
        return episode_batch(
            episodes,
            padding_id=self._padding_id,
            max_length=self._collector.generator.max_length,
        )

    def state(self) -> dict[str, Any]:
        """Nothing: questions and draws depend on the step's number alone."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to do; see `state`."""


def episode_batch(episodes: Sequence[Episode], *, padding_id: int, max_length: int) -> Batch:
    """Whole episodes as sequences, trained on the policy's tokens, with `rollout_log_probs`.

    An episode that failed or was not scored keeps its place, so that the batch keeps its size, but
    none of its tokens is trained. One that failed before its first token is a single padding.
    """
    examples = [
        Example(
            tokens=torch.tensor(episode.token_ids or [padding_id], dtype=torch.int32),
            trained=torch.tensor(
                episode.policy_mask if episode.reward is not None else [], dtype=torch.uint8
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


def episode_rollout(episodes: Sequence[Episode], batch: Batch, *, group_size: int) -> Rollout:
    """What the episodes of a batch earned, each reward at the last token of its turn.

    Args:
        episodes: one for each row of the batch.
        batch: see `episode_batch`.
        group_size: so many episodes, one behind the other, have one question.
    """
    rewards = torch.zeros_like(batch.loss_mask)
    for row, episode in enumerate(episodes):
        if episode.reward is not None:
            for place, reward in zip(episode.turn_ends, episode.rewards, strict=True):
                rewards[row, place] = reward or 0.0
    return Rollout(
        batch=batch,
        rewards=rewards,
        scored=torch.tensor([episode.reward is not None for episode in episodes]),
        group_size=group_size,
        truncated=torch.tensor([episode.truncated for episode in episodes]),
    )
