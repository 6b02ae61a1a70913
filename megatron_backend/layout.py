"""How a model is spread over ranks: tensor, pipeline and data parallelism. Free of torch.

Ranks are numbered as Megatron-Core numbers them: tensor parallelism varies fastest, then data, then
pipeline, so rank = tp + TP * (dp + DP * pp).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place in each dimension of its layout, counted from 0."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the three dimensions; their product is the number of ranks.

    Raises:
        ValueError: a size is below 1.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"layout: {name} is {size}, but must be at least 1")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands.

        Raises:
            ValueError: the layout has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"layout {self} has ranks 0 to {self.world_size - 1}, not {rank}")
        return Coordinates(
            tp=rank % self.tp,
            dp=rank // self.tp % self.dp,
            pp=rank // (self.tp * self.dp),
        )

    def rank(self, *, tp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """The rank at these coordinates."""
        return tp + self.tp * (dp + self.dp * pp)

    @property
    def output_ranks(self) -> list[int]:
        """The ranks whose results count, in the order of their share of a batch.

        Log-probs and losses exist on the last pipeline stage, equal on all its tensor-parallel
        ranks; so one rank for each data-parallel copy speaks.
        """
        return [self.rank(pp=self.pp - 1, dp=dp) for dp in range(self.dp)]

    def share(self, count: int, dp: int) -> range:
        """Which of `count` rows the data-parallel rank `dp` takes: a run, as even as can be."""
        return range(count * dp // self.dp, count * (dp + 1) // self.dp)

    def stage_layers(self, num_layers: int) -> list[range]:
        """The layers of each pipeline stage, each layer once: 30 in 4 stages are 8, 8, 7, 7.

        Raises:
            ValueError: there are fewer layers than stages.
        """
        if num_layers < self.pp:
            raise ValueError(
                f"{num_layers} layers cannot fill pp = {self.pp} pipeline stages; lower pp"
            )
        size, longer = divmod(num_layers, self.pp)
        sizes = [size + (stage < longer) for stage in range(self.pp)]
        starts = [sum(sizes[:stage]) for stage in range(self.pp)]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}"
