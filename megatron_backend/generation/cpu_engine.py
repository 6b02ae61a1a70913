"""Generation on the CPU: batches of prompts over a cache of keys and values.

A batch is prefilled, then goes on one token a row and step until each row has drawn a stop token or
is at its bound. Rows that are done leave the batch when they are a quarter of it: dropping rows
copies the cache, so it is done seldom, yet no row stays much longer than it must.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.batch import pad_rows
from algorithms.protocols import Completion, Sampling
from megatron_backend.generation.batching import MemoryBound, PromptBatch, batches
from megatron_backend.generation.cached_decoder import CachedDecoder
from megatron_backend.generation.decoder_weights import DecoderWeights
from megatron_backend.generation.draws import uniforms
from megatron_backend.generation.kv_cache import KeyValueCache
from megatron_backend.generation.sampler import VocabularyShard, greedy, sample
from megatron_backend.models.vocabulary import real_columns
from service.spec.model_config import ModelConfig

# Tokens of one prefill: enough to keep matrix products efficient, few enough that its activations
# stay small beside the cache.
_PREFILL_TOKENS = 4096
# Bytes a logit takes in sampling: itself and its scaled copy in float32, the mass in float32 and
# float64, and as much again for what the allocator holds.
_BYTES_PER_LOGIT = 32


class CpuEngine:
    """See `megatron_backend.generation.engine.GenerationEngine`.

    Args:
        model: a GPTModel with all its layers; its weights are read anew at each call.
        config: of the model; columns beyond its vocabulary are never sampled.
        stop_token_ids: a completion ends with the first of these.
        max_length: tokens at most in prompt and answer together.
        memory_bytes: what one batch's keys, values and logits may take.
    """

    def __init__(
        self,
        model: Any,
        config: ModelConfig,
        *,
        stop_token_ids: Sequence[int],
        max_length: int,
        memory_bytes: int = 1 << 30,
    ) -> None:
        self._model, self._config = model, config
        self._stop = torch.zeros(config.vocab_size, dtype=torch.bool)
        self._stop[list(stop_token_ids)] = True
        self._max_length = max_length
        self._memory_bytes = memory_bytes

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        sampling: Sampling,
        *,
        weight_version: int,
    ) -> list[Completion]:
        """See `GenerationEngine.generate`.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        if not prompts:
            return []
        weights = DecoderWeights.of(self._model, self._config)
        bound = self._bound(weights)
        completions: dict[int, Completion] = {}
        for batch in batches(
            prompts,
            max_new_tokens=sampling.max_new_tokens,
            max_length=self._max_length,
            bound=bound,
        ):
            run = _BatchRun(
                batch,
                CachedDecoder(weights, positions=batch.slots),
                _shard(weights),
                self._stop,
                sampling,
                [indices[row] for row in batch.rows],
            )
            for row, (tokens, log_probs, stopped) in zip(batch.rows, run.results(), strict=True):
                completions[row] = Completion(
                    token_ids=tokens,
                    log_probs=log_probs,
                    stop_reason="stop" if stopped else "length",
                    weight_version=weight_version,
                )
        return [completions[row] for row in range(len(prompts))]

    def _bound(self, weights: DecoderWeights) -> MemoryBound:
        item = weights.embedding.element_size()
        per_layer = 2 * weights.kv_heads * self._config.head_dim * item
        return MemoryBound(
            bytes=self._memory_bytes,
            bytes_per_token=per_layer * len(weights.layers),
            bytes_per_row=_BYTES_PER_LOGIT * weights.output.shape[0],
        )


def _shard(weights: DecoderWeights) -> VocabularyShard:
    width = weights.output.shape[0]
    rank = 0 if weights.group is None else weights.group.rank()
    return VocabularyShard(
        start=width * rank,
        real=real_columns(weights.config.vocab_size, width=width, tp_rank=rank),
        group=weights.group,
    )


