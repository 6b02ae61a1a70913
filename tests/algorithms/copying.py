"""A small task with a preference that can be learned, and measured on prompts never trained on.

A prompt is a capital and a small letter, in either order; an answer repeats one of the two, one to
three times, and stops. Answers with the capital are preferred.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from algorithms.batch import Batch
from algorithms.protocols import Sampling
from tests.algorithms.tiny_policy import TinyPolicy

STOP, ASK = 1, 2
CAPITALS, SMALL = range(3, 15), range(15, 27)
VOCABULARY = 27
WIDTH = 8
HELD_OUT = 64

type Prompt = tuple[int, int]


@dataclass(frozen=True)
class Copying:
    """Prompts that are trained on, and others that are held out."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    @classmethod
    def split(cls, seed: int) -> "Copying":
        prompts = [*product(CAPITALS, SMALL), *product(SMALL, CAPITALS)]
        random.Random(seed).shuffle(prompts)
        return cls(train=prompts[HELD_OUT:], held_out=prompts[:HELD_OUT])


def answer(letter: int, times: int) -> list[int]:
    return [letter] * times + [STOP]


def batch_of(rows: Sequence[tuple[Prompt, list[int]]], *, unit: int = 1) -> Batch:
    tokens, mask = torch.zeros(len(rows), WIDTH, dtype=torch.int64), torch.zeros(len(rows), WIDTH)
    lengths = []
    for i, (prompt, written) in enumerate(rows):
        sequence = [*prompt, ASK, *written]
        tokens[i, : len(sequence)] = torch.tensor(sequence)
        mask[i, 3 : len(sequence)] = 1.0
        lengths.append(len(sequence))
    return Batch(tokens=tokens, lengths=torch.tensor(lengths), loss_mask=mask, unit=unit)


def mixed(prompts: Sequence[Prompt], draw: random.Random) -> Batch:
    """Both kinds of answers, as often: what a model has seen before it is told what is better."""
    rows = [(prompt, answer(draw.choice(prompt), draw.randint(1, 3))) for prompt in prompts]
    return batch_of(rows)


def pairs(prompts: Sequence[Prompt], draw: random.Random) -> Batch:
    """Each prompt's preferred answer, and then the other one. A capital is the lower number."""
    rows = [
        (prompt, answer(letter, draw.randint(1, 3)))
        for prompt in prompts
        for letter in sorted(prompt)
    ]
    return batch_of(rows, unit=2)


def labelled(prompts: Sequence[Prompt], draw: random.Random) -> Batch:
    """One answer to each prompt, either kind, and whether it is a good one."""
    batch = mixed(prompts, draw)
    good = batch.tokens[:, 3] < SMALL[0]
    return batch.with_per_sequence(desirable=good.float())


def chosen(prompts: Sequence[Prompt], count: int, seed: int) -> Iterator[list[Prompt]]:
    """Endless draws of so many different prompts."""
    draw = random.Random(seed)
    while True:
        yield draw.sample(list(prompts), count)


def preferred_rate(policy: TinyPolicy, prompts: Sequence[Prompt], *, answers: int) -> float:
    """Share of sampled answers, so many to each prompt, that are a preferred one whole."""
    asked = [prompt for prompt in prompts for _ in range(answers)]
    sampling = Sampling(temperature=1.0, max_new_tokens=4, seed=9)
    written = policy.generate([[*prompt, ASK] for prompt in asked], sampling)
    good = [
        list(completion.token_ids) in [answer(min(prompt), times) for times in (1, 2, 3)]
        for completion, prompt in zip(written, asked, strict=True)
    ]
    return sum(good) / len(good)
