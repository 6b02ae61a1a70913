"""The router of a mixture of experts, with a load-balancing loss that counts tokens exactly.

Megatron attaches this loss to the router's output, scales its gradient by the number of tokens on
the rank times the number of ranks that share a sequence, and leaves the rest to a division of all
gradients by the tokens of the step. Here nothing divides gradients (see `training.step`), and ranks
of one sequence may hold different numbers of real tokens. So each micro-batch's loss is weighted by
its own real tokens, and the trainer's scale is 1 / the step's: then the step has the mean over its
micro-batches, each as heavy as its tokens, whatever the layout.

Balance is asked for within each micro-batch, as in Megatron, so this is the one part of a gradient
that does depend on how a batch is cut.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class TokenWeightedRouter(TopKRouter):
    """Megatron's router but for the weight of its load-balancing loss."""

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """`probs` with the loss attached (arXiv 2101.03961, equations 4 to 6, over top-k choices).

        Args:
            probs: [tokens, experts], what the experts' outputs are weighted by.
            scores_for_aux_loss, routing_map: [tokens, experts], 0 in filler.
            with_padding_mask: whether this rank has filler. Others may have some where it has none,
                so real tokens are always counted.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        per_expert, _, tokens = get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=self.tp_cp_group,
            topk=self.topk,
            with_padding_mask=True,
        )
        # A micro-batch of filler alone has no token to balance.
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=per_expert,
            total_num_tokens=torch.clamp(tokens, min=1),
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * tokens)
        return attached


def drop_probabilities(model: torch.nn.Module) -> None:
    """Has each mixture forget its last tokens' probabilities at the end of its forward pass.

    Megatron keeps them beyond it for nothing. They are part of a graph of autograd's, whose ends
    hold the model, where the garbage collector does not look: a model would never be freed, nor
    would the process groups that belong to it.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.register_forward_hook(_drop)


def _drop(layer: MoELayer, _inputs: Any, _output: Any) -> None:
    layer.token_dispatcher.probs = None
