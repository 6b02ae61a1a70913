"""The models of a job that only read, on ranks of their own: a teacher, a reward model."""

from collections.abc import Iterator
from typing import Any

from megatron_backend.driver.job import Job
from megatron_backend.driver.tokenizers import MODEL_NAMES
from megatron_backend.workers.engines import RayScorer, RayTeacher
from megatron_backend.workers.frozen import FrozenRank, ScorerRank, TeacherRank
from megatron_backend.workers.group import WorkerGroup
from service.spec.other_models import Role


class FrozenModels:
    """A job's models that only read; there may be none.

    Attributes:
        teacher: where the algorithm learns from one.
        scorer: where a reward model has a say in rewards.
    """

    def __init__(self, job: Job) -> None:
        """Starts the processes.

        Raises:
            NoRoom: the cluster has no place for the ranks.
        """
        self._job = job
        self._teacher = self._group("teacher", TeacherRank)
        self._scorer = self._group("reward", ScorerRank)
        self.teacher = None if self._teacher is None else RayTeacher(self._teacher)
        self.scorer = None if self._scorer is None else RayScorer(self._scorer)

    @property
    def groups(self) -> Iterator[WorkerGroup[Any]]:
        """Those that there are."""
        return (group for group in (self._teacher, self._scorer) if group is not None)

    def load(self) -> None:
        """Builds the models that are not there yet, or not any more.

        Raises:
            RanksFailed: a rank died or hangs.
        """
        for group in self.groups:
            if not group.joined:
                group.setup(self._job.context)

    def _group[R: FrozenRank](self, role: Role, worker: type[R]) -> WorkerGroup[R] | None:
        layout = self._job.frozen_layouts.get(role)
        if layout is None:
            return None
        return WorkerGroup(
            worker,
            layout,
            gpu=self._job.gpu,
            deadlines=self._job.context.spec.faults.deadlines,
            nodes=self._job.context.spec.resources.nodes,
            processes=self._job.processes,
            name=MODEL_NAMES[role],
        )
