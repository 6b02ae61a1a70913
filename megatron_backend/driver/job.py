"""A job's folder as its driver sees it."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from megatron_backend.checkpoint.durable import fsync_tree, move
from megatron_backend.checkpoint.hf_files import copy_tokenizer, write_config
from service.spec import JobContext
from service.spec.attempt import attempt_path
from service.spec.layout import Layout
from service.spec.model_config import ModelConfig
from service.spec.other_models import Role


class BadJobFolder(Exception):
    """JOB_DIR is not what a driver can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt of one job."""

    folder: Path
    attempt: int
    context: JobContext

    @property
    def attempt_folder(self) -> Path:
        """attempts/N."""
        return attempt_path(self.folder, self.attempt)

    @property
    def layout(self) -> Layout:
        """Layout of training."""
        return Layout.from_spec(self.context.spec.parallel, dp=self.context.dp)

    @property
    def frozen_layouts(self) -> dict[Role, Layout]:
        """Layouts of the models that only read, each on ranks of its own."""
        context = self.context
        return {
            role: Layout.of_frozen(
                frozen.layout, ModelConfig.from_hf(context.other_models[role].config)
            )
            for role, (_, frozen) in context.spec.frozen_models.items()
        }

    @property
    def processes(self) -> int:
        """Ranks of all models together."""
        return self.layout.world_size + sum(
            layout.world_size for layout in self.frozen_layouts.values()
        )

    def with_model(self, **changes: str) -> "Job":
        """The same job, with some fields of its resolved model changed."""
        model = self.context.model.model_copy(update=changes)
        return replace(self, context=self.context.model_copy(update={"model": model}))

    @property
    def gpu(self) -> bool:
        """Whether each rank has a GPU."""
        return self.context.spec.resources.gpus_per_node > 0


def open_job(folder: Path, attempt: int) -> Job:
    """Reads context.json.

    Raises:
        BadJobFolder: it is not there, or does not parse.
    """
    path = folder / "context.json"
    try:
        text = path.read_text(encoding="utf-8")
        context = JobContext.model_validate_json(text)
    except FileNotFoundError as error:
        raise BadJobFolder(f"{path} is not there: {folder} is no job's folder") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise BadJobFolder(f"{path} is no job context: {error}") from error
    return Job(folder=folder, attempt=attempt, context=context)


def keep_model_files(job: Job) -> Job:
    """The job with its config and tokenizer copied into JOB_DIR/model.

    They may come from a checkpoint of another job, which that job deletes in time; later attempts,
    and every checkpoint and export of this one, need them.

    Raises:
        FileNotFoundError: the tokenizer's folder is gone.
    """
    target = job.folder / "model"
    if not target.exists():
        fresh = job.folder / f".model-{job.attempt}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        copy_tokenizer(Path(job.context.model.tokenizer), fresh)
        write_config(job.context.model.config, fresh)
        fsync_tree(fresh)
        move(fresh, target)
    return job.with_model(tokenizer=str(target))
