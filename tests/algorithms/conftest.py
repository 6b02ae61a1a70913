"""A tokenizer with two real styles of chat template, trained here, and the public sample data."""

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message.role + '<|end_header|>\\n\\n' + message.content | trim }}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\\n\\n' }}{%- endif %}
"""

CORPUS = [
    "The assistant answers a question, and then the user asks for another one.\n\n",
    "What is 12 + 34 - 5? It is 41. Call the calculator with an expression.\n",
    "Système, naïve, 你好 世界, Привет, emoji: 😀 🎉.",
]


def _byte_level(special: list[str], *, bos: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def chatml() -> PreTrainedTokenizerFast:
    """Qwen's style: `<|im_start|>role\\n ... <|im_end|>\\n`, no BOS, tools."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(["<|pad|>", "<|im_start|>", "<|im_end|>"]),
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    """ChatML on a tokenizer of SentencePiece's kind, which begins every text with a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=list(string.printable + "é😀你好"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    wrapped.chat_template = CHATML
    return wrapped


@pytest.fixture(scope="session")
def headers() -> PreTrainedTokenizerFast:
    """Llama 3's style: the template prints a BOS, and the tokenizer would add one too."""
    special = ["<|begin|>", "<|header|>", "<|end_header|>", "<|eot|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(special, bos="<|begin|>"),
        bos_token="<|begin|>",
        eos_token="<|eot|>",
        additional_special_tokens=["<|header|>", "<|end_header|>"],
    )
    tokenizer.chat_template = HEADERS
    return tokenizer


@pytest.fixture(scope="session")
def llamafactory() -> Path:
    """Folder with public sample rows."""
    folder = Path(__file__).parents[2].parent / "shared" / "data" / "llamafactory"
    if not folder.is_dir():
        pytest.skip("the sample data of ../shared is not on this machine")
    return folder


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder with GSM8K's own files."""
    folder = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip("the sample data of ../shared is not on this machine")
    return folder
