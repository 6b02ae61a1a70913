"""From a job document to something that can be launched, or to everything that is wrong with it.

Nothing is stored or started here, so `POST /v1/jobs:plan` and `POST /v1/jobs` share this code, and
a plan that was accepted can only be refused a moment later where the world has changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from service.catalogue import Catalogue
from service.launchers import Launcher, LaunchRequest, Submission
from service.settings import Settings
from service.spec import JobContext, JobSpec, ResumedCheckpoint, Role
from service.spec.layout import Layout
from service.store import Store
from service.validation.batch import check_batch, check_cuts, check_lengths, check_schedule
from service.validation.cluster import check_cluster
from service.validation.environments import resolve_environment
from service.validation.episodes import check_overlong, length_notes
from service.validation.files import find_files
from service.validation.fit import check_fit, notes_of
from service.validation.layout import check_rollout_world, resolve_layout
from service.validation.model import FoundModel, ModelFinder
from service.validation.other_models import (
    as_before,
    check_trained_head,
    find_other_models,
    with_pinned,
)
from service.validation.precision import check_formats
from service.validation.problems import FieldProblem, InvalidRequest
from service.validation.resume import FoundResume, ResumeFinder, with_layout
from service.validation.storage import check_storage

_PLANNED = "planned"
"""Stands for the id of a job that is only planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedJob:
    """A job with nothing left to find out."""

    spec: JobSpec
    """The document with environment versions and the models' checkpoints pinned."""
    layout: Layout
    """Of training, with `auto` resolved."""
    model: FoundModel
    others: dict[Role, FoundModel]
    """Models beside it."""
    files: dict[str, str]
    notes: list[str]
    """What is worth knowing before it starts."""
    resume: FoundResume | None = None
    """What the job goes on from; it has to be put aside before `context` is made."""

    def context(self, job_id: str, resumed: ResumedCheckpoint | None = None) -> JobContext:
        """What the driver of the job gets.

        Args:
            job_id: the new job's.
            resumed: where `resume` was put aside for it.
        """
        model = self.model.resolved
        if resumed is not None:
            tokenizer = str(Path(resumed.checkpoint, "hf"))
            model = model.model_copy(update={"tokenizer": tokenizer})
        return JobContext(
            job_id=job_id,
            spec=self.spec,
            dp=self.layout.dp,
            model=model,
            other_models={role: found.resolved for role, found in self.others.items()},
            files=self.files,
            resume=resumed,
        )


class Validator:
    """Checks jobs against what this service has: models, files, environments, launchers."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        catalogue: Catalogue,
        launchers: Mapping[str, Launcher],
    ) -> None:
        self._files_dir: Path = settings.files_dir
        self._jobs_dir = settings.jobs_dir
        self._data_roots = settings.all_data_roots
        self._store = store
        self._catalogue = catalogue
        self._launchers = launchers
        self._models = ModelFinder(
            roots=settings.all_model_roots, jobs_dir=settings.jobs_dir, store=store
        )
        self._resumes = ResumeFinder(store=store, models=self._models)

    def accept(self, spec: JobSpec) -> AcceptedJob:
        """Checks a job.

        Raises:
            InvalidRequest: with every fault that was found.
            CatalogueUnavailable: the environments' process failed.
        """
        spec, problems = with_layout(spec)
        launcher = self._launchers.get(spec.resources.cluster)
        capability = launcher.compute_capability if launcher else None
        layout, found = self._find_layout(spec)
        problems += found + check_formats(spec, capability)
        resume, model, found = self._find_model(spec)
        problems += found
        if model is not None:
            problems += check_trained_head(spec, model)
            problems += check_lengths(spec, model.config)
            problems += check_fit(spec, layout or spec.parallel, model.config)
        if resume is not None:
            spec = as_before(spec, sent=resume.sent, pinned=resume.resolved)
        others = find_other_models(spec, self._models, model)
        files, found = self._find_files(spec)
        problems += others.problems + found
        pinned, found = self._pin_environments(spec)
        problems += found
        max_turns = self._max_turns(pinned)
        problems += check_overlong(pinned, max_turns)
        if problems or layout is None or model is None:
            raise InvalidRequest(problems)
        pinned = with_pinned(pinned.model_copy(update={"model": model.source}), others.models)
        if resume is not None:
            pinned = pinned.model_copy(update={"resume": resume.pinned})
        return AcceptedJob(
            spec=pinned,
            layout=layout,
            model=model,
            others=others.models,
            files=files,
            notes=notes_of(spec, layout, model.config, capability)
            + length_notes(pinned, max_turns),
            resume=resume,
        )

    def preview(self, accepted: AcceptedJob) -> Submission | None:
        """What the job's cluster would be handed for its first attempt; null on this machine."""
        launcher = self._launchers[accepted.spec.resources.cluster]
        request = LaunchRequest(
            job_id=_PLANNED,
            attempt=1,
            job_dir=self._jobs_dir / _PLANNED,
            context=accepted.context(_PLANNED),
        )
        return launcher.preview(request)

    def _find_layout(self, spec: JobSpec) -> tuple[Layout | None, list[FieldProblem]]:
        """The layout, and what of a job is wrong without looking at any model."""
        problems = check_cluster(spec, self._launchers) + check_schedule(spec)
        problems += check_storage(spec.checkpoint)
        layout, found = resolve_layout(spec)
        problems += found
        if layout is not None:
            problems += check_batch(spec, layout) + check_cuts(spec, layout)
            if spec.samples:
                problems += check_rollout_world(spec.rollout.layout.tp, layout.world_size)
        return layout, problems

    def _find_model(
        self, spec: JobSpec
    ) -> tuple[FoundResume | None, FoundModel | None, list[FieldProblem]]:
        """What the job trains, or goes on from."""
        if spec.resume is None:
            model, problems = self._models.find(spec.model)
            return None, model, problems
        resume, problems = self._resumes.find(spec, spec.resume)
        return resume, None if resume is None else resume.model, problems

    def _find_files(self, spec: JobSpec) -> tuple[dict[str, str], list[FieldProblem]]:
        if spec.data is None:
            return {}, []
        return find_files(
            spec.data,
            spec.algorithm.rows,
            store=self._store,
            root=self._files_dir,
            data_roots=self._data_roots,
        )

    def _max_turns(self, spec: JobSpec) -> int | None:
        """Assistant turns of the job's environment; None where it has none, or one that is not
        there."""
        if spec.environment is None:
            return None
        return self._catalogue.environments()[spec.environment.id].max_turns

    def _pin_environments(self, spec: JobSpec) -> tuple[JobSpec, list[FieldProblem]]:
        problems: list[FieldProblem] = []
        if spec.environment is not None:
            reference, found = resolve_environment(spec.environment, self._catalogue, "environment")
            problems += found
            spec = spec.model_copy(update={"environment": reference})
        held_out = spec.evaluation.environment
        if held_out is not None:
            reference, found = resolve_environment(
                held_out, self._catalogue, "evaluation.environment"
            )
            problems += found
            evaluation = spec.evaluation.model_copy(update={"environment": reference})
            spec = spec.model_copy(update={"evaluation": evaluation})
        return spec, problems
