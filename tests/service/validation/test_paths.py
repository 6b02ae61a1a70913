"""Path tricks in `model.path` and `model.init.tokenizer`."""

from pathlib import Path

import pytest

from service.validation.paths import find_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "root"
    (found / "inside" / "deep").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root-too").mkdir()
    (found / "out").symlink_to(tmp_path / "outside")
    (found / "in").symlink_to(found / "inside")
    (found / "loop").symlink_to(found / "loop")
    (found / "file").write_text("x")
    return found


@pytest.mark.parametrize("name", ["inside", "inside/deep", "in", "inside/../in", "./inside/", "."])
def test_folders_under_a_root_are_found(root: Path, name: str) -> None:
    for given in (name, str(root / name)):
        folder, problem = find_folder(given, [root], "model.path")
        assert problem is None
        assert folder == (root / name).resolve()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../outside", "not under one of"),
        ("inside/../../outside", "not under one of"),
        ("out", "not under one of"),
        ("../root-too", "not under one of"),
        ("/etc", "not under one of"),
        ("/no/such/folder", "not under one of"),
        ("missing", "there is no folder"),
        ("file", "there is no folder"),
        ("loop", "there is no folder"),
        ("x" * 5000, "there is no folder"),
        ("a\0b", "NUL"),
        ("%2e%2e/outside", "there is no folder"),
        ("~", "there is no folder"),
        ("..\\outside", "there is no folder"),
    ],
)
def test_everything_else_is_refused(root: Path, name: str, says: str) -> None:
    folder, problem = find_folder(name, [root], "model.path")
    assert folder is None
    assert problem is not None
    assert says in problem.message
    assert len(problem.message) < 400


def test_what_is_outside_is_refused_alike_whether_it_is_there_or_not(root: Path) -> None:
    found = [find_folder(name, [root], "f")[1] for name in ("/etc", "/no-such-thing")]
    assert [p.message.replace("/no-such-thing", "/etc") for p in found if p] == [
        "'/etc' is not under one of the service's model roots"
    ] * 2
