"""The environments' own process: which files it may read, and what is remembered of its answers."""

import json
from pathlib import Path

from service.catalogue import Catalogue

ROW = json.dumps({"question": "How many?", "answer": "#### 2"})


def test_questions_are_read_from_the_data_roots_only_and_a_refusal_is_not_remembered(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    catalogue = Catalogue(timeout_seconds=120, data_roots=[root])

    def problems(path: str) -> list[str]:
        version, faults = catalogue.check(
            id="math/gsm8k", version=None, max_turns=None, config={"path": path}
        )
        assert (version is None) == bool(faults)
        return [fault.message for fault in faults]

    outside = tmp_path / "outside.jsonl"
    outside.write_text(ROW)
    missing = f"no file at this path under the data roots ({root})"
    assert problems(str(outside)) == [missing]
    assert problems("rows.jsonl") == [missing]
    (root / "rows.jsonl").write_text(ROW)
    assert problems("rows.jsonl") == []
