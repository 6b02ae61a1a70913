"""A policy that says what it is told to: for tests of what is done with a model's words."""

from collections.abc import Sequence

from algorithms.data.chat import ChatFormat, Part
from algorithms.protocols import Completion, Sampling


class ScriptedPolicy:
    """Row i of the first call writes `turns[i][0]`, and so on through each episode.

    A text that ends in "..." is cut there by a length bound, without an end-of-turn token.
    """

    def __init__(self, chat: ChatFormat, turns: Sequence[Sequence[str]], max_length: int) -> None:
        self.max_length = max_length
        self.prompts: list[list[list[int]]] = []
        self.samplings: list[Sampling] = []
        self.version = 0
        self._chat = chat
        self._turns = [list(texts) for texts in turns]

    def sync_weights(self, version: int) -> None:
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        self.prompts.append([list(prompt) for prompt in prompts])
        self.samplings.append(sampling)
        open_rows = [texts for texts in self._turns if texts][: len(prompts)]
        return [
            self._write(texts.pop(0), len(prompt))
            for texts, prompt in zip(open_rows, prompts, strict=True)
        ]

    def _write(self, text: str, prompt_length: int) -> Completion:
        cut = text.endswith("...")
        written = Part(text=text.removesuffix("..."), trained=True, follows_turn=False)
        ids = self._chat.tokenize([[written]])[0].token_ids
        ids = ids if cut else [*ids, self._chat.end_of_turn_id]
        return Completion(
            token_ids=ids,
            log_probs=[-0.01 * (prompt_length + i) for i in range(len(ids))],
            stop_reason="length" if cut else "stop",
            weight_version=self.version,
        )
