"""What a job needs of each of its machines."""

import math

from service.spec import JobContext
from service.spec.layout import Layout


def ranks_per_node(context: JobContext) -> int:
    """Ranks on the fullest machine; beside those that train there are those of frozen models."""
    asked = context.spec.resources
    if asked.gpus_per_node:
        return asked.gpus_per_node
    layout = Layout.from_spec(context.spec.parallel, dp=context.dp)
    frozen = sum(model.layout.ranks for _, model in context.spec.frozen_models.values())
    return math.ceil((layout.world_size + frozen) / asked.nodes)
