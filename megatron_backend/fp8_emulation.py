"""Transformer Engine's FP8 on a CPU: the same roundings at the same places, in fp32 arithmetic.

An FP8 linear layer computes three products: y = x w^T forward, dx = g w and dw = g^T x backward.
Their operands are rounded to 8 bits first, E4M3 forward and, in the format `hybrid`, E5M2 for g;
sums are in fp32, and results in `precision.dtype`. Everything else (norms, attention, router,
embedding, output layer) never sees 8 bits. `fp8_formats` says how a tensor is rounded; this module
puts it into Megatron's layers.

Delayed scaling has a memory. A tensor is scaled by what was seen of it before, and its own maximum
is only written down. At the end of a forward pass of all layers the maxima of x and w are shared by
the ranks, go into the histories, and make the scales of the next pass; those of g do so at the end
of the backward pass, which is where the first layer's gradient is computed. Evaluations change
nothing. Where a layer is recomputed, it gets the scales of the pass that it repeats, and is not
counted twice.

Filler of packed rows is a copy of the beginning of a row (`training.sequence`), or 0
(`models.packing`). So it adds no value to a maximum that was not there already, and has no
gradient.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_backend.fp8_formats import (
    E4M3,
    E5M2,
    Blocks,
    cast,
    cast_blocks,
    delayed_scale,
    push_amax,
    tensor_scale,
)
from service.spec import Fp8Spec

_BLOCKWISE, _BLOCKWISE_WEIGHT, _MX = Blocks(128), Blocks(128, 128), Blocks(32)


class Rounding:
    """How one linear layer's operands are rounded, by a recipe that looks at nothing but them.

    Args:
        fp8: the recipe.
    """

    def __init__(self, fp8: Fp8Spec) -> None:
        self.fp8 = fp8
        self.forward_dtype = E4M3
        self.backward_dtype = E5M2 if fp8.format == "hybrid" else E4M3

    def forward_operands(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """What the three products need of x [N, in] and w [out, in]: x and w summed over `in`, w
        summed over `out`, x summed over N."""
        if self.fp8.recipe == "tensorwise":
            x, weight = self._tensorwise(x, E4M3), self._tensorwise(weight, E4M3)
            return x, weight, weight, x
        mx = self.fp8.recipe == "mxfp8"
        blocks = _MX if mx else _BLOCKWISE
        of_weight = _MX if mx else _BLOCKWISE_WEIGHT
        return (
            cast_blocks(x, E4M3, over=1, blocks=blocks, mx=mx),
            cast_blocks(weight, E4M3, over=1, blocks=of_weight, mx=mx),
            cast_blocks(weight, E4M3, over=0, blocks=of_weight, mx=mx),
            cast_blocks(x, E4M3, over=0, blocks=blocks, mx=mx),
        )

    def backward_operands(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient [N, out] as dx needs it, summed over `out`, and as dw does, over N."""
        dtype = self.backward_dtype
        if self.fp8.recipe == "tensorwise":
            gradient = self._tensorwise(gradient, dtype)
            return gradient, gradient
        mx = self.fp8.recipe == "mxfp8"
        blocks = _MX if mx else _BLOCKWISE
        return (
            cast_blocks(gradient, dtype, over=1, blocks=blocks, mx=mx),
            cast_blocks(gradient, dtype, over=0, blocks=blocks, mx=mx),
        )

    @staticmethod
    def _tensorwise(values: Tensor, dtype: torch.dtype) -> Tensor:
        return cast(values, tensor_scale(amax_of(values), dtype), dtype)


