"""Messages between pipeline stages when each holds several chunks of the model.

Micro-batches have lengths of their own, so stages tell each other the shape of what they will send.
With several chunks a stage has a message for each of its neighbours at once, and where there are
two stages both neighbours are the same rank. Messages between two ranks arrive in the order in
which they were sent. Megatron orders tensors so that each meets its receiver, if they are sent one
by one; but it announces their shapes in an order in which the two would be mixed up. Here shapes
go the way of tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

type Sizes = list[int]


def chunk_stages(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Arguments of Megatron's schedules for a rank's chunks; none where it has one chunk."""
    if len(chunks) == 1:
        return {}
    groups = get_attr_wrapped_model(chunks[0], "pg_collection")
    config = get_attr_wrapped_model(chunks[0], "config")
    return {"p2p_communicator": ChunkStages(groups.pp, config), "pg_collection": groups}


class ChunkStages(P2PCommunicator):
    """Megatron's communicator, with shapes in the order of the tensors."""

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Sizes, Sizes]:
        """(shape of what comes from the previous stage, from the next); zeros for nothing."""
        device = torch.cuda.current_device()

        def shape(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.tensor(tensor.shape, device=device)

        from_previous, from_next = (torch.zeros(3, dtype=torch.int64, device=device) for _ in "pn")
        requests = _p2p_ops(
            tensor_send_prev=shape(tensor_send_prev),
            tensor_recv_prev=from_previous if recv_prev else None,
            tensor_send_next=shape(tensor_send_next),
            tensor_recv_next=from_next if recv_next else None,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        return from_previous.tolist(), from_next.tolist()
