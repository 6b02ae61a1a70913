"""Ids of jobs, files and keys: random, so that nothing a user gives becomes a path or a key."""

import secrets

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_LENGTH = 16  # 82 bits


def _random(prefix: str) -> str:
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))


def new_job_id() -> str:
    """`job-` and 16 lower-case letters or digits."""
    return _random("job-")


def new_file_id() -> str:
    """`file-` and 16 lower-case letters or digits."""
    return _random("file-")


def new_key_id() -> str:
    """`key-` and 16 lower-case letters or digits; the name of a key, not the secret."""
    return _random("key-")
