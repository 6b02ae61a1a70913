"""A job's ranks, from Ray to the engines that the loop works with."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from algorithms.errors import JobFailure
from algorithms.setup import open_chat
from megatron_backend.driver.job import Job
from megatron_backend.workers.engines import RayGenerator, RayTrainEngine
from megatron_backend.workers.group import WorkerGroup
from megatron_backend.workers.ray_session import ray_session
from service.spec import Reason


class JobRanks:
    """The ranks of a job.

    Attributes:
        group: the processes.
        tokenizer: of the model.
        train: the trained model.
        generator: the generation copies, where the job samples; only after `load_model`.
    """

    def __init__(self, job: Job) -> None:
        """Starts the processes, and reads the tokenizer while they import Megatron.

        Raises:
            NoRoom: the cluster has no place for the ranks.
            JobFailure: the tokenizer cannot be read.
        """
        self._job = job
        self.group = WorkerGroup(job.layout, gpu=job.gpu)
        self.train = RayTrainEngine(self.group)
        self.generator: RayGenerator | None = None
        self.tokenizer = load_tokenizer(Path(job.context.model.tokenizer))

    def load_model(self) -> None:
        """Builds the model on the ranks, with the job's starting weights.

        Raises:
            WorkerLost: a rank died.
            JobFailure: the tokenizer's chat template cannot be used.
        """
        context = self._job.context
        self.group.setup(context)
        if context.spec.algorithm.online or context.spec.evaluation.items:
            stops = {open_chat(self.tokenizer).end_of_turn_id, self.tokenizer.eos_token_id}
            self.generator = RayGenerator(
                self.group,
                tp=context.spec.rollout.layout.tp,
                stop_token_ids=sorted(stops - {None}),
                max_length=context.spec.training.max_length,
                vocab_size=int(context.model.config["vocab_size"]),
            )


@contextmanager
def open_ranks(job: Job) -> Iterator[JobRanks]:
    """A job's ranks, which end with the block."""
    gpus = job.context.spec.resources.gpus_per_node
    with ray_session(job.layout.world_size, gpus=gpus):
        ranks = JobRanks(job)
        try:
            yield ranks
        finally:
            ranks.group.stop()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder.

    Raises:
        JobFailure: USER_ERROR; the folder holds no fast tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise JobFailure(Reason.USER_ERROR, f"the model's tokenizer: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise JobFailure(
            Reason.USER_ERROR,
            f"the model's tokenizer is a {type(tokenizer).__name__}; a fast one is needed "
            "(tokenizer.json)",
        )
    return tokenizer
