"""How long a step takes in one layout compared with another, on paper.

Every layout computes the same products, spread over the same number of GPUs. What tells layouts
apart is what comes on top, here as shares of that time: layers computed again, stages that wait for
others, and bytes that are sent while nothing is computed. The machine is a round-numbered one with
NVLink inside a node. The shares rank layouts; nothing here is measured, and kernels, overlap and
uneven experts are left out.
"""

from dataclasses import dataclass

from service.spec import JobSpec
from service.spec.flops import OPERATIONS, active_weights
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.validation.activations import sequences_of_step
from service.validation.parameters import rank_parameters

FLOPS = 4e14
"""Products and sums a second that one GPU really gets to."""
NODE_BANDWIDTH, NETWORK_BANDWIDTH = 4e11, 4e10
"""Bytes a second from one GPU to another one, in its node and beyond."""
_ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Shares of the time that the products alone take, on one GPU.

    Attributes:
        recompute: layers that are computed again.
        bubble: waiting for other pipeline stages.
        tensor, context, expert, data: communication of each dimension.
        offload: moving gradients and weights to the machine's memory and back.
    """

    recompute: float
    bubble: float
    tensor: float
    context: float
    expert: float
    data: float
    offload: float

    @property
    def total(self) -> float:
        """The whole step; 1 is the products alone."""
        communication = self.tensor + self.context + self.expert + self.data + self.offload
        return (1 + self.recompute) * (1 + self.bubble) + communication


def step_time(spec: JobSpec, model: ModelConfig, layout: Layout, *, gpus_per_node: int) -> StepTime:
    """A step of a job in a layout on GPUs.

    Args:
        spec: with the job's batch, recomputation and offload.
        layout: of training, over all GPUs.
        gpus_per_node: GPUs that reach each other at the node's speed.
    """
    training = spec.training
    rows = sequences_of_step(spec, layout)
    tokens = rows * training.max_length / layout.cp
    weights = model.num_layers * active_weights(model) + model.vocab_size * model.hidden_size
    flops = OPERATIONS * weights * tokens / (layout.tp * layout.pp)
    layers = model.num_layers / layout.pp
    hidden = model.hidden_size * _ACTIVATION_BYTES * tokens * layers

    def share(sent: float, ranks: int, span: int) -> float:
        """Time to send so much, where `ranks` ranks within `span` GPUs share it."""
        bandwidth = NODE_BANDWIDTH if span <= gpus_per_node else NETWORK_BANDWIDTH
        return sent * (ranks - 1) / ranks / bandwidth * FLOPS / flops

    keys = 2 * model.num_kv_heads * model.head_dim / layout.tp * _ACTIVATION_BYTES
    routed = model.moe.top_k / layout.tp if model.moe else 0.0
    held = rank_parameters(model, layout, stage=0, head=spec.algorithm.head).total
    return StepTime(
        recompute={"none": 0.0, "selective": 0.03, "full": 1 / 3}[training.recompute],
        bubble=(layout.pp - 1) / (_micro_batches(spec, layout, rows) * layout.vpp),
        # Each block gathers and scatters its tokens, forward and backward.
        tensor=share(8 * hidden, layout.tp, layout.tp),
        # Keys and values go round once forward; backward, their gradients do too.
        context=share(3 * keys * tokens * layers * layout.cp, layout.cp, layout.tp * layout.cp),
        # To the experts and back, forward and backward.
        expert=share(4 * hidden * routed, layout.ep, layout.tp * layout.ep),
        # Gradients in fp32 are summed, new weights are gathered.
        data=share(6 * held, layout.dp * layout.cp, layout.world_size // layout.pp),
        offload=held * 6 / NETWORK_BANDWIDTH * FLOPS / flops if spec.optimizer.offload else 0.0,
    )


def _micro_batches(spec: JobSpec, layout: Layout, rows: int) -> int:
    """Of one rank in one step; where they are cut by tokens, as many as overlap a pipeline."""
    size = spec.training.micro_batch_size
    if size != "auto":
        return max(rows // size, 1)
    full = -(-rows * spec.training.max_length // spec.training.micro_batch_tokens)
    return min(max(full, 2 * layout.pp), rows)