class DelayedRounding(Rounding):
    """One linear layer's scales by delayed scaling: of x, w and g, each with its history.

    Attributes:
        history: [length, 3].
        scale: [3].
        recording: whether a forward pass writes down its maxima.
    """

    def __init__(self, fp8: Fp8Spec) -> None:
        super().__init__(fp8)
        self.history = torch.zeros(fp8.amax_history, 3)
        self.scale = torch.ones(3)
        self.recording = True
        self._of_passes: deque[Tensor] = deque()

    @property
    def memory(self) -> Tensor:
        """[1 + length, 3]: the scales, and the history below them; a copy."""
        return torch.cat([self.scale.unsqueeze(0), self.history])

    def remember(self, memory: Tensor) -> None:
        """Takes over what `memory` was."""
        self.scale, self.history = memory[0].clone(), memory[1:].clone()

    def forward_operands(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """See `Rounding`; writes down the maxima where that is wanted."""
        scale = self._of_passes.popleft() if _recomputing() else self.scale
        if self.recording:
            newest = torch.stack([amax_of(x), amax_of(weight)])
            self.history[0, _FORWARD] = torch.maximum(self.history[0, _FORWARD], newest)
        x, weight = cast(x, scale[0], E4M3), cast(weight, scale[1], E4M3)
        return x, weight, weight, x

    def backward_operands(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """See `Rounding`."""
        self.history[0, 2] = torch.maximum(self.history[0, 2], amax_of(gradient))
        gradient = cast(gradient, self.scale[2], self.backward_dtype)
        return gradient, gradient

    def keep_scales(self) -> None:
        """Before a pass that will be repeated in the backward pass."""
        self._of_passes.append(self.scale.clone())

    def update(self, columns: slice) -> None:
        """New scales of x and w, or of g, from what their histories say."""
        dtype = self.backward_dtype if columns == _GRADIENT else E4M3
        amax, following = push_amax(self.history[:, columns], compute=self.fp8.amax_compute)
        self.scale = self.scale.clone()
        self.scale[columns] = delayed_scale(
            amax, self.scale[columns], dtype, margin=self.fp8.margin
        )
        self.history[:, columns] = following


_FORWARD, _GRADIENT = slice(0, 2), slice(2, 3)


def amax_of(values: Tensor) -> Tensor:
    """The largest absolute value in fp32; 0 of nothing at all, as an expert without tokens has."""
    return values.detach().abs().amax().float() if values.numel() else torch.zeros(())


class LinearFp8(torch.autograd.Function):
    """y = x w^T with all three products on rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding, last: Any) -> Tensor:
        """`last` is called behind the backward pass, where it is not None."""
        rows = x.detach().flatten(0, -2)
        x_in, w_in, w_out, x_rows = rounding.forward_operands(rows, weight.detach())
        ctx.save_for_backward(w_out, x_rows)
        ctx.rounding, ctx.last, ctx.shape = rounding, last, x.shape
        return (x_in @ w_in.t()).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """dx and dw."""
        w_out, x_rows = ctx.saved_tensors
        g_out, g_rows = ctx.rounding.backward_operands(gradient.detach().flatten(0, -2))
        dx = (g_out @ w_out).to(gradient.dtype).view(ctx.shape)
        dw = (g_rows.t() @ x_rows).to(gradient.dtype)
        if ctx.last is not None:
            ctx.last()
        return dx, dw, None, None


class _EmulatedLinear:
    """What Megatron's two linear layers do with 8-bit products."""

    training: bool
    rounding: Rounding | None = None
    last_of_backward: Any = None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        """Megatron's name for the product and what tensor parallelism puts around it."""
        if self.rounding is None:
            return super()._forward_impl(input, weight, *args, **options)  # type: ignore[misc]
        group = options["tp_group"]
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, group=group)
        elif options["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=group)
        if isinstance(self.rounding, DelayedRounding):
            self.rounding.recording = self.training and not _recomputing()
            # Training without gradients yet is the first of two passes.
            if self.rounding.recording and not torch.is_grad_enabled():
                self.rounding.keep_scales()
        output: Tensor = LinearFp8.apply(input, weight, self.rounding, self.last_of_backward)
        bias = options["bias"]
        return output if bias is None else output + bias

    def get_extra_state(self) -> Tensor | None:
        """Delayed scaling's memory, under the name that Transformer Engine's has in checkpoints."""
        return self.rounding.memory if isinstance(self.rounding, DelayedRounding) else None

    def set_extra_state(self, state: Tensor | None) -> None:
        """What `get_extra_state` gave; a memory of another length or kind is not taken over."""
        rounding = self.rounding
        if not isinstance(rounding, DelayedRounding) or not isinstance(state, Tensor):
            return
        if state.dtype == torch.float32 and state.shape == (len(rounding.history) + 1, 3):
            rounding.remember(state)


class EmulatedColumnParallelLinear(_EmulatedLinear, ColumnParallelLinear):
    """Megatron's ColumnParallelLinear with 8-bit products."""


class EmulatedRowParallelLinear(_EmulatedLinear, RowParallelLinear):
    """Megatron's RowParallelLinear with 8-bit products."""


def emulate(chunk: GPTModel, fp8: Fp8Spec) -> None:
    """Makes the linear layers of a chunk's transformer layers compute in 8 bits.

    The first and last `first_last_bf16_layers` layers of the whole model stay as they are.
    """
    border, num_layers = fp8.first_last_bf16_layers, chunk.config.num_layers
    layers = [
        layer
        for layer in chunk.decoder.layers
        if border < layer.layer_number <= num_layers - border
    ]
    delayed = []
    for linear in [part for layer in layers for part in layer.modules() if type(part) in _EMULATED]:
        linear.__class__ = _EMULATED[type(linear)]
        linear.rounding = DelayedRounding(fp8) if fp8.recipe == "delayed" else Rounding(fp8)
        if isinstance(linear.rounding, DelayedRounding):
            delayed.append(linear.rounding)
    if delayed:
        layers[0].self_attention.linear_qkv.last_of_backward = lambda: _update(delayed, _GRADIENT)
        chunk.decoder.register_forward_hook(
            lambda block, *_: (
                _update(delayed, _FORWARD) if block.training and torch.is_grad_enabled() else None
            )
        )


def delayed_roundings(chunk: GPTModel) -> list[DelayedRounding]:
    """Those of a chunk's linear layers that scale by what they have seen, if `emulate` made any."""
    found = (getattr(layer, "rounding", None) for layer in chunk.decoder.modules())
    return [rounding for rounding in found if isinstance(rounding, DelayedRounding)]


_EMULATED: dict[type, type] = {
    ColumnParallelLinear: EmulatedColumnParallelLinear,
    RowParallelLinear: EmulatedRowParallelLinear,
}


def _update(delayed: Sequence[DelayedRounding], columns: slice) -> None:
    """New scales, the same on all ranks that share a layer."""
    newest = torch.stack([rounding.history[0, columns] for rounding in delayed])
    group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
    dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
    for rounding, amax in zip(delayed, newest, strict=True):
        rounding.history[0, columns] = amax
        rounding.update(columns)


def _recomputing() -> bool:
    """True inside a backward pass, where a forward pass can only be a repetition."""
    return bool(torch._C._current_graph_task_id() != -1)
