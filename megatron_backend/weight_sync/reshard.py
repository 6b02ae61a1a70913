"""Weights from the training layout to the generation layout.

The two layouts share nothing: stages, chunks, experts and cuts of one go to whatever the other has,
on the same ranks or on others. Which slice goes where is worked out once, by all ranks from the
same lists (`plan`), and kept; a sync is then a fixed list of copies.

How a slice travels depends on where its target is:

- on the same rank it is copied;
- on another rank of the machine, without CUDA, its source writes it into the target's own memory
  (`shared_memory`);
- everywhere else it goes by messages. Slices for one rank are laid end to end in flat buffers of
  some megabytes, since hundreds of small messages cost more than the bytes in them.

Megatron has such a planner and executor too (`megatron.core.resharding`). It knows neither lists of
chunks nor experts that are computed one by one, and sends each slice by itself; the tests hold ours
to its results where it can go.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_backend.runtime.distributed import device
from megatron_backend.weight_sync.flat_buffers import Segment, flat_buffers, torch_dtype
from megatron_backend.weight_sync.peers import exchange, gather_json, meet
from megatron_backend.weight_sync.pieces import held_tensors, plain
from megatron_backend.weight_sync.plan import Piece, Transfer, plan_transfers
from megatron_backend.weight_sync.shared_memory import RemoteTensors, SharedTensors


class WeightSync:
    """Copies the weights of one model into another of another layout.

    Every rank of the group must make one, and call `run` together with all others.

    Args:
        source: this rank's chunks of the trained model; None on a rank that only generates.
        target: this rank's part of the generation copy, with as many rows of padded vocabulary;
            None on a rank that only trains.
        group: all ranks that train or generate; None for the default group. See `peers`.
        shared_memory: write into neighbours' memory where that is possible; on a CPU only.

    Attributes:
        source: the chunks, as given.
        plans_made: how often the plan was worked out: at the first `run`, and never again.
    """

    def __init__(
        self,
        source: Sequence[GPTModel] | None,
        target: GPTModel | None,
        *,
        group: dist.ProcessGroup | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.source = tuple(source or ())
        self.plans_made = 0
        self._group: Any = group if group is not None else dist.group.WORLD
        self._read = held_tensors(self.source)
        self._written = held_tensors([] if target is None else [target])
        self._shared_memory = shared_memory and not torch.cuda.is_available()
        self._plan: _RankPlan | None = None

    def run(self) -> None:
        """Overwrites the target's weights with the source's.

        Raises:
            ValueError: the two are not the same model, or differ in padded vocabulary or dtype;
                every rank raises it, and nothing was written.
        """
        if self._plan is None:
            self._plan = self._make_plan()
            self.plans_made += 1
        with torch.no_grad():
            meet(self._group)  # nobody reads a target any more
            for copy in self._plan.copies:
                self._target_of(copy).copy_(self._source_of(copy.transfer), non_blocking=True)
            self._send_and_receive(self._plan)
            meet(self._group)  # every target is whole

    def _make_plan(self) -> "_RankPlan":
        mine = {
            "source": [asdict(piece) for piece, _ in self._read],
            "target": [asdict(piece) for piece, _ in self._written],
        }
        everyone = gather_json(self._group, mine)
        sources = [[_piece(value) for value in one["source"]] for one in everyone]
        targets = [[_piece(value) for value in one["target"]] for one in everyone]
        transfers = list(plan_transfers(sources, targets))
        # Only now, with a plan that holds, may the target's tensors move.
        shared, reached = self._share_memory()
        rank = self._group.rank()
        neighbours = {
            (source, target)
            for source, reachable in enumerate(gather_json(self._group, sorted(reached)))
            for target in reachable
        }
        copies, messages = [], dict[tuple[int, int], list[Transfer]]()
        for transfer in transfers:
            pair = (transfer.source, transfer.target)
            if pair == (rank, rank) or (pair in neighbours and transfer.source == rank):
                place = targets[transfer.target][transfer.target_piece]
                copies.append(_Copy(transfer, place, reached.get(transfer.target)))
            elif pair[0] != pair[1] and pair not in neighbours and rank in pair:
                messages.setdefault(pair, []).append(transfer)
        buffers = {pair: flat_buffers(some, targets[pair[1]]) for pair, some in messages.items()}
        return _RankPlan(
            copies=copies,
            sends={target: some for (source, target), some in buffers.items() if source == rank},
            receives={source: some for (source, target), some in buffers.items() if target == rank},
            shared=shared,
        )

    def _share_memory(self) -> tuple[SharedTensors | None, dict[int, RemoteTensors]]:
        """This rank's target as others see it, and the targets of others that it can reach."""
        shared = None
        if self._shared_memory and self._written:
            shared = SharedTensors([tensor for _, tensor in self._written])
        addresses = gather_json(self._group, None if shared is None else shared.address())
        reached = {}
        for rank, address in enumerate(addresses):
            if address is None or rank == self._group.rank() or not self._read:
                continue
            remote = RemoteTensors.open(address) if self._shared_memory else None
            if remote is not None:
                reached[rank] = remote
        return shared, reached

    def _source_of(self, transfer: Transfer) -> Tensor:
        _, tensor = self._read[transfer.source_piece]
        return _narrowed(plain(tensor), transfer.dim, transfer.source_start, transfer.length)

    def _target_of(self, copy: "_Copy") -> Tensor:
        transfer, piece = copy.transfer, copy.place
        if copy.remote is None:
            return self._own_target_of(transfer)
        tensor = copy.remote.view(transfer.target_piece, torch_dtype(piece), piece.shape)
        return _narrowed(tensor, transfer.dim, transfer.target_start, transfer.length)

    def _own_target_of(self, transfer: Transfer) -> Tensor:
        tensor = self._written[transfer.target_piece][1].detach()
        return _narrowed(tensor, transfer.dim, transfer.target_start, transfer.length)

    def _send_and_receive(self, plan: "_RankPlan") -> None:
        """Buffer after buffer; both sides of a pair have the same list of them."""
        rounds = max(map(len, [*plan.sends.values(), *plan.receives.values()]), default=0)
        for number in range(rounds):
            sends = list(_buffers(plan.sends, number))
            for _, buffer, segments in sends:
                for segment in segments:
                    segment.view(buffer).copy_(self._source_of(segment.transfer))
            receives = list(_buffers(plan.receives, number))
            exchange(
                self._group,
                [(peer, buffer) for peer, buffer, _ in sends],
                [(peer, buffer) for peer, buffer, _ in receives],
            )
            for _, buffer, segments in receives:
                for segment in segments:
                    self._own_target_of(segment.transfer).copy_(segment.view(buffer))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A transfer that this rank does by itself: into its own target, or a neighbour's."""

    transfer: Transfer
    place: Piece
    remote: RemoteTensors | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPlan:
    """What one rank does in a sync; buffers by the peer at their other end.

    `shared` is only held: others read the target's memory for as long as it lives.
    """

    copies: Sequence[_Copy]
    sends: dict[int, list[list[Segment]]]
    receives: dict[int, list[list[Segment]]]
    shared: SharedTensors | None


def _buffers(
    plans: dict[int, list[list[Segment]]], number: int
) -> Iterator[tuple[int, Tensor, list[Segment]]]:
    """Empty buffers of one round, with the peers and segments that they are for."""
    for peer, buffers in plans.items():
        if number < len(buffers):
            size = buffers[number][-1].stop
            yield peer, torch.empty(size, dtype=torch.uint8, device=device()), buffers[number]


def _narrowed(tensor: Tensor, dim: int | None, start: int, length: int) -> Tensor:
    """A slice of a tensor as a view; the whole of one without dimensions."""
    return tensor if dim is None else torch.narrow(tensor, dim, start, length)


def _piece(value: dict[str, Any]) -> Piece:
    return Piece(**value | {"shape": tuple(value["shape"])})
