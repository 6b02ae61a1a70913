"""Whether what an algorithm says of an episode's length goes with how long episodes can be."""

from service.spec import JobSpec, PolicyGradientSpec
from service.validation.problems import FieldProblem


def most_policy_tokens(spec: JobSpec, max_turns: int) -> int:
    """Tokens that the policy can write in one episode; the prompt takes at least one.

    Args:
        spec: the job.
        max_turns: of its environment, unless the job sets less.
    """
    turns = max_turns
    if spec.environment is not None and spec.environment.max_turns is not None:
        turns = spec.environment.max_turns
    return min(spec.rollout.max_new_tokens * turns, spec.training.max_length - 1)


def check_overlong(spec: JobSpec, max_turns: int | None) -> list[FieldProblem]:
    """Whether an episode can be long enough for the penalty on length.

    Args:
        spec: the job.
        max_turns: see `most_policy_tokens`; None where they are not known.
    """
    overlong = spec.algorithm.overlong if isinstance(spec.algorithm, PolicyGradientSpec) else None
    if overlong is None or max_turns is None:
        return []
    most, begins = most_policy_tokens(spec, max_turns), overlong.max_tokens - overlong.buffer_tokens
    if begins < most:
        return []
    problem = FieldProblem(
        field="algorithm.overlong.max_tokens",
        message=f"the penalty begins above {begins} tokens (max_tokens less buffer_tokens), and "
        f"an episode has at most {most} of the policy",
        fix=f"use {most}, or a larger rollout.max_new_tokens",
    )
    return [problem]


def length_notes(spec: JobSpec, max_turns: int | None) -> list[str]:
    """What a user might not expect of lengths.

    Args:
        spec: the job.
        max_turns: see `most_policy_tokens`; None where they are not known.
    """
    if not isinstance(spec.algorithm, PolicyGradientSpec) or max_turns is None:
        return []
    most, notes = most_policy_tokens(spec, max_turns), []
    overlong, constant = spec.algorithm.overlong, spec.algorithm.length_constant
    if overlong is not None and overlong.max_tokens > most:
        notes.append(
            f"algorithm.overlong.max_tokens is {overlong.max_tokens}, and an episode has at most "
            f"{most} tokens of the policy: the penalty is never whole"
        )
    if constant is not None and constant != most:
        notes.append(
            f"algorithm.length_constant is {constant}, and an episode has at most {most} tokens of "
            "the policy: losses and gradients are scaled by the quotient"
        )
    return notes
