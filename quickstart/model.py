"""The quickstart's model: a tokenizer, a chat template and a config, made here from nothing.

The tokenizer is Qwen2's (transformers builds that class for `model_type: qwen2`, whatever
tokenizer.json says) over single bytes, with the pieces that matter here as added tokens, which are
matched first and longest: the words of the questions, spaced operators, the JSON around a tool
call, and every number of up to three digits (as Llama 3's tokenizer has them: with digits one by
one, copying an answer is much harder to learn).
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

MAX_LENGTH = 128
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CALL_JSON = ['{"name": "', '", "arguments": {"expression": "', '"}}']
OPERATORS = [" + ", " - ", " * ", " / ", " ="]
WORDS = [
    *("user", "assistant", "system", "tool", "calculator"),
    *("State", "the", "final", "answer", "to", "following", "arithmetic", "problem"),
]
NUMBERS = [str(number) for number in range(1000)]

# ChatML with Qwen's tool markup. `arguments` may be a string, as OpenAI sends it, or an object.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}
{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}
{{- message.content or '' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def build_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer with its chat template."""
    tokenizer = Qwen2Tokenizer(
        vocab={byte: index for index, byte in enumerate(sorted(ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_START]})
    pieces = [*MARKUP, *CALL_JSON, *OPERATORS, *WORDS, *(f" {word}" for word in WORDS), *NUMBERS]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return tokenizer


def build_config(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    """A Qwen2 config of about half a million parameters for this tokenizer."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        # Tied embeddings of 0.02 give logits so flat that rare numbers take three times as long.
        "initializer_range": 0.05,
        "hidden_act": "silu",
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write_model_folder(folder: Path) -> dict[str, Any]:
    """Writes tokenizer and config.json into `folder`; returns the config."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    config = build_config(tokenizer)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config
