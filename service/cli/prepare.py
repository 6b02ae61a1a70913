"""`python -m service.cli.prepare JOB.yaml JOB_DIR`: a job's folder, for who uses no service.

The document is checked as `POST /v1/jobs` checks it, but against this user's own files: models and
rows may lie anywhere. The folder is what a driver needs, so `python -m megatron_backend JOB_DIR`
runs the job; its events stay in the folder's spool. deploy/slurm/planish.sbatch does both.

It is made beside its place and renamed there, so a kill leaves none or a whole one; where it is
there already (the batch job was queued again) nothing is done.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from service.catalogue import Catalogue
from service.cli.context import Exit, err
from service.cli.documents import BadDocument, read_document
from service.jobs import new_job_id
from service.jobs.folder import JobFolder
from service.launchers import Launcher, Site
from service.launchers.slurm.config import SlurmCluster
from service.settings import Settings
from service.spec import JobContext, JobSpec
from service.store import Store
from service.validation.problems import InvalidRequest, from_pydantic
from service.validation.submit import Validator


def prepare(
    file: Annotated[Path, typer.Argument(help="Job file: YAML or JSON.", show_default=False)],
    job_dir: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Machines, in place of `resources.nodes`.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="In place of `resources.gpus_per_node`.")
    ] = None,
) -> None:
    """Makes a job's folder from a job file, without a service."""
    if (job_dir / "context.json").exists():
        return
    job_dir.parent.mkdir(parents=True, exist_ok=True)
    given = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    fresh = Path(tempfile.mkdtemp(prefix=f".{job_dir.name}-", dir=job_dir.parent))
    try:
        document = with_resources(read_document(file), given)
        JobFolder(fresh).write_context(resolve(document, fresh / "check"))
        shutil.rmtree(fresh / "check")
        fresh.chmod(0o755)
        os.rename(fresh, job_dir)
    except BadDocument as error:
        raise _refused([str(error)]) from error
    except ValidationError as error:
        faults = from_pydantic(error.errors(include_input=False))
        raise _refused([f"{fault.field}: {fault.message}" for fault in faults]) from error
    except InvalidRequest as error:
        lines = [f"{p.field}: {p.message}{'; ' + p.fix if p.fix else ''}" for p in error.problems]
        raise _refused(lines) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def with_resources(document: dict[str, Any], given: dict[str, int | None]) -> dict[str, Any]:
    """The document, with those of `resources` that are given."""
    resources = document.get("resources") or {}
    if not isinstance(resources, dict):
        return document  # the spec says what is wrong with it
    changes = {name: value for name, value in given.items() if value is not None}
    return {**document, "resources": {**resources, **changes}}


def resolve(document: dict[str, Any], scratch: Path) -> JobContext:
    """What the driver of the job gets.

    Args:
        document: the job's.
        scratch: a folder to be made, which may be deleted afterwards.

    Raises:
        ValidationError: by itself it is no job.
        InvalidRequest: what it names is not there, or does not fit.
    """
    spec = JobSpec.model_validate(document)
    settings = Settings(
        data_dir=scratch, model_roots=(Path("/"),), data_roots=(Path("/"),), max_local_jobs=1
    )
    settings.data_dir.mkdir()
    launcher: Launcher = SlurmCluster().open(Site(jobs_dir=settings.jobs_dir))
    store = Store.open(settings.store_url)
    try:
        catalogue = Catalogue(
            timeout_seconds=settings.catalogue_timeout_seconds, data_roots=settings.all_data_roots
        )
        launchers = {spec.resources.cluster: launcher}
        validator = Validator(
            settings=settings, store=store, catalogue=catalogue, launchers=launchers
        )
        return validator.accept(spec).context(new_job_id())
    finally:
        store.close()
        launcher.close()


def _refused(lines: list[str]) -> typer.Exit:
    for line in lines:
        err().print(line, markup=False)
    return typer.Exit(Exit.REFUSED)


if __name__ == "__main__":
    typer.run(prepare)
