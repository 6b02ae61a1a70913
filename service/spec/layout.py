"""How a model is spread over ranks: the one description that service and workers share.

Ranks are numbered as Megatron-Core numbers them in its order `tp-cp-ep-dp-pp`: tensor parallelism
varies fastest, then context, then data, then pipeline, so

    rank = tp + TP * (cp + CP * (dp + DP * pp))

Experts are spread over the same ranks in another way. They know no context parallelism: the
CP x DP ranks between two tensor-parallel ones are numbered through, and `ep` varies fastest among
them. So ranks that hold the same slice of everything but the experts hold different experts.

With virtual stages (`vpp`) a rank holds several chunks of the model, and chunk `c` of stage `p` is
the virtual stage `c * PP + p`: tokens go through all stages once for each chunk.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from service.spec.model_config import ModelConfig
from service.spec.other_models import FrozenLayout
from service.spec.parts import ParallelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place in each dimension of its layout, counted from 0.

    `ep` is where its experts are; it follows from `cp` and `dp`.
    """

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the dimensions. Two layouts are the same when all of them are.

    Attributes:
        tp: ranks that share each layer's matrices.
        pp: pipeline stages.
        vpp: chunks of the model on each stage.
        cp: ranks that share each sequence.
        ep: ranks that share the experts of each layer, among the dp x cp ones.
        dp: copies of the model.
        sequence_parallel: activations between tensor-parallel layers are split along the sequence.
        pipeline_layers: layers of each stage; None spreads them evenly.

    Raises:
        ValueError: no ranks can have this layout; the message begins with the field.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    pipeline_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep", "dp"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"{name} is {size}, but must be at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} needs pp above 1: it cuts pipeline stages")
        if (self.dp * self.cp) % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide dp x cp = {self.dp} x {self.cp}: "
                "experts are spread over those ranks"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp above 1: it splits between those ranks")
        if self.pipeline_layers is None:
            return
        if self.vpp > 1:
            raise ValueError("pipeline_layers cannot go with vpp: chunks are all of one size")
        if len(self.pipeline_layers) != self.pp or min(self.pipeline_layers) < 1:
            raise ValueError(
                f"pipeline_layers is {list(self.pipeline_layers)}, but must give each of the "
                f"pp = {self.pp} stages at least 1 layer"
            )

    @classmethod
    def from_spec(cls, parallel: ParallelSpec, *, dp: int) -> "Layout":
        """The layout of a job's `parallel`, with `dp` resolved.

        Raises:
            ValueError: no ranks can have it.
        """
        layers = parallel.pipeline_layers
        return cls(
            tp=parallel.tp,
            pp=parallel.pp,
            vpp=parallel.vpp,
            cp=parallel.cp,
            ep=parallel.ep,
            dp=dp,
            sequence_parallel=parallel.sequence_parallel,
            pipeline_layers=None if layers is None else tuple(layers),
        )

    @classmethod
    def of_frozen(cls, frozen: FrozenLayout, model: ModelConfig) -> "Layout":
        """The layout of a model that only reads."""
        # Megatron has experts under tensor parallelism only where the sequence is split too.
        split = model.moe is not None and frozen.tp > 1
        return cls(tp=frozen.tp, pp=frozen.pp, dp=frozen.dp, sequence_parallel=split)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Layout":
        """The reverse of `to_json`; dimensions that are not named have their defaults.

        Raises:
            TypeError: a dimension has no such name.
            ValueError: no ranks can have it.
        """
        layers = value.get("pipeline_layers")
        return cls(**{**value, "pipeline_layers": None if layers is None else tuple(layers)})

    def to_json(self) -> dict[str, Any]:
        """All dimensions as JSON values."""
        layers = self.pipeline_layers
        return asdict(self) | {"pipeline_layers": None if layers is None else list(layers)}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands.

        Raises:
            ValueError: the layout has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"layout {self} has ranks 0 to {self.world_size - 1}, not {rank}")
        return Coordinates(
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // (self.tp * self.cp * self.dp),
            ep=rank // self.tp % self.ep,
        )

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    @property
    def output_ranks(self) -> list[int]:
        """The ranks whose results count, in the order of their share of a batch.

        Log-probs and losses exist on the last pipeline stage, equal on all its tensor-parallel
        ranks and gathered over its context-parallel ones; so one rank for each data-parallel copy
        speaks.
        """
        return [self.rank(pp=self.pp - 1, dp=dp) for dp in range(self.dp)]

    def share(self, count: int, dp: int) -> range:
        """Which of `count` rows the data-parallel rank `dp` takes: a run, as even as can be."""
        return range(count * dp // self.dp, count * (dp + 1) // self.dp)

    def stage_layers(self, num_layers: int) -> list[list[range]]:
        """The layers of each chunk of each pipeline stage; every layer is in one of them.

        30 layers in 4 stages are 8, 8, 7, 7. With virtual stages all chunks have the same size, and
        8 layers in 2 stages of 2 chunks are [[0-1, 4-5], [2-3, 6-7]].

        Raises:
            ValueError: the layers cannot be spread so; the message begins with the field.
        """
        sizes = self._chunk_sizes(num_layers)
        starts = [sum(sizes[:chunk]) for chunk in range(len(sizes))]
        chunks = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return [chunks[stage :: self.pp] for stage in range(self.pp)]

    def _chunk_sizes(self, num_layers: int) -> list[int]:
        """Layers of each virtual stage in the order in which tokens go through them."""
        if self.pipeline_layers is not None:
            if sum(self.pipeline_layers) != num_layers:
                raise ValueError(
                    f"pipeline_layers {list(self.pipeline_layers)} are "
                    f"{sum(self.pipeline_layers)} layers, but the model has {num_layers}"
                )
            return list(self.pipeline_layers)
        if num_layers < self.pp:
            raise ValueError(
                f"pp = {self.pp} stages cannot be filled by {num_layers} layers; lower pp"
            )
        if self.vpp > 1 and num_layers % (self.pp * self.vpp):
            raise ValueError(
                f"vpp = {self.vpp} chunks on each of pp = {self.pp} stages do not divide "
                f"{num_layers} layers"
            )
        size, longer = divmod(num_layers, self.pp * self.vpp)
        return [size + (chunk < longer) for chunk in range(self.pp * self.vpp)]

    def __str__(self) -> str:
        sizes = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        sizes += [f"{name}{getattr(self, name)}" for name in ("vpp", "cp", "ep") if self._has(name)]
        if self.sequence_parallel:
            sizes.append("sp")
        if self.pipeline_layers is not None:
            sizes.append("layers" + "-".join(map(str, self.pipeline_layers)))
        return " ".join(sizes)

    def _has(self, name: str) -> bool:
        return bool(getattr(self, name) > 1)
