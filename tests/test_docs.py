"""The documents say what the sources say, and their links lead somewhere."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.harness.launch import REPO_ROOT

PAGES = [
    str(path.relative_to(REPO_ROOT)) for glob in ("*.md", "[deph]*/**/*.md") for path in sorted(REPO_ROOT.glob(glob))
]


def test_the_configuration_page_is_up_to_date() -> None:
    made = runpy.run_path(str(REPO_ROOT / "docs" / "make_configuration.py"))["page"]()
    written = (REPO_ROOT / "docs" / "configuration.md").read_text()
    assert written == made, "run: make docs"


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    path = REPO_ROOT / page
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
