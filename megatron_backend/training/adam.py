"""AdamW where Transformer Engine's fused one is not.

Adam (arXiv 1412.6980, algorithm 1) with decoupled weight decay (arXiv 1711.05101, algorithm 2). It
updates by torch's fused kernel, which goes through memory once, and keeps `step` in its parameter
group, where Megatron's distributed optimizer expects it: checkpoints of torch's own AdamW cannot be
loaded under another layout.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW with one step count for each parameter group.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        adam_w_mode: must be True; the name is that of the fused optimizers.
        capturable: must be False; CUDA graphs have no meaning here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode or capturable:
            raise ValueError("this Adam decouples weight decay and is not capturable")
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            | {"bias_correction": True},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; there is no closure to call."""
        if closure is not None:
            raise ValueError("this Adam takes no closure")
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if pairs:
                self._update(group, [p for p, _ in pairs], [gradient for _, gradient in pairs])

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        first = [self.state[p]["exp_avg"] for p in parameters]
        second = [self.state[p]["exp_avg_sq"] for p in parameters]
        beta1, beta2 = group["betas"]
        step = torch.tensor(float(group["step"]))
        torch._fused_adamw_(
            parameters,
            gradients,
            first,
            second,
            [],
            [step] * len(parameters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
