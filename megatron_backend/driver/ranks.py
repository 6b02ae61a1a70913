"""A job's ranks, from Ray to the engines that the loop works with."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray

from algorithms.setup import open_chat
from megatron_backend import tracing
from megatron_backend.driver.frozen import FrozenModels
from megatron_backend.driver.job import Job
from megatron_backend.driver.outcome import reason_of
from megatron_backend.driver.recorder import SpoolRecorder
from megatron_backend.driver.tokenizers import load_tokenizer
from megatron_backend.workers.draining import told_of_draining
from megatron_backend.workers.engines import RayCritic, RayGenerator, RayTrainEngine
from megatron_backend.workers.errors import RanksFailed
from megatron_backend.workers.group import WorkerGroup
from megatron_backend.workers.rank import RankWorker
from megatron_backend.workers.ray_session import here, ray_session
from service.spec.model_config import ModelConfig
from service.spec.spans import SpanName

log = logging.getLogger("planish")


class JobRanks:
    """The ranks of a job.

    Attributes:
        group: the processes of the model that is trained.
        frozen: the models that only read, on ranks of their own.
        tokenizer: of the model.
        train: the trained model; after `load_model`.
        critic: on the same ranks, where the algorithm has one; after `load_model`.
        generator: the generation copies, where the job samples; after `load_model`.
    """

    def __init__(self, job: Job, recorder: SpoolRecorder) -> None:
        """Starts the processes, and reads the tokenizer while they import Megatron.

        Raises:
            NoRoom: the cluster has no place for the ranks.
            JobFailure: the tokenizer or its chat template cannot be used.
        """
        spec = job.context.spec
        self._job, self._recorder = job, recorder
        self._restarts_left = spec.faults.restarts
        self.group = WorkerGroup(
            RankWorker,
            job.layout,
            gpu=job.gpu,
            deadlines=spec.faults.deadlines,
            nodes=spec.resources.nodes,
            processes=job.processes,
        )
        self.frozen = FrozenModels(job)
        model = ModelConfig.from_hf(job.context.model.config)
        predicts = spec.algorithm.head == "vocabulary"
        self.train = RayTrainEngine(self.group, model, predicts=predicts, warn=self._warn)
        self.critic = None
        if spec.algorithm.critic is not None:
            self.critic = RayCritic(self.group, warn=self._warn)
        self.tokenizer = load_tokenizer(Path(job.context.model.tokenizer))
        self.generator: RayGenerator | None = None
        if predicts and spec.samples:
            stops = {open_chat(self.tokenizer).end_of_turn_id, self.tokenizer.eos_token_id}
            self.generator = RayGenerator(
                self.group,
                tp=spec.rollout.layout.tp,
                stop_token_ids=sorted(stops - {None}),
                max_length=spec.training.max_length,
                vocab_size=model.vocab_size,
            )

    def load_model(self, *, fresh: bool) -> None:
        """Builds the models on the ranks; those that only read stay where they are well.

        Args:
            fresh: with the job's starting weights; else a checkpoint is loaded next.

        Raises:
            RanksFailed: a rank died or hangs.
        """
        with tracing.span(SpanName.MODEL):
            self.frozen.load()
            self.group.setup(self._job.context, fresh=fresh)
            if self.generator is not None:
                self.generator.open()

    def restarting[T](self, work: Callable[[], T]) -> T:
        """Does `work`, and does it again with new ranks when some fail in it.

        Args:
            work: begins with `load_model`, and goes on from the newest checkpoint.

        Raises:
            RanksFailed: once more than `faults.restarts` allows, or where it would not help.
        """
        while True:
            try:
                return work()
            except RanksFailed as failure:
                self._restart(failure)

    def _restart(self, failure: RanksFailed) -> None:
        if not failure.restartable or not self._restarts_left:
            raise failure
        moved = {group.name: group.refill_room() for group in (self.group, *self.frozen.groups)}
        moved[failure.group] |= set(failure.ranks)
        self._restarts_left -= 1
        log.error("ranks are started anew", exc_info=failure)
        reason = str(reason_of(failure))
        self._recorder.record(
            "warning",
            {
                "message": f"{failure}. Ranks are started anew and go on from the last checkpoint; "
                f"`faults.restarts` allows {self._restarts_left} more",
                "reason": reason,
                "ranks": list(failure.ranks),
            },
        )
        for group in self.frozen.groups:
            if moved[group.name] or group.name == failure.group:
                group.replace(moved[group.name])
        # The trained model goes back to the last checkpoint, whoever failed.
        self.group.replace(moved[self.group.name])

    def nodes(self) -> set[str]:
        """Ray's ids of the machines that ranks or this process are on."""
        groups = (self.group, *self.frozen.groups)
        return {here()}.union(*(group.nodes for group in groups))

    def stop(self) -> None:
        """Ends all processes at once, but for the last spans of one that is traced."""
        groups = (self.group, *self.frozen.groups)
        try:
            if tracing.place() is not None:
                sent = [answer for group in groups for answer in group.flush_spans()]
                ray.wait(sent, num_returns=len(sent), timeout=tracing.RANKS_SECONDS)
        finally:
            for group in groups:
                group.stop()

    def _warn(self, message: str) -> None:
        self._recorder.record("warning", {"message": message})


@contextmanager
def open_ranks(job: Job, recorder: SpoolRecorder) -> Iterator[JobRanks]:
    """A job's ranks, which end with the block."""
    gpus = job.context.spec.resources.gpus_per_node
    with ExitStack() as held:
        with tracing.span(SpanName.CLUSTER):
            held.enter_context(ray_session(job.processes, gpus=gpus))
            ranks = JobRanks(job, recorder)
            held.callback(ranks.stop)
            held.enter_context(told_of_draining(ranks.nodes))
        yield ranks
