"""What a driver on this machine gets to see of the service's environment.

A list of what is let through, not of what is kept back: a secret that an operator gives the service
next year does not leak into a job because nobody thought of it here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from service.launchers.processes import ATTEMPT_VARIABLE, JOB_VARIABLE
from service.settings import DATA_ROOTS_VARIABLE, joined_roots

_NAMES = frozenset(
    {
        "HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPATH",
        "PYTHONPYCACHEPREFIX",
        "RAY_TMPDIR",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRANSFORMERS_OFFLINE",
        "TRITON_CACHE_DIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
_PREFIXES = ("CUDA_", "GLOO_", "LC_", "NCCL_", "NVIDIA_", "NVTE_")
_STORAGE_PREFIX = "AWS_"
"""Where the storage of checkpoints is and who may use it: for jobs that have one, no others."""


def driver_environment(
    service: Mapping[str, str],
    job_id: str,
    attempt: int,
    data_roots: Sequence[Path] = (),
    *,
    storage: bool = False,
) -> dict[str, str]:
    """The driver's environment: what it needs of the service's, and the attempt's marks.

    Args:
        service: the environment of the service.
        job_id: the job.
        attempt: the attempt.
        data_roots: folders that the job's environments may read files from; the same that they
            were checked with at submit.
        storage: the job copies its checkpoints to a storage.
    """
    prefixes = (*_PREFIXES, _STORAGE_PREFIX) if storage else _PREFIXES
    kept = {
        name: value
        for name, value in service.items()
        if name in _NAMES or name.startswith(prefixes)
    }
    return {
        **kept,
        JOB_VARIABLE: job_id,
        ATTEMPT_VARIABLE: str(attempt),
        DATA_ROOTS_VARIABLE: joined_roots(data_roots),
        "PYTHONUNBUFFERED": "1",
        # setproctitle, which Ray calls, otherwise writes titles over the memory behind
        # /proc/PID/environ, and with it over the marks.
        "SPT_NOENV": "1",
    }
