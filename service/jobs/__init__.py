"""What a job, an attempt and an event are: states, legal moves, records, folders. No database."""

from service.jobs.folder import AttemptFolder, JobFolder
from service.jobs.identifiers import new_file_id, new_job_id, new_key_id
from service.jobs.records import (
    ApiKey,
    Attempt,
    Event,
    File,
    Job,
    MetricPoint,
)
from service.jobs.states import MOVES, AttemptState, IllegalMove, JobState, Wish, check_move

__all__ = [
    "MOVES",
    "ApiKey",
    "Attempt",
    "AttemptFolder",
    "AttemptState",
    "Event",
    "File",
    "IllegalMove",
    "Job",
    "JobFolder",
    "JobState",
    "MetricPoint",
    "Wish",
    "check_move",
    "new_file_id",
    "new_job_id",
    "new_key_id",
]
