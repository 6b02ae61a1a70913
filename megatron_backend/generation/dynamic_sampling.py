"""Our draws inside Megatron's dynamic engine.

Megatron's own sampler takes its random numbers from one generator, so a draw depends on which other
requests are in flight; and it draws among all columns of the padded vocabulary, then clamps, which
gives the padding's mass to the last token. Its interface for sampling backends lets us put ours in
its place: the same numbers by place, the same mask and the same log-probs as on the CPU.

The engine gathers logits over tensor-parallel ranks before it samples, so each rank draws from the
same numbers and gets the same token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.inference.sampling import Sampling as SamplingBackend
from torch import Tensor

from algorithms.protocols import Sampling
from megatron_backend.generation.draws import uniforms
from megatron_backend.generation.sampler import VocabularyShard, greedy, sample


class PlacedSampling(SamplingBackend):
    """Draws for the requests of one call of `generate`.

    Args:
        sampling: temperature and seed, for all requests.
        places: for each request's id, the prompt's place in the whole list.
        vocabulary_size: real tokens; later columns are never drawn.
    """

    def __init__(
        self, sampling: Sampling, places: Mapping[int, int], *, vocabulary_size: int
    ) -> None:
        self._sampling = sampling
        self._places = places
        self._shard = VocabularyShard(start=0, real=vocabulary_size, group=None)

    def sample_kernel(
        self,
        logits: Tensor,
        n: int,
        context: Any,
        *,
        no_top_k: bool,
        no_top_p: bool,
        gather_indices: Tensor | None = None,
        token_to_request_index: Tensor | None = None,
        output: Tensor | None = None,
        eager: bool = False,
        cache_key: Any = None,
    ) -> Tensor:
        """See Megatron's `Sampling.sample_kernel`; row i belongs to the i-th active request.

        Raises:
            NotImplementedError: the engine asks for speculative decoding, which we never set up.
        """
        del no_top_k, no_top_p, eager, cache_key  # our requests have no filters and no graphs
        if token_to_request_index is not None:
            raise NotImplementedError("draws by place know one token a request and step")
        rows = logits[:n] if gather_indices is None else logits[gather_indices[:n]]
        active = slice(context.paused_request_count, context.total_request_count)
        if self._sampling.temperature:
            tokens, _ = sample(
                rows.float(),
                temperature=self._sampling.temperature,
                uniforms=self._numbers(context, active, n).to(rows.device),
                shard=self._shard,
            )
        else:
            tokens, _ = greedy(rows.float(), shard=self._shard)
        return tokens if output is None else output.copy_(tokens)

    def log_probs_kernel(
        self, logits: Tensor, context: Any, *, token_to_request_index: Tensor | None = None
    ) -> Tensor:
        """[rows, vocabulary] log-probs of what `sample_kernel` draws from; greedy at 1."""
        del context, token_to_request_index  # all requests have the same temperature
        scaled = logits.float() / (self._sampling.temperature or 1.0)
        scaled[:, self._shard.real :] = -torch.inf
        return scaled.log_softmax(-1)

    def _numbers(self, context: Any, active: slice, count: int) -> Tensor:
        """[count] the number of each active request's next token."""
        ids = context.request_ids[active][:count].tolist()
        lengths = context.request_kv_length_offsets[active] + context.request_query_lengths[active]
        return torch.from_numpy(
            uniforms(
                self._sampling.seed,
                [self._places[one] for one in ids],
                lengths[:count].tolist(),
                1,
            )[:, 0]
        )
