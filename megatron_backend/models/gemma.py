"""What Gemma's models have beside a decoder of the Llama kind.

- Norms multiply by 1 + weight: a setting of Megatron's, and of our norm for the CPU.
- A norm stands behind attention and MLP too, before the residual is added. It is part of the
  block's last linear layer here, named `post_layernorm`, as in Megatron-Bridge.
- Embeddings are multiplied by the root of the hidden size, rounded to their own format first.
- Gemma 2 caps scores and logits softly. Transformer Engine's attention cannot cap scores, so
  Gemma 2 is refused on CUDA. The training step caps logits by itself, since it never calls the
  output layer; all else gets them from there.
- In Gemma 3 layers with a sliding window turn queries and keys by other frequencies than the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_backend.models.norm import RmsNorm
from megatron_backend.models.rope import inverse_frequencies
from megatron_backend.models.rotary import RotaryAttention
from service.spec.model_config import ModelConfig


def check_cuda(config: ModelConfig) -> None:
    """Refuses on CUDA what Transformer Engine cannot compute.

    Raises:
        NotImplementedError: scores are capped.
    """
    if config.attention_softcap is not None:
        raise NotImplementedError(
            f"{config.family} caps its attention scores, which Transformer Engine's attention "
            "cannot: such models train on the CPU only"
        )


def adapt_layer(spec: ModuleSpec, config: ModelConfig, *, cuda: bool) -> ModuleSpec:
    """Gives a layer's spec the parts that its config asks for; others stay as they are."""
    attention = spec.submodules.self_attention
    if config.post_norms:
        behind = _te_linear() if cuda else RowParallelWithNorm
        attention.submodules.linear_proj = behind
        spec.submodules.mlp.keywords["submodules"].linear_fc2 = behind
    if config.attention_softcap is not None:
        attention.submodules.core_attention = partial(
            attention.submodules.core_attention, softcap=config.attention_softcap
        )
    if config.local_rope is not None:
        attention.module = _LocalTeAttention if cuda else _LocalRotaryAttention
        attention.params["local_angles"] = LocalAngles(config)
    return spec


def adapt_model(model: GPTModel, config: ModelConfig) -> None:
    """Scales a chunk's embeddings and caps its logits, where the config asks for it."""
    if config.embedding_scale is not None and model.pre_process:
        model.embedding.register_forward_hook(partial(_scale, config.embedding_scale))
    if config.final_softcap is not None and model.post_process:
        model.output_layer.register_forward_hook(partial(_cap, config.final_softcap))


def _scale(factor: float, _module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    # The model's own arithmetic has this factor in the embeddings' format.
    return output * torch.tensor(factor, dtype=output.dtype, device=output.device)


def _cap(
    cap: float, _module: torch.nn.Module, _inputs: Any, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    logits, bias = output
    return cap * torch.tanh(logits / cap), bias


class RowParallelWithNorm(RowParallelLinear):
    """Megatron's row-parallel layer for the CPU, and a norm on its output."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **others: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        self.post_layernorm = RmsNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, B, output_size], of which each rank has its own tokens with sequence parallelism."""
        output, bias = super().forward(hidden)
        return self.post_layernorm(output), bias


def _te_linear() -> Callable[..., torch.nn.Module]:
    """The same of Transformer Engine's parts; they are there on CUDA only."""
    from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear

    class TeRowParallelWithNorm(TERowParallelLinear):
        def __init__(
            self, input_size: int, output_size: int, *, config: TransformerConfig, **others: Any
        ) -> None:
            super().__init__(input_size, output_size, config=config, **others)
            self.post_layernorm = TENorm(config, output_size, config.layernorm_epsilon)

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(hidden)
            return self.post_layernorm(output), bias

    return TeRowParallelWithNorm


class LocalAngles:
    """The angles of the layers with a window, from those that Megatron hands to all layers.

    Angles are places times frequencies, so one is the other times a ratio for each pair of
    dimensions, wherever a rank's places are. All layers of a forward pass are handed the same
    tensor; what was made of it is kept until another one comes.
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.local_rope is None:
            raise ValueError("this model has one kind of rotary embeddings")
        local, full = (
            inverse_frequencies(rope, config.head_dim) for rope in (config.local_rope, config.rope)
        )
        self._ratio = (local / full).repeat(2)
        self._last: tuple[Tensor, Tensor] | None = None

    def of(self, angles: Tensor) -> Tensor:
        """[places, 1, 1, head_dim] of layers with a window, from those of the others."""
        if self._last is None or self._last[0] is not angles:
            self._last = (angles, angles * self._ratio.to(angles.device))
        return self._last[1]


class _LocalAnglesMixin(SelfAttention):
    """Self-attention that turns by local angles where its layer has a window."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *,
        local_angles: LocalAngles,
        **others: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, **others)
        windowed = config.window_attn_skip_freq
        self._local_angles = local_angles if windowed[self.layer_number - 1] else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See the class that this one stands in front of."""
        if self._local_angles is not None and rotary_pos_emb is not None:
            rotary_pos_emb = self._local_angles.of(rotary_pos_emb)
        output: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **others
        )
        return output


class _LocalRotaryAttention(_LocalAnglesMixin, RotaryAttention):
    """On the CPU."""


class _LocalTeAttention(_LocalAnglesMixin):
    """On CUDA, where Megatron's own self-attention calls Transformer Engine's kernels."""
