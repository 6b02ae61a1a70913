"""What a job does when a rank dies or hangs, or a step goes wrong."""

from typing import Annotated, Literal

from pydantic import Field

from service.spec.base import SpecModel


class DeadlineSpec(SpecModel):
    """How long each phase may take before its ranks count as hung, in seconds."""

    setup: Annotated[float, Field(gt=0)] = 1800.0
    """Starting the ranks, loading the model, restoring a checkpoint."""
    step: Annotated[float, Field(gt=0)] = 1800.0
    """One call of training: an update, log-probs, a loss."""
    generate: Annotated[float, Field(gt=0)] = 1800.0
    """Sampling one batch of turns, and moving weights to the generation copies."""
    save: Annotated[float, Field(gt=0)] = 3600.0
    """Writing a checkpoint or an export."""


class FaultSpec(SpecModel):
    """What happens when a rank dies or hangs, or a step goes wrong."""

    deadlines: DeadlineSpec = DeadlineSpec()
    """Limits by phase."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often lost or hung ranks are started anew inside one attempt, where their machine is
    still there or another takes its place; further losses end the attempt."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """A step whose loss or gradient is no number: fail, leave it out, or go back to the last
    checkpoint and leave its batch out."""
    on_spike: Literal["ignore", "stop", "skip", "rewind"] = "ignore"
    """A step whose gradient norm or loss is a spike; as `on_nan`."""
    spike_factor: Annotated[float, Field(gt=1)] = 10.0
    """A gradient norm of this many times the median of the last `spike_window` is a spike."""
    spike_loss_factor: Annotated[float, Field(gt=1)] = 5.0
    """A loss of this many times the median of the last `spike_window` is a spike; of likelihoods,
    preferences and divergences, and never of a policy gradient, whose loss hovers around 0."""
    spike_window: Annotated[int, Field(ge=2, le=10_000)] = 32
    """How many steps the median is taken over; until there are so many, nothing is a spike."""
    max_skipped: Annotated[int, Field(ge=1, le=10_000)] = 5
    """Steps in a row that may be left out before the job fails."""
    grace_seconds: Annotated[float, Field(ge=0, le=86_400)] = 15.0
    """How long a job that is told to end (its time limit, a machine that is taken back) may take to
    finish its step and save; then it ends without. A user's cancel does not wait."""
