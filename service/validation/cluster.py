"""Whether the cluster that a job names is there and has the machines that it asks for."""

from collections.abc import Mapping

from service.launchers import Launcher
from service.spec import JobSpec
from service.validation.problems import FieldProblem


def check_cluster(spec: JobSpec, launchers: Mapping[str, Launcher]) -> list[FieldProblem]:
    """Refuses what could never start; what is only busy just now can wait.

    Args:
        spec: the job.
        launchers: by the name of their cluster.
    """
    asked = spec.resources
    launcher = launchers.get(asked.cluster)
    if launcher is None:
        problem = FieldProblem(
            field="resources.cluster",
            message=f"this service has no cluster {asked.cluster!r}",
            fix=f"use one of: {', '.join(sorted(launchers))}",
        )
        return [problem]
    problems = list(launcher.check(spec))
    gpus, nodes = launcher.gpus_per_node, launcher.nodes
    if gpus is not None and asked.gpus_per_node > gpus:
        problems.append(
            FieldProblem(
                field="resources.gpus_per_node",
                message=f"{asked.gpus_per_node} GPUs are asked for, but a machine of the cluster "
                f"{asked.cluster} has {gpus}",
                fix=f"use at most {gpus}" if gpus else "use 0, which runs the ranks on the CPU",
            )
        )
    if nodes is not None and asked.nodes > nodes:
        problems.append(
            FieldProblem(
                field="resources.nodes",
                message=f"{asked.nodes} machines are asked for, but the cluster {asked.cluster} "
                f"has {nodes}",
                fix=f"use at most {nodes}",
            )
        )
    return problems
