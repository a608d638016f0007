"""The documents that are made from the sources are what the sources make."""

from __future__ import annotations

import runpy

from tests.launch import REPO_ROOT


def test_the_configuration_page_is_up_to_date() -> None:
    made = runpy.run_path(str(REPO_ROOT / "docs" / "make_configuration.py"))["page"]()
    written = (REPO_ROOT / "docs" / "configuration.md").read_text()
    assert written == made, "run: python docs/make_configuration.py > docs/configuration.md"
