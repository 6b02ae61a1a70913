"""Episodes as steps: the policy is asked, plays, and its own tokens become the batch.

The order of questions is fixed; how many of them a step takes is not, where questions are replaced
that teach nothing. So the source keeps the place of the next question, and a checkpoint holds it:
no question is left out or trained a second time before all others were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from algorithms.data.chat import ChatFormat
from algorithms.errors import JobFailure
from algorithms.phases import PhaseClock
from algorithms.rollout.collector import Collector
from algorithms.rollout.episode import Episode
from algorithms.rollout.groups import (
    Drawn,
    Group,
    describe_shortage,
    draw_all,
    draw_with_spread,
)
from algorithms.rollout.questions import Questions
from algorithms.rollout.statistics import (
    baseline_metrics,
    drawn_metrics,
    episode_metrics,
    episode_warnings,
    refuse_many_errors,
)
from algorithms.rollout.tensors import episode_batch, episode_rollout
from algorithms.samples import Rollout, Samples
from algorithms.seeds import derive_seed
from environments.protocol import Item
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
        self._algorithm = spec.algorithm
        self._reward = spec.reward if spec.algorithm.learns_from_rewards else None
        self._rollout = spec.rollout
        self._seed = spec.training.seed
        self._padding_id = chat.padding_id
        self._group_size = spec.algorithm.samples_per_prompt
        self._groups, left_over = divmod(spec.training.global_batch_size, self._group_size)
        self._best_reward = collector.environment.reward_range[1]
        self._next: int | None = 0
        if left_over:
            raise JobFailure(
                Reason.USER_ERROR,
                f"`training.global_batch_size` {spec.training.global_batch_size} must be a "
                f"multiple of the group size {self._group_size}",
            )
        if spec.training.steps is None:
            raise JobFailure(Reason.USER_ERROR, "`training.steps` is needed: episodes never end")
        self.total_steps = spec.training.steps

    def draw(self, step: int, clock: PhaseClock) -> Samples:
        """Plays the next questions, each `samples_per_prompt` times, and once greedily where the
        algorithm asks for that.

        Raises:
            JobFailure: ENVIRONMENT_ERRORS where too many episodes failed; USER_ERROR where no
                question is left to train on, or where too few taught anything and the job shall
                then fail.
        """
        start = self._place(step)
        drawn, episodes = self._draw_groups(step, start, clock)
        greedy = self._answer_greedily(step, drawn, clock)
        refuse_many_errors([*episodes, *greedy], self._rollout.max_error_rate)
        self._next = start + drawn.used
        warnings = episode_warnings([*episodes, *greedy]) + self._shortage(step, drawn)
        rollout, greedy_rollout = self._tensors(drawn, greedy)
        return Samples(
            batch=rollout.batch,
            rollout=rollout,
            greedy=greedy_rollout,
            metrics={
                **episode_metrics(episodes),
                **drawn_metrics(drawn, best_reward=self._best_reward),
                **baseline_metrics(greedy),
            },
            warnings=warnings,
        )

    def state(self) -> dict[str, Any]:
        """Place of the next question. Draws depend on the step's number alone."""
        return {"next_question": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on at the question of `state`; where it names none, at the one that the number of
        the next step gives."""
        self._next = state.get("next_question")

    def _place(self, step: int) -> int:
        return (step - 1) * self._groups if self._next is None else self._next

    def _draw_groups(self, step: int, start: int, clock: PhaseClock) -> tuple[Drawn, list[Episode]]:
        """The step's groups, and the episodes of all that were played for them."""
        episodes: list[Episode] = []

        def play(offset: int, count: int, number: int) -> list[Group]:
            items = self._ask(start + offset, count)
            found = self._collector.collect(
                items,
                repeats=self._group_size,
                temperature=self._rollout.temperature,
                seed=self._seed_of(step, number),
                clock=clock,
            )
            episodes.extend(found)
            refuse_many_errors(episodes, self._rollout.max_error_rate)
            size = self._group_size
            return [
                Group(item=item, episodes=found[i * size : (i + 1) * size])
                for i, item in enumerate(items)
            ]

        rule = self._algorithm.resampling
        if rule is None:
            return draw_all(play, self._groups), episodes
        return draw_with_spread(play, self._groups, rule), episodes

    def _shortage(self, step: int, drawn: Drawn) -> list[Mapping[str, Any]]:
        """What to say of a batch that could not be filled.

        Late in training most are short, and the metrics count that; a step with nothing to learn
        from is another matter.
        """
        rule = self._algorithm.resampling
        if rule is None or not drawn.masked:
            return []
        said = f"step {step}: {describe_shortage(drawn, self._best_reward)}"
        if rule.when_short == "fail":
            raise JobFailure(
                Reason.USER_ERROR,
                f"{said}. Give questions that the policy answers now right, now wrong, raise "
                "`max_batches`, or set `when_short` to train",
            )
        return [] if drawn.trained else [{"message": f"{said}. The step trains nothing"}]

    def _ask(self, start: int, count: int) -> list[Item]:
        try:
            return self._questions.at(start, count)
        except ValueError as error:
            raise JobFailure(Reason.USER_ERROR, str(error)) from error

    def _answer_greedily(self, step: int, drawn: Drawn, clock: PhaseClock) -> list[Episode]:
        """Each question once; where none was replaced, environments are reset as for the answers
        that are sampled."""
        if not self._algorithm.greedy_baseline:
            return []
        return self._collector.collect(
            [group.item for group in drawn.groups],
            temperature=0.0,
            seed=self._seed_of(step, 0),
            clock=clock,
        )

    def _seed_of(self, step: int, number: int) -> int:
        further = (number,) if number else ()
        return derive_seed(self._seed, "rollout", step, *further)

    def _tensors(self, drawn: Drawn, greedy: Sequence[Episode]) -> tuple[Rollout, Rollout | None]:
        """The rollout that is trained, and that of the greedy answers."""
        episodes = [episode for group in drawn.groups for episode in group.episodes]
        rollout = self._as_rollout(episodes, self._group_size)
        if drawn.masked:
            kept = torch.arange(len(episodes)) < len(drawn.trained) * self._group_size
            scored = rollout.scored & kept
            rollout = replace(rollout, scored=scored, batch=rollout.batch.masked(scored))
        if not greedy:
            return rollout, None
        alone = self._as_rollout(greedy, 1)
        return rollout.with_baselines(alone), alone

    def _as_rollout(self, episodes: Sequence[Episode], group_size: int) -> Rollout:
        batch = episode_batch(
            episodes,
            reward=self._reward,
            padding_id=self._padding_id,
            max_length=self._collector.generator.max_length,
        )
        return episode_rollout(episodes, batch, reward=self._reward, group_size=group_size)
