"""Plans: what a job would become, and in which layouts it would fit."""

from dataclasses import asdict
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query, Request

from service.api.context import Caller, Service
from service.api.jobs import JOB_BODY, accept_job, read_job
from service.api.plan_resources import (
    FrozenGroup,
    FrozenRankMemory,
    Plan,
    Proposal,
    RankMemory,
    SubmissionText,
)
from service.api.views import layout_resource
from service.launchers import Submission
from service.spec import JobSpec, Role
from service.spec.model_config import ModelConfig
from service.spec.padding import padded_vocab_size, padding_factor
from service.validation import planner
from service.validation.activations import micro_batches
from service.validation.memory import estimate, estimate_frozen
from service.validation.other_models import ROLE_NAMES, head_of
from service.validation.parameters import model_parameters
from service.validation.planner import Machines, gpu_gib, propose
from service.validation.problems import FieldProblem, InvalidRequest
from service.validation.submit import AcceptedJob

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.post("/jobs:plan", openapi_extra=JOB_BODY)
async def plan_job(
    request: Request,
    service: Service,
    _caller: Caller,
    gpu_memory_gib: Annotated[
        float | None,
        Query(gt=0, le=4096, description="GiB of one GPU: proposes layouts that fit."),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        Query(ge=1, le=64, description="GPUs of each machine to propose for; else the job's own."),
    ] = None,
    nodes: Annotated[
        int | None,
        Query(ge=1, le=1024, description="Machines to propose for; else the job's own."),
    ] = None,
) -> Plan:
    """Checks a job as a submit does, and shows what it would become. Takes and stores nothing."""
    spec = await read_job(service, request)
    machines = _machines(spec, gpu_memory_gib, gpus_per_node, nodes)
    accepted = await to_thread.run_sync(accept_job, service, spec, limiter=service.checking)
    submission = await to_thread.run_sync(service.validator.preview, accepted)
    return await to_thread.run_sync(_plan, accepted, machines, submission, limiter=service.checking)


def _machines(
    spec: JobSpec, memory_gib: float | None, gpus_per_node: int | None, nodes: int | None
) -> Machines | None:
    if memory_gib is None and gpus_per_node is None and nodes is None:
        return None
    if memory_gib is None:
        problem = FieldProblem(
            field="gpu_memory_gib",
            message="layouts are proposed for GPUs whose memory is known, and it is not given",
            fix="ask with ?gpu_memory_gib=80 too, or leave gpus_per_node and nodes out",
        )
        raise InvalidRequest([problem])
    gpus = gpus_per_node or spec.resources.gpus_per_node
    if not gpus:
        problem = FieldProblem(
            field="gpus_per_node",
            message="layouts are proposed for GPUs, and the job has resources.gpus_per_node: 0",
            fix="ask with ?gpus_per_node=8, or set it in the job",
        )
        raise InvalidRequest([problem])
    return Machines(nodes=nodes or spec.resources.nodes, gpus_per_node=gpus, memory_gib=memory_gib)


def _plan(accepted: AcceptedJob, machines: Machines | None, submission: Submission | None) -> Plan:
    spec, layout, model = accepted.spec, accepted.layout, accepted.model.config
    proposals, notes = None, list(accepted.notes)
    if machines is not None:
        proposals, missing = _proposals(spec, model, machines)
        notes += missing + _too_large(accepted, machines)
    return Plan(
        spec=spec,
        layout=layout_resource(layout),
        micro_batch_size=spec.training.fixed_micro_batch_size,
        micro_batches=micro_batches(spec, layout),
        parameters=model_parameters(model, spec.algorithm.head),
        groups=[_group(accepted, role) for role in spec.frozen_models],
        memory_per_rank=[RankMemory(**asdict(stage)) for stage in estimate(spec, model, layout)],
        padded_vocabulary=padded_vocab_size(model.vocab_size, tp=layout.tp),
        padding_factor=padding_factor(layout, fp8=spec.precision.fp8),
        notes=notes,
        submission=None if submission is None else SubmissionText(**asdict(submission)),
        proposals=proposals,
    )


def _group(accepted: AcceptedJob, role: Role) -> FrozenGroup:
    """A teacher or a reward model as it would be loaded."""
    _, frozen = accepted.spec.frozen_models[role]
    config, head = accepted.others[role].config, head_of(role)
    stages = estimate_frozen(accepted.spec, config, frozen.layout, head=head)
    return FrozenGroup(
        role=role,
        layout=frozen.layout,
        world_size=frozen.layout.ranks,
        parameters=model_parameters(config, head),
        memory_per_rank=[FrozenRankMemory(**asdict(stage), total=stage.total) for stage in stages],
    )


def _too_large(accepted: AcceptedJob, machines: Machines) -> list[str]:
    """Of each frozen model that fits into no GPU in its layout."""
    notes = []
    for role, (field, _) in accepted.spec.frozen_models.items():
        most = max(stage.total for stage in _group(accepted, role).memory_per_rank)
        if most > machines.usable_bytes:
            needs = gpu_gib(most)
            notes.append(
                f"the {ROLE_NAMES[role]} needs {needs:.1f} GiB on each of its GPUs; raise tp or pp "
                f"in {field}.layout"
            )
    return notes


def _proposals(
    spec: JobSpec, model: ModelConfig, machines: Machines
) -> tuple[list[Proposal], list[str]]:
    """Layouts that fit, or none and what to say of that."""
    found = propose(spec, model, machines)
    if found.fitting:
        return [_proposal(one) for one in found.fitting], []
    gpus = f"{machines.nodes} x {machines.gpus_per_node} GPUs of {machines.memory_gib:g} GiB"
    if found.smallest is None:
        return [], [f"no layout of {gpus} goes with this model and batch"]
    needs = gpu_gib(found.smallest.memory.total)
    return [], [
        f"the job fits in no layout of {gpus}; {found.smallest.layout} with full recomputation and "
        f"offload comes closest, and needs {needs:.1f} GiB"
    ]


def _proposal(found: planner.Proposal) -> Proposal:
    spec = found.spec
    changes: dict[str, dict[str, Any]] = {
        "parallel": spec.parallel.model_dump(exclude_defaults=True),
        "training": {"recompute": spec.training.recompute},
        "optimizer": {"offload": spec.optimizer.offload},
        "resources": {
            "nodes": spec.resources.nodes,
            "gpus_per_node": spec.resources.gpus_per_node,
        },
    }
    return Proposal(
        layout=layout_resource(found.layout),
        changes=changes,
        memory=RankMemory(**asdict(found.memory)),
        relative_time=round(found.time.total, 3),
        reason=found.reason,
    )
