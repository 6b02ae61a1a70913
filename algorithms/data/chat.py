"""Chat templates as they are shipped, and which tokens of a conversation the assistant wrote.

Stock templates carry no marks for the assistant's text, so the place of each answer is found from
outside, by one rule for training rows and rollouts alike. Render the messages before answer i with
the generation prompt: that text must be the beginning of the whole rendering, and where it ends the
answer begins. The answer ends with the first end-of-turn token after that place, which is the token
that sampling stops at. What the template writes after it (ChatML's newline) is not the assistant's.

A template may rewrite earlier turns, for example drop their reasoning; then the first text is not
the beginning of the second, the place is unknown, and that is an error, never a guess.

Each answer is tokenized apart from the text before it, because that is what the model meets in a
rollout: a prompt, and then its own tokens. In the whole text a tokenizer may well put a prompt's
last newline and an answer's first into one token, or split the prompt's newlines in another way.

A template writes its own beginning-of-sequence token, so nothing is added by the tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from algorithms.data.rows import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

type Messages = Sequence[Mapping[str, Any]]
type Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedChat:
    """Token ids of a conversation, and for each whether it is trained (1) or not (0)."""

    token_ids: list[int]
    trained: list[int]


class ChatFormat:
    """A tokenizer and its chat template.

    Raises:
        ValueError: the tokenizer has no template, or its template does not open the assistant's
            turn with a generation prompt and close it with a special token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; put one in tokenizer_config.json")
        self._tokenizer = tokenizer
        self._special = {
            index: str(token)
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.end_of_turn_id, self.end_of_turn = self._find_end_of_turn()
        # Some tokenizers put a space before whatever begins a text.
        self._start_differs = self._encode("Answer") != self._encode_after_turn("Answer")
        padding = tokenizer.pad_token_id
        self.padding_id: int = self.end_of_turn_id if padding is None else padding

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Ids of the rendered messages, up to where the assistant goes on."""
        return self._encode(self._render(messages, tools, generation_prompt=True))

    def text(self, token_ids: Sequence[int]) -> str:
        """What the ids say, special tokens included."""
        decoded: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return decoded

    def tokenize(self, conversation: Conversation) -> TokenizedChat:
        """A training row's ids and mask: each trained answer with its end-of-turn token.

        Raises:
            ValueError: the mask cannot be made; the message names the place in the row.
        """
        messages, tools = conversation.messages, conversation.tools
        text = self._render(messages, tools)
        spans = []
        for index, trained in enumerate(conversation.trained):
            if not trained:
                continue
            if index == 0:
                raise ValueError(
                    "messages[0] is the assistant's, and nothing prompts it: put a message before "
                    'it, or give it "weight": 0'
                )
            if self.end_of_turn in json.dumps(messages[index], ensure_ascii=False):
                raise ValueError(
                    f"messages[{index}] contains {self.end_of_turn!r}, the token that ends a turn"
                )
            spans.append(self._answer_span(text, messages, index, tools))
        return self._tokenize_parts(text, spans)

    def observation(
        self, messages: Messages, answer: int, tools: Tools = (), *, closed: bool = True
    ) -> list[int]:
        """Ids between the model's own tokens of `messages[answer]` and its next turn.

        They are what the whole rendering has there, newline after the end-of-turn token included,
        so a rollout need never tokenize its history again.

        Args:
            messages: the whole conversation, with what the environment said after the answer.
            answer: index of the last assistant message.
            tools: as in `prompt`.
            closed: whether the model wrote the end-of-turn token itself; it is added where not.

        Raises:
            ValueError: the template rewrites earlier turns.
        """
        messages = [*messages[:answer], _stand_in(messages[answer]), *messages[answer + 1 :]]
        text = self._render(messages, tools, generation_prompt=True)
        _, end = self._answer_span(text, messages, answer, tools)
        ids = self._encode_after_turn(text[end:])
        return ids if closed else [self.end_of_turn_id, *ids]

    def _render(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _answer_span(
        self, text: str, messages: Messages, index: int, tools: Tools
    ) -> tuple[int, int]:
        """Where messages[index] stands in the rendered text, its end-of-turn token included."""
        prefix = self._render(messages[:index], tools, generation_prompt=True)
        if not text.startswith(prefix):
            raise ValueError(
                f"the chat template renders what precedes messages[{index}] differently once the "
                "conversation goes on, so the assistant's tokens cannot be told from others"
            )
        through = self._render(messages[: index + 1], tools)
        end = text.find(self.end_of_turn, len(prefix))
        if end < 0 or self.end_of_turn not in through[len(prefix) :]:
            raise ValueError(
                f"the chat template does not end messages[{index}] with {self.end_of_turn!r}"
            )
        return len(prefix), end + len(self.end_of_turn)

    def _tokenize_parts(self, text: str, spans: Sequence[tuple[int, int]]) -> TokenizedChat:
        """The text between the spans, which is not trained, and the spans, which are."""
        ids: list[int] = []
        trained: list[int] = []
        place = 0
        for start, end in [*spans, (len(text), len(text))]:
            between = text[place:start]
            context = self._encode_after_turn(between) if place else self._encode(between)
            answer = self._encode_answer(text[start:end])
            ids += context + answer
            trained += [0] * len(context) + [1] * len(answer)
            place = end
        return TokenizedChat(token_ids=ids, trained=trained)

    def _encode_answer(self, text: str) -> list[int]:
        """Ids of what the model writes after a prompt."""
        return self._encode_after_turn(text) if self._start_differs else self._encode(text)

    def _encode_after_turn(self, text: str) -> list[int]:
        """Ids of a text that follows the end-of-turn token."""
        ids = self._encode(self.end_of_turn + text)
        if ids[0] != self.end_of_turn_id:
            raise ValueError(f"the tokenizer does not keep {self.end_of_turn!r} as one token")
        return ids[1:]

    def _find_end_of_turn(self) -> tuple[int, str]:
        """The first special token after an answer, found by rendering one."""
        question = {"role": "user", "content": "Question"}
        answer = {"role": "assistant", "content": "Answer"}
        prefix = self._render([question], (), generation_prompt=True)
        text = self._render([question, answer], ())
        place = text.find("Answer", len(prefix))
        opening = self._encode(text[len(prefix) : place])
        if not text.startswith(prefix) or place < 0 or self._special.keys() & set(opening):
            raise ValueError(
                "the chat template has no generation prompt that opens the assistant's turn; "
                "it must honour add_generation_prompt"
            )
        for index in self._encode(text[place:]):
            if index in self._special:
                return index, self._special[index]
        raise ValueError("the chat template ends the assistant's turn with no special token")


def _stand_in(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The same message with plain words in it: only what follows it is wanted.

    The model may have spelled out the end-of-turn token letter by letter.
    """
    stand_in: dict[str, Any] = {"role": "assistant", "content": "Answer"}
    if answer.get("tool_calls"):
        stand_in["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {}}}
            for call in answer["tool_calls"]
        ]
    return stand_in