class _BatchRun:
    """One batch from its prompts to its completions."""

    def __init__(
        self,
        batch: PromptBatch,
        decoder: CachedDecoder,
        shard: VocabularyShard,
        stop: Tensor,
        sampling: Sampling,
        indices: Sequence[int],
    ) -> None:
        self._decoder = decoder
        self._shard = shard
        self._stop = stop
        self._sampling = sampling
        self._limits = torch.tensor(batch.limits)
        rows, steps = len(batch.rows), max(batch.limits)
        self._tokens = torch.zeros((rows, steps), dtype=torch.int64)
        self._log_probs = torch.zeros((rows, steps))
        self._lengths = torch.zeros(rows, dtype=torch.int64)
        self._stopped = torch.zeros(rows, dtype=torch.bool)
        lengths = [len(batch.prompts[owner]) for owner in batch.owners]
        if sampling.temperature:
            self._uniforms = torch.from_numpy(uniforms(sampling.seed, indices, lengths, steps))
        self._cache, self._logits = self._prefill(batch, lengths)

    def results(self) -> Iterator[tuple[list[int], list[float], bool]]:
        """Tokens, log-probs and whether a stop token came, for each row."""
        self._decode()
        for row, length in enumerate(self._lengths.tolist()):
            yield (
                self._tokens[row, :length].tolist(),
                self._log_probs[row, :length].tolist(),
                bool(self._stopped[row]),
            )

    def _prefill(self, batch: PromptBatch, lengths: list[int]) -> tuple[KeyValueCache, Tensor]:
        """Fills a cache; also gives the [rows, vocabulary / tp] logits of the first new token."""
        weights = self._decoder.weights
        longest = batch.prompt_slots
        cache = KeyValueCache(
            layers=len(weights.layers),
            rows=len(batch.rows),
            heads=weights.kv_heads,
            slots=batch.slots,
            head_dim=weights.config.head_dim,
            dtype=weights.embedding.dtype,
            padding=longest - torch.tensor(lengths),
        )
        owners = torch.tensor(batch.owners)
        logits = []
        for first, last in _prefill_runs(batch.prompts):
            part = batch.prompts[first:last]
            tokens, padding = _pad_left(part)
            part_logits, pieces = self._decoder.prefill(tokens, padding)
            rows = ((owners >= first) & (owners < last)).nonzero()[:, 0]
            cache.fill(rows, pieces, owners[rows] - first, longest)
            logits.append(part_logits)
        return cache, torch.cat(logits)[owners]

    def _decode(self) -> None:
        active = torch.arange(len(self._tokens))
        done = torch.zeros(len(active), dtype=torch.bool)
        logits = self._logits
        for step in range(self._tokens.shape[1]):
            tokens, log_probs = self._draw(logits, active, step)
            self._tokens[active, step] = tokens
            self._log_probs[active, step] = log_probs
            stopped = self._stop[tokens]
            ends = (stopped | (self._limits[active] == step + 1)) & ~done
            if bool(ends.any()):
                self._lengths[active[ends]] = step + 1
                self._stopped[active[ends]] = stopped[ends]
                done |= ends
                finished = int(done.sum())
                if finished == len(active):
                    return
                if 4 * finished >= len(active):
                    kept = (~done).nonzero()[:, 0]
                    self._cache.keep(kept)
                    active, done, tokens = active[kept], done[kept], tokens[kept]
            logits = self._decoder.step(tokens, self._cache)

    def _draw(self, logits: Tensor, active: Tensor, step: int) -> tuple[Tensor, Tensor]:
        if not self._sampling.temperature:
            return greedy(logits, shard=self._shard)
        return sample(
            logits,
            temperature=self._sampling.temperature,
            uniforms=self._uniforms[active, step],
            shard=self._shard,
        )


def _prefill_runs(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Runs of prompts, sorted by length, with at most `_PREFILL_TOKENS` padded tokens each."""
    first = 0
    for last in range(1, len(prompts) + 1):
        full = last == len(prompts) or (last + 1 - first) * len(prompts[last]) > _PREFILL_TOKENS
        if full:
            yield first, last
            first = last


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """[B, P] tokens, and [B] how many of each are padding."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    backwards = pad_rows([list(p)[::-1] for p in prompts], value=0, dtype=torch.int64)
    return backwards.flip(1), width - lengths
