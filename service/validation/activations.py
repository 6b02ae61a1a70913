"""What the forward passes of a step leave for its backward passes, by formula.

The terms follow the layer's modules in their order: what each keeps, in bytes a token. Where
modules differ between CUDA (Transformer Engine: fused norms, fused SwiGLU, flash attention) and the
CPU, the formula does. The idea is that of "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198, section 4), for gated MLPs, grouped queries and attention that never
writes out its scores.

The CPU's terms are measured by a test. Those of CUDA follow from Transformer Engine's code, and
hold bf16 activations also where FP8 would store some in 8 bits.
"""

from dataclasses import dataclass

from service.spec import JobSpec
from service.spec.algorithm import Head
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.padding import padded_vocab_size, padding_factor

# As `megatron_backend.training.log_probs` cuts its work; a test holds the two to each other.
CHUNK_BYTES, KEPT_BYTES, LEAST_ROWS = 2**26, 2**28, 64
_FP32 = 4
# Token ids; what the loss keeps of a token; what routing keeps of a token and one of its experts.
_TOKEN_BYTES, _LOSS_BYTES, _ROUTE_BYTES = 8, 40, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """Bytes of one rank.

    Attributes:
        kept: what the layers of all micro-batches in flight keep.
        again: what the layer holds that recomputation is computing again.
        head: the last norm and what the output layer reads; 0 but on the last stage. It is gone
            when the first layer is computed again.
        logits: chunks of logits and the output layer's gradient; 0 but on the last stage.
    """

    kept: int
    again: int
    head: int
    logits: int

    @property
    def most(self) -> int:
        """Without logits, at the worst moment of a step."""
        return self.kept + max(self.again, self.head)

    @property
    def most_with_logits(self) -> int:
        """With logits, at the worst moment of a step."""
        return self.kept + max(self.again, self.head + self.logits)


