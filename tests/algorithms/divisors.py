"""reasoning-gym's greatest common divisors, for a model that has learned only how to answer.

A tiny model that was fine-tuned on questions with random digits as answers says any digit, whatever
is asked. Of three small numbers the greatest common divisor is mostly 1, so there is something to
find out: by this alone the reward can rise from 0.1 to 0.65.
"""

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from algorithms.algorithm import load_algorithm
from algorithms.batch import Batch, Normalizer, pad_rows
from algorithms.data.chat import ChatFormat
from service.spec import SftSpec
from tests.algorithms.conftest import CHATML
from tests.algorithms.tiny_policy import TinyPolicy, tiny_model

NUMBERS = {"min_numbers": 3, "max_numbers": 3, "min_value": 1, "max_value": 9}
"""The environment's config."""
MAX_LENGTH = 64


def divisors_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with long tokens for what every question says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    said = [f"user\n{_question(random.Random(0))}", "assistant\n"]
    tokenizer.train_from_iterator(said * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHATML
    return fast


def answers_with_any_digit(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, steps: int = 40
) -> Qwen2ForCausalLM:
    """A tiny model that was fine-tuned on random answers."""
    model, draw = tiny_model(len(tokenizer), seed), random.Random(seed)
    chat = ChatFormat(tokenizer)
    policy = TinyPolicy(model, load_algorithm(SftSpec()), stop_id=chat.end_of_turn_id)
    for _ in range(steps):
        batch = batch_of([_answered(chat, tokenizer, draw) for _ in range(16)])
        policy.train_step(batch, Normalizer.of(batch), learning_rate=0.01)
    return model


def _question(draw: random.Random) -> str:
    numbers = ", ".join(str(draw.randint(1, 9)) for _ in range(3))
    return (
        f"Find the Greatest Common Divisor (GCD) of these numbers: {numbers}. "
        "Give only the GCD as your final answer."
    )


def _answered(
    chat: ChatFormat, tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> tuple[list[int], list[int]]:
    prompt = chat.prompt([{"role": "user", "content": _question(draw)}])
    digit = tokenizer.encode(str(draw.randint(1, 9)), add_special_tokens=False)
    return prompt, [*digit, chat.end_of_turn_id]


def batch_of(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    masks = [[0.0] * len(prompt) + [1.0] * len(answer) for prompt, answer in rows]
    return Batch(
        tokens=pad_rows([p + a for p, a in rows], value=0, dtype=torch.int64),
        lengths=torch.tensor([len(p + a) for p, a in rows]),
        loss_mask=pad_rows(masks, value=0.0, dtype=torch.float32),
    )
