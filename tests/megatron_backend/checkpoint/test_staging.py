import errno
import mmap
from pathlib import Path
from typing import Any

import pytest

from megatron_backend.checkpoint.staging import StagedFiles


def test_a_copy_that_could_not_grow_can_be_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    files = StagedFiles()
    files.reset(1)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(OSError, match="no memory"):
            files.reset(1 << 30)
    files.reset(1)
    with files.open("state") as file:
        file.write(b"later")
    files.flush(tmp_path)
    written = files.result(wait=True)
    files.close()
    assert written is not None
    assert written.error is None
    assert (tmp_path / "state").read_bytes() == b"later"
