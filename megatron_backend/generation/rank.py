"""The part of a rank that generates: a copy of the model in the generation layout, and an engine.

The generation layout is on the same ranks as training: `tp` ranks share one copy, and the ranks
left over hold data-parallel copies. Generation data-parallel rank d takes the prompts
`layout.share(len(prompts), d)` of a list: one contiguous run, so that the copies of a GRPO group
mostly stay together and are prefilled once. All ranks of a tensor-parallel group take the same run
and answer the same; `layout.output_ranks` names one of each, in the order of the list. Draws depend
on a prompt's place in the whole list, so none of this changes a token.
"""

import operator
from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel

from algorithms.protocols import Completion, Sampling
from megatron_backend.generation.cpu_engine import CpuEngine
from megatron_backend.generation.engine import GenerationEngine, check_prompts
from megatron_backend.models.build import build_model
from megatron_backend.weight_sync.groups import generation_groups
from megatron_backend.weight_sync.reshard import WeightSync
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig

# Of the GPU memory that is free when the copy is built; training needs the rest for activations.
_CACHE_SHARE = 0.25


class GenerationRank:
    """One rank's generation copy. Every rank of the run must make one.

    Args:
        config: the model.
        layout: of generation: `Layout(tp=..., dp=ranks // tp)`.
        padded_vocab: rows of vocabulary of the trained model (`model.vocab_size`).
        stop_token_ids: a completion ends with the first of these.
        max_length: tokens at most in prompt and answer together.
        dtype: of the weights, the trained model's.

    Attributes:
        layout: as given.
        model: this rank's part of the copy.
        weight_version: of its weights; None before the first sync.

    Raises:
        ValueError: the layout does not divide the model, or the dtype is not bfloat16 on CUDA.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        *,
        padded_vocab: int,
        stop_token_ids: Sequence[int],
        max_length: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config.check_layout(tp=layout.tp, pp=layout.pp)
        self.layout = layout
        self.weight_version: int | None = None
        self.max_length = max_length
        self._vocabulary_size = config.vocab_size
        [self.model] = build_model(
            config,
            layout,
            dtype=dtype,
            max_length=max_length,
            pg_collection=generation_groups(layout),
            padded_vocab=padded_vocab,
        )
        self.model.eval().requires_grad_(False)
        self._engine = _engine(self.model, config, stop_token_ids, max_length, dtype)
        self._sync: WeightSync | None = None

    def sync(self, train_model: Sequence[GPTModel], version: int) -> None:
        """Takes over the weights of the trained model's chunks as `version`.

        Every rank must call it.
        """
        if self._sync is None or any(map(operator.is_not, self._sync.source, train_model)):
            self._sync = WeightSync(train_model, self.model)
        # A sync that fails half-way leaves weights of no version at all.
        self.weight_version = None
        self._sync.run()
        self.weight_version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], indices: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """One completion a prompt, in order; every rank of a tensor-parallel group must call it
        with the same arguments.

        Args:
            prompts: this rank's share of a list.
            indices: each prompt's place in the whole list.
            sampling: temperature, bound and seed.

        Raises:
            ValueError: a prompt is empty, too long, or holds no token id; nothing was generated.
            RuntimeError: there was no `sync` yet.
        """
        check_prompts(
            prompts, indices, max_length=self.max_length, vocabulary_size=self._vocabulary_size
        )
        if self.weight_version is None:
            raise RuntimeError("the generation copy has no weights yet: call sync first")
        return self._engine.generate(prompts, indices, sampling, weight_version=self.weight_version)


def _engine(
    model: GPTModel,
    config: ModelConfig,
    stop_token_ids: Sequence[int],
    max_length: int,
    dtype: torch.dtype,
) -> GenerationEngine:
    """Megatron's dynamic engine on CUDA, ours on the CPU."""
    if not torch.cuda.is_available():
        return CpuEngine(model, config, stop_token_ids=stop_token_ids, max_length=max_length)
    if dtype != torch.bfloat16:
        raise ValueError(
            "generation on CUDA needs `precision.dtype` bf16: its attention kernels know no fp32"
        )
    from megatron_backend.generation.dynamic_engine import DynamicEngine

    free, _ = torch.cuda.mem_get_info()
    return DynamicEngine(
        model,
        vocabulary_size=config.vocab_size,
        stop_token_ids=stop_token_ids,
        max_length=max_length,
        memory_bytes=int(free * _CACHE_SHARE),
    )
