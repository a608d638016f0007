"""The documents say what the sources say, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT

PAGES = [
    str(path.relative_to(REPO_ROOT)) for glob in ("*.md", "[deph]*/**/*.md") for path in sorted(REPO_ROOT.glob(glob))
]

PACKAGES = sorted(
    path.parent.relative_to(REPO_ROOT)
    for folder in ("hybrid_engine", "megatron_patches", "examples")
    for path in REPO_ROOT.glob(f"{folder}/**/__init__.py")
)


def test_the_configuration_page_is_up_to_date() -> None:
    made = runpy.run_path(str(REPO_ROOT / "docs" / "make_configuration.py"))["page"]()
    written = (REPO_ROOT / "docs" / "configuration.md").read_text()
    assert written == made, "run: make docs"


@pytest.mark.slow
def test_the_page_of_a_large_model_is_up_to_date() -> None:
    """Its figures are the planner's; and what it claims holds: of what a gather moves 85 % or more are saved."""
    made = runpy.run_path(str(REPO_ROOT / "docs" / "make_seventy_billion.py"))["page"]()
    assert (REPO_ROOT / "docs" / "seventy_billion.md").read_text() == made, "run: make docs"
    saved = [float(share) for share in re.findall(r"\| ([\d.]+)% \|$", made, re.MULTILINE)]
    assert len(saved) == 3
    assert min(saved) >= 85


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    path = REPO_ROOT / page
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_says_what_each_of_its_files_is_for(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((REPO_ROOT / package / "__init__.py").read_text())) or ""
    words = set(re.findall(r"\w+", docstring))
    modules = {path.stem for path in (REPO_ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    assert modules - words == set(), "not in the docstring"
    places = (REPO_ROOT / package, (REPO_ROOT / package).parent, REPO_ROOT / "hybrid_engine", REPO_ROOT)
    named = re.findall(r"[\w/]+\.py\b", docstring)
    assert [name for name in named if not any((place / name).exists() for place in places)] == [], "do not exist"


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/models.md", "docs/failures.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (REPO_ROOT / page).read_text()
    named = set(re.findall(r"[\w./]+/[\w.]+\.py\b", text))
    assert (
        sorted(name for name in named if not any((REPO_ROOT / top / name).exists() for top in ("", "hybrid_engine")))
        == []
    )
