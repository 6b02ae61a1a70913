"""What an attempt is called in Kubernetes.

KubeRay makes names of its own from a RayJob's, and refuses one of more than 47 characters (after
the API server took it). So the name is made of the beginning of the job's id, the attempt, and a
hash of both, which keeps attempts apart whose beginnings are the same. The full id is in an
annotation; a label has it where it is allowed to stand there.
"""

import hashlib
import re

LONGEST_NAME = 47
LONGEST_LABEL = 63
MANAGER = "planish"

MANAGER_LABEL = "app.kubernetes.io/managed-by"
JOB_LABEL = "planish.io/job"
ATTEMPT_LABEL = "planish.io/attempt"
JOB_ANNOTATION = "planish.io/job-id"
JOB_NAME_ANNOTATION = "planish.io/job-name"
FOLDER_ANNOTATION = "planish.io/job-folder"

_HASH_CHARACTERS = 8
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def launcher_id(job_id: str, attempt: int) -> str:
    """`JOB_ID/ATTEMPT`."""
    return f"{job_id}/{attempt}"


def parse_launcher_id(launcher_id: str) -> tuple[str, int]:
    """The job's id and the attempt's number.

    Raises:
        ValueError: it is no id of an attempt.
    """
    job_id, _, attempt = launcher_id.rpartition("/")
    return job_id, int(attempt)


def rayjob_name(job_id: str, attempt: int) -> str:
    """The RayJob's name: a DNS label (RFC 1123) of at most 47 characters, beginning with a letter,
    always the same for an attempt and no other's."""
    end = f"-{attempt}-{_hash(launcher_id(job_id, attempt))}"
    return f"{_slug(job_id)[: LONGEST_NAME - len(end)].rstrip('-')}{end}"


def job_label(job_id: str) -> str:
    """A label's value that all objects of a job have, and no other's do."""
    if _LABEL_VALUE.fullmatch(job_id):
        return job_id
    end = f"-{_hash(job_id)}"
    return _slug(job_id)[: LONGEST_LABEL - len(end)].rstrip("-") + end


def labels(job_id: str, attempt: int) -> dict[str, str]:
    """Labels of all objects of an attempt."""
    return {
        MANAGER_LABEL: MANAGER,
        JOB_LABEL: job_label(job_id),
        ATTEMPT_LABEL: str(attempt),
    }


def _slug(text: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return slug if slug[:1].isalpha() else f"job-{slug}".rstrip("-")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARACTERS]
