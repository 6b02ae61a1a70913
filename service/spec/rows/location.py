"""Where a file of rows is, and how it is opened: a path, or a URL of an object store."""

from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

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
        OSError: it is not there, or cannot be read.
    """
    if not is_url(location):
        return open(location, "rb")
    import fsspec  # type: ignore[import-untyped]  # paths need none of it

    scheme = str(location).partition("://")[0]
    if scheme == "s3" and find_spec("s3fs") is None:
        raise OSError("this installation cannot speak to S3: install planish with the extra `s3`")
    try:
        files, path = fsspec.core.url_to_fs(str(location), use_listings_cache=False)
        raw: Any = files.open(path, "rb", block_size=BUFFER_BYTES, cache_type="readahead")
    except OSError:
        raise
    except Exception as error:  # stores raise their own kinds: no credentials, no such bucket
        raise OSError(f"{location} cannot be opened: {error}") from error
    return cast(BinaryIO, BufferedReader(raw, buffer_size=BUFFER_BYTES))
