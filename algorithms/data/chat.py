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

Text that is to stay without a template (`ChatFormat.split_plain`) is cut in the same way: a prompt,
and apart from it the answer with the token that ends a sequence.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from algorithms.data.reasoning import find_style
from service.spec.rows import Conversation, PlainText, RowFault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXTS_KEPT = 512

type Messages = Sequence[Mapping[str, Any]]
type Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of rendered text that is tokenized by itself: an answer, or what is between two."""

    text: str
    trained: bool
    follows_turn: bool
    """It begins right after an end-of-turn token."""


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
        # A group's episodes share most of their texts.
        self._render_json = lru_cache(maxsize=TEXTS_KEPT)(self._render_uncached)
        self._encode = lru_cache(maxsize=TEXTS_KEPT)(self._encode_uncached)
        first = tokenizer("x")["input_ids"][:1]
        self._bos: str = tokenizer.bos_token if first == [tokenizer.bos_token_id] else ""
        self._special = {
            index: str(token)
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.end_of_turn_id, self.end_of_turn = self._find_end_of_turn()
        self._start_differs = self._differs_at_the_start()
        self.reasoning = find_style(self._render_answer)
        padding = tokenizer.pad_token_id
        self.padding_id: int = self.end_of_turn_id if padding is None else padding

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Ids of the rendered messages, up to where the assistant goes on."""
        return list(self._encode(self._render(messages, tools, generation_prompt=True)))

    def text(self, token_ids: Sequence[int]) -> str:
        """What the ids say, special tokens included."""
        decoded: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return decoded

    def split(self, conversation: Conversation) -> list[Part]:
        """A training row as parts; the trained ones are answers with their end-of-turn token.

        What follows the last of them is left out: no loss depends on it, and a reward model reads
        a sequence's last token, which in a rollout is the answer's.

        Raises:
            RowFault: the answers' places cannot be told; the message names the place in the row.
        """
        messages = [self.reasoning.write(message) for message in conversation.messages]
        tools = conversation.tools
        text = self._render(messages, tools)
        parts: list[Part] = []
        place = 0
        for index, trained in enumerate(conversation.trained):
            if not trained:
                continue
            if index == 0:
                raise RowFault(
                    "messages[0] is the assistant's, and nothing prompts it",
                    'put a message before it, or give it "weight": 0',
                )
            if self.end_of_turn in json.dumps(messages[index], ensure_ascii=False):
                raise RowFault(
                    f"messages[{index}] contains {self.end_of_turn!r}, the token that ends a turn"
                )
            start, end = self._answer_span(text, messages, index, tools)
            source = conversation.messages[index]
            self._check_reasoning(source, index, prompt=text[:start], answer=text[start:end])
            parts.append(Part(text=text[place:start], trained=False, follows_turn=place > 0))
            parts.append(Part(text=text[start:end], trained=True, follows_turn=False))
            place = end
        return parts

    def split_plain(self, text: PlainText) -> list[Part]:
        """A prompt and its answer without the template, as parts.

        The tokenizer's beginning-of-sequence token stands before the prompt where it puts one
        before any text, and its end-of-sequence token behind the answer; either only once.
        """
        bos, eos = self._bos, self._tokenizer.eos_token or self.end_of_turn
        return [
            Part(text=bos + text.prompt.removeprefix(bos), trained=False, follows_turn=False),
            Part(text=text.answer.removesuffix(eos) + eos, trained=True, follows_turn=False),
        ]

    def tokenize(self, rows: Sequence[Sequence[Part]]) -> list[TokenizedChat]:
        """Ids and mask of each row, all in one call of the tokenizer, which is much faster."""
        encoded = iter(self._encode_parts([part for row in rows for part in row]))
        tokenized = []
        for row in rows:
            ids: list[int] = []
            trained: list[int] = []
            for part in row:
                part_ids = next(encoded)
                ids += part_ids
                trained += [int(part.trained)] * len(part_ids)
            tokenized.append(TokenizedChat(token_ids=ids, trained=trained))
        return tokenized

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
        ids = self._encode(self.end_of_turn + text[end:])
        return list(ids[1:] if closed else ids)

    def _render(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> str:
        return self._render_json(json.dumps([list(messages), list(tools)]), generation_prompt)

    def _render_answer(self, messages: Messages) -> tuple[str, str]:
        """What stands before the last message's answer, and the whole rendering."""
        return self._render(messages[:-1], (), generation_prompt=True), self._render(messages, ())

    def _check_reasoning(
        self, message: Mapping[str, Any], index: int, *, prompt: str, answer: str
    ) -> None:
        """Whether the reasoning of an answer that is trained stands between its tags."""
        wanted = message.get("reasoning_content", "").strip()
        if wanted and self.reasoning.read(answer, prompt=prompt)[0] != wanted:
            raise RowFault(
                f"the chat template does not write the reasoning of messages[{index}] between "
                f"{self.reasoning.opening} and {self.reasoning.closing}, or leaves it out",
                'give the message "weight": 0, or make a row that ends with it',
            )

    def _render_uncached(self, messages_and_tools: str, generation_prompt: bool) -> str:
        messages, tools = json.loads(messages_and_tools)
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except TemplateError as error:
            raise RowFault(f"the chat template refuses the messages: {error}") from error
        return rendered

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _answer_span(
        self, text: str, messages: Messages, index: int, tools: Tools
    ) -> tuple[int, int]:
        """Where messages[index] stands in the rendered text, its end-of-turn token included."""
        prefix = self._render(messages[:index], tools, generation_prompt=True)
        if not text.startswith(prefix):
            raise RowFault(
                f"the chat template renders what precedes messages[{index}] differently once the "
                "conversation goes on, so the assistant's tokens cannot be told from others"
            )
        is_last = index + 1 == len(messages)
        through = text if is_last else self._render(messages[: index + 1], tools)
        end = text.find(self.end_of_turn, len(prefix))
        if end < 0 or self.end_of_turn not in through[len(prefix) :]:
            raise RowFault(
                f"the chat template does not end messages[{index}] with {self.end_of_turn!r}"
            )
        return len(prefix), end + len(self.end_of_turn)

    def _encode_parts(self, parts: Sequence[Part]) -> list[list[int]]:
        """Ids of each part, as they are behind what stands before it.

        Some tokenizers put a space before whatever begins a text; there, a part that does not
        begin one is put behind an end-of-turn token, which is taken off again.
        """
        if not parts:
            return []  # tokenizers refuse an empty list
        behind = [p.follows_turn or (p.trained and self._start_differs) for p in parts]
        texts = [
            self.end_of_turn + part.text if shifted else part.text
            for part, shifted in zip(parts, behind, strict=True)
        ]
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [ids[1:] if shifted else ids for ids, shifted in zip(encoded, behind, strict=True)]

    def _differs_at_the_start(self) -> bool:
        """Whether the tokenizer treats the beginning of a text unlike what follows a turn."""
        behind = self._encode(self.end_of_turn + "Answer")
        if behind[0] != self.end_of_turn_id:
            raise ValueError(f"the tokenizer does not keep {self.end_of_turn!r} as one token")
        return behind[1:] != self._encode("Answer")

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
