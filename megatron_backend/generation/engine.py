"""What a rank asks of a generation engine; one runs on the CPU, one is Megatron's own on CUDA."""

from collections.abc import Sequence
from typing import Protocol

from algorithms.protocols import Completion, Sampling


class GenerationEngine(Protocol):
    """Samples from one model, on all tensor-parallel ranks of it at once."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        sampling: Sampling,
        *,
        weight_version: int,
    ) -> list[Completion]:
        """One completion a prompt, in order; the same on each rank of the tensor-parallel group.

        Args:
            prompts: token ids, checked by `check_prompts`.
            indices: each prompt's place in the whole list, over all data-parallel ranks.
            sampling: temperature, bound and seed.
            weight_version: of the weights that the model has now. Nothing that was computed from
                another version (a cache of keys and values) may be used.
        """
        ...


def check_prompts(
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    *,
    max_length: int,
    vocabulary_size: int,
) -> None:
    """Refuses a list before any work is done on it.

    Raises:
        ValueError: a prompt is empty, leaves no room for one token below `max_length`, or holds an
            id outside the vocabulary; or there is not one index a prompt.
    """
    if len(indices) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts came with {len(indices)} indices")
    for place, prompt in zip(indices, prompts, strict=True):
        if not prompt:
            raise ValueError(f"prompt {place} is empty: it needs at least one token")
        if len(prompt) >= max_length:
            raise ValueError(
                f"prompt {place} has {len(prompt)} tokens and leaves no room below the longest "
                f"sequence of {max_length}: shorten it or raise `training.max_length`"
            )
        if min(prompt) < 0 or max(prompt) >= vocabulary_size:
            raise ValueError(
                f"prompt {place} holds a token id outside the vocabulary of {vocabulary_size}"
            )