def forward_tokens(spec: JobSpec, layout: Layout) -> int:
    """Tokens at most of one forward pass on one rank, before context parallelism cuts them."""
    training, together = spec.training, spec.algorithm.sequences_per_row
    longest = training.max_length
    rows = sequences_of_step(spec, layout)
    if training.micro_batch_size == "auto":
        # What is read together goes together, however long it is.
        tokens = min(max(training.micro_batch_tokens, together * longest), rows * longest)
    else:
        tokens = min(max(training.micro_batch_size, together), rows) * longest
    factor = padding_factor(layout, fp8=spec.precision.fp8)
    return -(-tokens // factor) * factor


def sequences_of_step(spec: JobSpec, layout: Layout) -> int:
    """Sequences at most that one rank reads in one optimizer step."""
    algorithm = spec.algorithm
    rows = -(-spec.training.global_batch_size // (layout.dp * algorithm.steps_per_batch))
    return rows * algorithm.sequences_per_row


def estimate_activations(
    spec: JobSpec,
    model: ModelConfig,
    layout: Layout,
    *,
    stage: int,
    cuda: bool,
    head: Head = "vocabulary",
) -> ActivationMemory:
    """The activations of each rank of a pipeline stage."""
    tokens = forward_tokens(spec, layout) // layout.cp
    sizes = _Sizes.of(spec, model, layout, cuda=cuda)
    layers = len(layout.stage_layers(model.num_layers)[stage][0])
    flights = chunks_in_flight(layout, stage=stage, micro_batches=micro_batches(spec, layout))
    kept, again = _layer(spec, model, sizes)
    # Beside the layers: token ids, and a table of rotations for each micro-batch.
    chunk = layers * kept + (0 if cuda else model.head_dim * sizes.element) + _TOKEN_BYTES
    end = logits = 0.0
    if stage == layout.pp - 1:
        end = tokens * (sizes.norm + sizes.element * model.hidden_size + _LOSS_BYTES)
        logits = 0.0 if head == "value" else _logits(tokens, model, layout)
    return ActivationMemory(
        kept=round(tokens * chunk * flights),
        again=round(tokens * again),
        head=round(end),
        logits=round(logits),
    )


def estimate_reading(
    spec: JobSpec, model: ModelConfig, layout: Layout, *, stage: int, cuda: bool, head: Head
) -> tuple[int, int]:
    """(activations, logits) of each rank of a stage in a forward pass that is not trained.

    One layer works at a time, on the hidden states of the one before it; chunks of logits come one
    after the other.
    """
    full = spec.training.model_copy(update={"recompute": "full"})
    again = spec.model_copy(update={"training": full})
    tokens = forward_tokens(spec, layout)
    sizes = _Sizes.of(spec, model, layout, cuda=cuda)
    kept, working = _layer(again, model, sizes)
    logits = 0
    if head == "vocabulary" and stage == layout.pp - 1:
        rows, width = _chunk(tokens, model, layout)
        logits = 2 * rows * width * _FP32
    return round(tokens * (kept + working)), logits


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


def micro_batches(spec: JobSpec, layout: Layout) -> int | None:
    """Forward passes of one rank in an optimizer step; None where each step decides."""
    size = spec.training.micro_batch_size
    if size == "auto":
        return None
    each = max(size, spec.algorithm.sequences_per_row)
    return max(-(-sequences_of_step(spec, layout) // each), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What the terms are made of, in bytes a token but for `tp`.

    Attributes:
        tp: tensor parallelism.
        element: of one number.
        hidden: a hidden state between layers, cut by sequence parallelism.
        query, key: queries, keys (or values) of a rank's heads.
        heads: a number in fp32 for each head.
        norm: what an RMSNorm keeps.
        head_norms: what those of queries and keys keep; 0 where there are none.
        joint: queries, keys and values in one, as their matrix gives them and values are slices
            of; 0 where `head_norms` has it.
        attended: keys and values as the CPU's attention keeps them.
    """

    cuda: bool
    tp: int
    element: int
    hidden: float
    query: float
    key: float
    heads: float
    norm: float
    head_norms: float
    joint: float
    attended: float

    @classmethod
    def of(cls, spec: JobSpec, model: ModelConfig, layout: Layout, *, cuda: bool) -> "_Sizes":
        element = _FP32 if spec.precision.dtype == "fp32" else 2
        shards = layout.tp if layout.sequence_parallel else 1
        query = element * model.num_heads / layout.tp * model.head_dim
        key = element * max(model.num_kv_heads / layout.tp, 1) * model.head_dim
        joint, heads = query + 2 * key, _FP32 * model.num_heads / layout.tp
        # A norm keeps its input; but torch's, which the CPU has for 16 bits and for Gemma, keeps
        # that in fp32 and the normalised one too.
        plain = cuda or (element == _FP32 and not model.zero_centered_norm)
        norm = (element if plain else 2 * _FP32) * model.hidden_size + _FP32
        head_norms = 0.0
        if model.qk_norm:
            copies = 2 * _FP32 / element * (query + key)
            head_norms = 2 * heads + (query + joint if plain else copies)
        window = model.sliding_window or spec.training.max_length
        masked = layout.cp > 1 or window < spec.training.max_length or model.attention_softcap
        return cls(
            cuda=cuda,
            tp=layout.tp,
            element=element,
            hidden=element * model.hidden_size / shards,
            query=query,
            key=key,
            heads=heads,
            norm=norm / shards,
            head_norms=head_norms,
            joint=0.0 if model.qk_norm and plain else joint,
            attended=_masked(spec, model, layout, query) if masked and not cuda else 2 * key,
        )


def _masked(spec: JobSpec, model: ModelConfig, layout: Layout, query: float) -> float:
    """Keys and values where the CPU's attention needs a mask: repeated for each query head, of all
    context-parallel ranks' tokens (half of them, on average, are not in the future), and the mask.
    """
    seen = 1.0 if layout.cp == 1 else (2 * layout.cp + 1) / 2
    longest = spec.training.max_length
    mask = _FP32 * longest * seen / layout.cp
    scores = 3 * mask * model.num_heads / layout.tp if model.attention_softcap else 0.0
    return 2 * query * seen + mask + scores


def _layer(spec: JobSpec, model: ModelConfig, sizes: _Sizes) -> tuple[float, float]:
    """(kept by each layer, held by the one that is computed again), in bytes a token.

    Attention's output is also the input of the matrix behind it, and counts there.
    """
    rest = (4 if model.post_norms else 2) * sizes.norm
    rest += sizes.hidden + sizes.query + _mlp(model, sizes) + sizes.head_norms
    inputs = sizes.query + sizes.key + sizes.joint
    attention = sizes.heads + (inputs if sizes.cuda else sizes.query + sizes.attended)
    match spec.training.recompute:
        case "none":
            return rest + attention, 0.0
        case "selective":
            copied = 0.0 if sizes.cuda else sizes.attended / 2
            return rest + inputs, sizes.query + copied + sizes.heads
        case "full":
            return sizes.hidden, rest + attention - sizes.hidden


def _mlp(model: ModelConfig, sizes: _Sizes) -> float:
    """The MLP, or the experts with what sends tokens to them, in bytes a token.

    Of the two halves of the first product, CUDA keeps both and the activated one; the CPU keeps the
    second half and the activation's output as well, and experts also what their weights multiply.
    """
    if model.moe is None:
        return sizes.hidden + sizes.element * (3 if sizes.cuda else 5) * model.ffn_size / sizes.tp
    # Every rank of an expert's slices sees all tokens that come to it, however they were cut.
    experts, width = model.moe, model.moe.ffn_size / sizes.tp
    routed = sizes.element * (model.hidden_size + (3 if sizes.cuda else 6) * width)
    return sizes.hidden + experts.top_k * (routed + _ROUTE_BYTES)


def _logits(tokens: int, model: ModelConfig, layout: Layout) -> float:
    rows, width = _chunk(tokens, model, layout)
    kept = 0 if model.final_softcap else min(KEPT_BYTES, tokens * width * _FP32)
    gradient = width * model.hidden_size * _FP32
    return kept + 2 * rows * width * _FP32 + gradient


def _chunk(tokens: int, model: ModelConfig, layout: Layout) -> tuple[int, int]:
    """Rows of a chunk of logits, and how many a rank has for each."""
    width = padded_vocab_size(model.vocab_size, tp=layout.tp) // layout.tp
    return min(max(CHUNK_BYTES // (_FP32 * width), LEAST_ROWS), tokens), width
