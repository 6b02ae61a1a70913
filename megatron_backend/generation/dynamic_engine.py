"""Generation on CUDA: Megatron-Core's dynamic inference engine, with continuous batching.

The engine keeps keys and values in blocks and starts a waiting request as soon as a running one
ends. Requests of one group share the blocks of their prompt (whole blocks only). Draws are ours
(`dynamic_sampling`), so tokens are what the CPU engine would draw, up to the kernels' rounding.

Megatron's engine knows one termination id. Further stop tokens are given as stop words, which it
notices one step late and forgets when it evicts a request for lack of blocks; so a completion is
cut at its first stop token here, whatever the engine did with it.

Each call begins with a reset: blocks of an earlier call, perhaps of earlier weights, are gone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode

from algorithms.protocols import Completion, Sampling
from megatron_backend.generation.dynamic_sampling import PlacedSampling

_NO_TOKEN = -1
_MAX_STEP_TOKENS = 16384  # Megatron's own default for the tokens of one forward pass
BLOCK_TOKENS = 256
"""Tokens of one block of keys and values; flash attention's paged kernels want this many."""


class DynamicEngine:
    """See `megatron_backend.generation.engine.GenerationEngine`.

    Args:
        model: a GPTModel with all its layers, in eval mode.
        vocabulary_size: real tokens; columns beyond it are never sampled.
        stop_token_ids: a completion ends with the first of these.
        max_length: tokens at most in prompt and answer together.
        memory_bytes: what keys and values may take.
        block_tokens: tokens of one block of keys and values.
    """

    def __init__(
        self,
        model: Any,
        *,
        vocabulary_size: int,
        stop_token_ids: Sequence[int],
        max_length: int,
        memory_bytes: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._stop = tuple(stop_token_ids)
        self._max_length = max_length
        context = DynamicInferenceContext(
            model.config,
            InferenceConfig(
                block_size_tokens=block_tokens,
                buffer_size_gb=memory_bytes / 2**30,
                max_sequence_length=max_length,
                max_tokens=max(_MAX_STEP_TOKENS, max_length),
                pg_collection=model.pg_collection,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
            ),
        )
        self._controller = TextGenerationController(
            GPTInferenceWrapper(model, context), _NoTokenizer()
        )
        self._engine = DynamicInferenceEngine(self._controller, context)
        # The engine marks the process as inferring from its first moment on; the trained model,
        # in the same process, must not be told so.
        InferenceMode.unset_active()

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
            RuntimeError: the engine refused a request.
        """
        self._engine.reset()
        # There is no public way to choose a sampling backend that Megatron does not bring.
        self._controller._sampling = PlacedSampling(
            sampling, dict(enumerate(indices)), vocabulary_size=self._vocabulary_size
        )
        for request_id, prompt in enumerate(prompts):
            self._add(request_id, prompt, sampling)
        finished: dict[int, DynamicInferenceRequest] = {}
        with InferenceMode.active():
            while self._engine.has_unfinished_requests():
                for record in self._engine.step_modern()["finished_request_records"]:
                    finished[record.request_id] = record.merge()
        return [
            completion_of(finished[request_id], self._stop, weight_version=weight_version)
            for request_id in range(len(prompts))
        ]

    def _add(self, request_id: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._engine.add_request(
            request_id,
            list(prompt),
            SamplingParams(
                num_tokens_to_generate=min(sampling.max_new_tokens, self._max_length - len(prompt)),
                termination_id=self._stop[0] if self._stop else _NO_TOKEN,
                return_log_probs=True,
                skip_prompt_log_probs=True,
                # Megatron then leaves a stop word in the tokens, as it does with a termination id.
                detokenize_stop_sequence=True,
            ),
        )
        request = self._engine.get_request(request_id)
        if request.failed():
            reasons = [str(event.payload) for event in request.events if event.payload]
            raise RuntimeError(f"Megatron's engine refused prompt {request_id}: {reasons}")
        request.stop_word_ids = [[token] for token in self._stop[1:]]


def completion_of(
    request: DynamicInferenceRequest, stop_token_ids: Sequence[int], *, weight_version: int
) -> Completion:
    """What a finished request says, cut at its first stop token.

    Raises:
        RuntimeError: the engine gave up on the request, or gave a token no log-prob.
    """
    if request.failed():
        raise RuntimeError(f"Megatron's engine gave up on request {request.request_id}")
    tokens = list(request.generated_tokens)
    log_probs = list(request.generated_log_probs or ())
    ends = [place for place, token in enumerate(tokens) if token in stop_token_ids]
    length = ends[0] + 1 if ends else len(tokens)
    if len(log_probs) < length:
        raise RuntimeError(
            f"Megatron's engine gave {len(log_probs)} log-probs for the {length} tokens of request "
            f"{request.request_id}"
        )
    return Completion(
        token_ids=tokens[:length],
        log_probs=log_probs[:length],
        stop_reason="stop" if ends else "length",
        weight_version=weight_version,
    )


class _NoTokenizer:
    """Megatron's engine writes out the text of what it finishes; here only token ids matter."""

    eod = None
    bos = None

    def detokenize(self, _tokens: Sequence[int]) -> str:
        return ""
