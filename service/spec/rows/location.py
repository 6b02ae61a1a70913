"""Where a file of rows is, and how it is opened: a path, or a URL of an object store."""

import errno
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from service.spec.rows.faults import FileFault

BUFFER_BYTES = 4 * 2**20

type Location = str | Path


def is_url(location: Location) -> bool:
    """Whether it is `s3://...` or its like."""
    return isinstance(location, str) and "://" in location


def open_binary(location: Location) -> BinaryIO:
    """The file, to be read from its start; nothing is fetched before it is read.

    Credentials and endpoint of an object store come from its own variables (`AWS_...`), never from
    a job.

    Raises:
        FileFault: this installation has no library for the store.
        OSError: it is not there, or cannot be read.
    """
    if not is_url(location):
        return open(location, "rb")
    import fsspec  # type: ignore[import-untyped]  # paths need none of it

    scheme = str(location).partition("://")[0]
    if scheme == "s3" and find_spec("s3fs") is None:
        raise FileFault("this installation cannot speak to S3: install planish with the extra `s3`")
    try:
        # A new connection each time: credentials and endpoint may be others by now.
        files, path = fsspec.core.url_to_fs(
            str(location), use_listings_cache=False, skip_instance_cache=True
        )
        raw: Any = files.open(path, "rb", block_size=BUFFER_BYTES, cache_type="readahead")
    except Exception as error:
        raise as_os_error(error, location) from error
    return cast(BinaryIO, BufferedReader(raw, buffer_size=BUFFER_BYTES))


def as_os_error(error: Exception, location: Location) -> OSError:
    """A store's own kind of error as one that says whether another try may help (EIO)."""
    if isinstance(error, OSError):
        return error
    message = f"{location} cannot be read: {error}"
    if "Credentials" in type(error).__name__:
        return PermissionError(errno.EACCES, message)
    return OSError(errno.EIO, message)
