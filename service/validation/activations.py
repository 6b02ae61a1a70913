"""What the forward pass of one micro-batch leaves for the backward pass, by formula.

The terms follow the layer's modules in their order: what each keeps, in elements a token. Where
modules differ between CUDA (Transformer Engine: fused norms, fused SwiGLU, flash attention) and the
CPU, the formula does. The idea is that of "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198, section 4), for gated MLPs, grouped queries and attention that never
writes out its scores.

The CPU's terms are measured by a test. Those of CUDA follow from Transformer Engine's code.
"""

from dataclasses import dataclass

from service.spec import JobSpec
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padding_factor
from service.validation.parameters import padded_vocabulary

# As `megatron_backend.training.log_probs` cuts its work; a test holds the two to each other.
CHUNK_BYTES, KEPT_BYTES, LEAST_ROWS = 2**26, 2**28, 64
_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """Bytes of one rank at the worst moment of a step.

    Attributes:
        layers: what the layers of all micro-batches in flight keep, and under recomputation what
            the one that is being computed again holds.
        head: the last norm and what the output layer reads; 0 but on the last stage.
        logits: chunks of logits and the output layer's gradient; 0 but on the last stage.
    """

    layers: int
    head: int
    logits: int


def forward_tokens(spec: JobSpec, layout: Layout) -> int:
    """Tokens at most of one forward pass on one rank, before context parallelism cuts them."""
    training = spec.training
    longest = training.max_length
    rows = -(-training.global_batch_size // layout.dp)
    if training.micro_batch_size == "auto":
        tokens = min(max(training.micro_batch_tokens, longest), rows * longest)
    else:
        tokens = min(training.micro_batch_size, rows) * longest
    factor = padding_factor(layout, fp8=spec.precision.fp8)
    return -(-tokens // factor) * factor


def estimate_activations(
    spec: JobSpec, model: ModelConfig, layout: Layout, *, stage: int, cuda: bool
) -> ActivationMemory:
    """The activations of each rank of a pipeline stage."""
    tokens = forward_tokens(spec, layout) // layout.cp
    element = _FP32 if spec.precision.dtype == "fp32" else 2
    chunks = layout.stage_layers(model.num_layers)[stage]
    flights = chunks_in_flight(layout, stage=stage, micro_batches=_micro_batches(spec, layout))
    kept, again = _layer_bytes(spec, model, layout, element=element, cuda=cuda)
    layers = tokens * (kept * flights * len(chunks[0]) + again)
    shards = layout.tp if layout.sequence_parallel else 1
    head = logits = 0.0
    if stage == layout.pp - 1:
        norms = (1 if cuda else 2) * model.hidden_size / shards
        head = tokens * element * (norms + 2 * model.hidden_size)
        logits = _logits(tokens, model, layout)
    return ActivationMemory(layers=round(layers), head=round(head), logits=round(logits))


def chunks_in_flight(layout: Layout, *, stage: int, micro_batches: int | None) -> int:
    """Forward passes of a chunk whose backward pass is still to come, at most.

    One-forward-one-backward begins with as many forward passes as there are later stages; the
    interleaved schedule of virtual stages with twice as many, and with a round of all its chunks
    but one (Megatron-Core, `get_pp_rank_microbatches`).

    Args:
        micro_batches: of one step; None where they are decided step by step.
    """
    later = layout.pp - stage - 1
    flights = later + 1
    if layout.vpp > 1:
        flights = 2 * later + (layout.vpp - 1) * layout.pp + 1
    return flights if micro_batches is None else min(flights, micro_batches * layout.vpp)


def _micro_batches(spec: JobSpec, layout: Layout) -> int | None:
    size = spec.training.micro_batch_size
    if size == "auto":
        return None
    return max(-(-spec.training.global_batch_size // (layout.dp * size)), 1)


def _layer_bytes(
    spec: JobSpec, model: ModelConfig, layout: Layout, *, element: int, cuda: bool
) -> tuple[float, float]:
    """(kept by each layer, held by the one that is computed again), in bytes a token."""
    shards = layout.tp if layout.sequence_parallel else 1
    inputs = model.hidden_size / shards * element
    attention = _attention(model, layout, element=element, cuda=cuda)
    rest = _norms(model, shards, element=element, cuda=cuda)
    rest += _projections(model, layout, shards, element=element, cuda=cuda)
    match spec.training.recompute:
        case "none":
            return rest + attention.kept + attention.again, 0.0
        case "selective":
            return rest + attention.inputs, attention.again
        case "full":
            return inputs, rest + attention.kept + attention.again - inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Core attention, in bytes a token.

    Attributes:
        kept: what its backward pass reads and selective recomputation would keep.
        again: what selective recomputation computes again.
        inputs: what selective recomputation keeps instead.
    """

    kept: float
    again: float
    inputs: float


def _attention(model: ModelConfig, layout: Layout, *, element: int, cuda: bool) -> _Attention:
    heads = model.num_heads / layout.tp
    query = heads * model.head_dim * element
    key_value = 2 * max(model.num_kv_heads / layout.tp, 1) * model.head_dim * element
    # The CPU's attention gathers keys and values of the whole sequence.
    gathered = key_value if cuda else key_value * layout.cp
    log_sums = heads * _FP32
    if cuda:
        # The output is what the projection behind it keeps; it counts there.
        kept = query + gathered
        return _Attention(kept=kept, again=log_sums, inputs=query + key_value)
    return _Attention(kept=0.0, again=2 * query + gathered + log_sums, inputs=query + key_value)


def _norms(model: ModelConfig, shards: int, *, element: int, cuda: bool) -> float:
    """Each norm keeps its input and a number a token; on the CPU its normalised input as well."""
    each = (1 if cuda else 2) * model.hidden_size * element + _FP32
    total = (4 if model.post_norms else 2) * each / shards
    return total


def _projections(
    model: ModelConfig, layout: Layout, shards: int, *, element: int, cuda: bool
) -> float:
    """What linear layers, rotary embeddings, head norms and the MLP or its experts keep."""
    hidden, tp = model.hidden_size / shards, layout.tp
    query = model.num_heads / tp * model.head_dim
    key = max(model.num_kv_heads / tp, 1) * model.head_dim
    elements = hidden + query  # inputs of the QKV matrix and of attention's output matrix
    if model.qk_norm:
        elements += query + key if cuda else 3 * query + 4 * key
    if model.moe is None:
        width = model.ffn_size / tp
        return element * (elements + hidden + (3 if cuda else 5) * width)
    # Every rank of an expert's slices sees all tokens that come to it, so `shards` plays no part.
    experts, width = model.moe, model.moe.ffn_size / tp
    routed = experts.top_k * (model.hidden_size + (3 if cuda else 6) * width)
    router = experts.num_experts * _FP32 / shards
    return element * (elements + hidden + routed) + router


def _logits(tokens: int, model: ModelConfig, layout: Layout) -> float:
    width = padded_vocabulary(model.vocab_size, layout.tp) // layout.tp
    rows = min(max(CHUNK_BYTES // (_FP32 * width), LEAST_ROWS), tokens)
    chunk = rows * width * _FP32
    kept = 0 if model.final_softcap else min(KEPT_BYTES, tokens * width * _FP32)
    gradient = width * model.hidden_size * _FP32
    return kept + 2 * chunk + gradient
