"""Every relative link of the docs leads to a file that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "deploy/**/*.md", "helm/**/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_files_that_the_docs_name_are_there() -> None:
    """Paths in backticks, such as `algorithms/loop.py`."""
    named = re.compile(
        r"`((?:service|algorithms|megatron_backend|environments|tests|scripts|docs)/[\w/.-]+)`"
    )
    missing = {
        (page.name, path)
        for page in PAGES
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    }
    assert missing == set()
