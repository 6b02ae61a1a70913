"""Plays many episodes in lock step of turns.

All open episodes' prompts go into one generation call a turn; then the environments answer, each in
its own coroutine of one event loop with a deadline. An exception in an environment ends its own
episode and no other. Between calls the loop stands still, so an environment must not count on
background tasks while the model writes.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from algorithms.data.chat import ChatFormat
from algorithms.errors import JobFailure
from algorithms.phases import PhaseClock
from algorithms.protocols import Completion, Generator, Sampling
from algorithms.rollout.episode import Episode, Segment
from algorithms.rollout.turn import assistant_message, assistant_turn
from algorithms.seeds import derive_seed
from environments.protocol import Env, EnvironmentType, Item
from service.spec import Reason


@dataclass(slots=True, kw_only=True)
class _Play:
    """An episode, its environment, the ids of its next prompt, and what was written after it."""

    episode: Episode
    reset_seed: int
    env: Env | None = None
    prompt: list[int] = field(default_factory=list)
    written: Completion | None = None
    open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """How episodes of one environment are played.

    Attributes:
        environment: registry entry, with its checked `config`.
        max_turns: assistant turns after which an episode is cut.
        generator: writes the turns. Its `max_length` bounds a whole episode.
        chat: the tokenizer and its template.
        max_new_tokens: of one turn.
        timeout_seconds: deadline of one environment call.
    """

    environment: EnvironmentType
    config: BaseModel
    max_turns: int
    generator: Generator
    chat: ChatFormat
    max_new_tokens: int
    timeout_seconds: float

    def collect(
        self,
        items: Sequence[Item],
        *,
        temperature: float,
        seed: int,
        clock: PhaseClock,
        repeats: int = 1,
    ) -> list[Episode]:
        """Plays each item `repeats` times; the repeats of an item stand side by side.

        Args:
            items: the questions.
            temperature: 0 is greedy.
            seed: decides every draw, together with the turn's number.
            clock: generation is its `rollout`, the environments are its `reward`.
            repeats: the group size. An item's repeats reset their environments with one seed.

        Raises:
            JobFailure: the chat template cannot be used for several turns.
        """
        plays = [
            _Play(episode=Episode(item=item), reset_seed=derive_seed(seed, "reset", i) % 2**31)
            for i, item in enumerate(items)
            for _ in range(repeats)
        ]
        with asyncio.Runner() as runner:
            try:
                with clock("reward"):
                    runner.run(_each(plays, self._reset))
                turn = 0
                while still_open := [play for play in plays if play.open]:
                    sampling = Sampling(
                        temperature=temperature,
                        max_new_tokens=self.max_new_tokens,
                        seed=derive_seed(seed, "turn", turn),
                    )
                    with clock("rollout"):
                        written = self.generator.generate([p.prompt for p in still_open], sampling)
                    for play, completion in zip(still_open, written, strict=True):
                        play.written = completion
                    with clock("reward"):
                        runner.run(_each(still_open, self._step))
                    turn += 1
            finally:
                runner.run(_each(plays, self._close))
        return [play.episode for play in plays]

    async def _reset(self, play: _Play) -> None:
        play.env = self.environment.make(self.config, max_turns=self.max_turns)
        messages, info = await self._call(
            play.env.reset(seed=play.reset_seed, item=play.episode.item)
        )
        play.episode.messages.extend(messages)
        play.episode.add_metrics(info)
        prompt = self.chat.prompt(messages, self.environment.tools)
        if len(prompt) >= self.generator.max_length:
            raise ValueError(
                f"the first prompt has {len(prompt)} tokens and leaves no room for an answer "
                f"below `training.max_length` {self.generator.max_length}"
            )
        self._continue(play, Segment(origin="prompt", token_ids=prompt))

    async def _step(self, play: _Play) -> None:
        episode, env, completion = play.episode, play.env, play.written
        assert env is not None  # an open play has been reset
        assert completion is not None  # and the model has gone on with it
        turn = assistant_turn(completion, self.chat, number=len(episode.rewards))
        self._continue(
            play,
            Segment(
                origin="policy",
                token_ids=completion.token_ids,
                log_probs=completion.log_probs,
                weight_version=completion.weight_version,
                stop_reason=completion.stop_reason,
            ),
        )
        episode.tool_calls += len(turn.tool_calls)
        episode.malformed_tool_calls += len(turn.tool_call_errors)
        answer = len(episode.messages)
        episode.messages.append(assistant_message(turn, completion, self.chat))
        result = await self._call(env.step(turn))
        if result.reward is not None and not math.isfinite(result.reward):
            raise ValueError(f"the environment gave the reward {result.reward}")
        episode.rewards.append(result.reward)
        episode.add_metrics(result.info)
        episode.messages.extend(result.messages)
        if result.terminated or result.truncated or len(episode.rewards) >= self.max_turns:
            episode.truncated = not result.terminated
            play.open = False
        elif not result.messages:
            raise RuntimeError("the environment neither ended the episode nor said anything")
        else:
            self._observe(play, answer, closed=not turn.truncated)

    def _observe(self, play: _Play, answer: int, *, closed: bool) -> None:
        """Appends the environment's words, or cuts the episode where they leave no room."""
        try:
            ids = self.chat.observation(
                play.episode.messages, answer, self.environment.tools, closed=closed
            )
        except ValueError as error:
            raise JobFailure(
                Reason.USER_ERROR, f"no rollout of several turns with this model: {error}"
            ) from error
        if len(play.prompt) + len(ids) >= self.generator.max_length:
            play.episode.truncated = True
            play.open = False
        else:
            self._continue(play, Segment(origin="observation", token_ids=ids))

    async def _close(self, play: _Play) -> None:
        """Closes the environment. What was scored stays so, whatever happens here."""
        if play.env is None:
            return
        try:
            await self._call(play.env.close())
        except (Exception, asyncio.CancelledError) as error:
            play.episode.close_error = f"{type(error).__name__}: {error}"

    async def _call[T](self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(call, self.timeout_seconds)
        except TimeoutError as error:
            raise TimeoutError(
                str(error) or f"no answer within {self.timeout_seconds:g} seconds"
            ) from error

    def _continue(self, play: _Play, segment: Segment) -> None:
        play.episode.segments.append(segment)
        play.prompt.extend(segment.token_ids)


async def _each(
    plays: Sequence[_Play], action: Callable[[_Play], Coroutine[Any, Any, None]]
) -> None:
    """Runs the action for all at once; whoever raises has a failed episode.

    Raises:
        JobFailure: an action says that the job, and not only its episode, cannot go on.
    """
    results = await asyncio.gather(*map(action, plays), return_exceptions=True)
    for play, result in zip(plays, results, strict=True):
        if isinstance(result, JobFailure):
            raise result
        if result is not None:
            play.episode.fail(result)
            play.open = False
