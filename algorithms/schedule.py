"""The learning rate of each step."""

import math

from service.spec import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int, total_steps: int) -> float:
    """The rate of step 1, 2, ..., `total_steps`.

    It rises linearly and reaches the peak at step `warmup_steps`; from there a falling schedule
    reaches `final_ratio` of the peak at the last step. No step has a rate of 0 by the warm-up.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.learning_rate * step / warmup
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    height = 1.0 - progress
    if optimizer.schedule == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = optimizer.final_ratio
    return optimizer.learning_rate * (floor + (1.0 - floor) * height)
