"""A hook of mkdocs: pages of the site that lie outside docs/, and links from pages to the files of the repository.

Every page is written to be read in the repository too, so that its links are relative to its own file. On the site a
link to another page leads to that page, and one to a source file, which the site does not have, becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

# Page of the site -> file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "example.md": "examples/gpt_rl/README.md",
    "patches.md": "patches/README.md",
    "recipe.md": "examples/recipes/README.md",
    "security.md": "SECURITY.md",
}
_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def source_of(page: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    return OUTSIDE.get(page, f"docs/{page}")


def page_of(source: str) -> str | None:
    """Return the page, or the picture, that a file of the repository is on the site; None if it is not there."""
    pages = {file: page for page, file in OUTSIDE.items()}
    inside = (
        source.removeprefix("docs/")
        if source.startswith("docs/") and not source.endswith(".py")
        else None
    )
    return pages.get(source, inside)


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Return a page's text with its links made relative to the page, or removed where they leave the site."""

    def replaced(found: re.Match[str]) -> str:
        picture, text, link, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), link))
        there = page_of(posixpath.join(target, "README.md") if (ROOT / target).is_dir() else target)
        if there is None:
            return text
        return f"{picture}[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor or ''})"

    return _LINK.sub(replaced, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `OUTSIDE`."""
    from mkdocs.structure.files import File

    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, and put in the files that it names for the site, which has no source files."""
    whole = with_links_of_the_site(markdown, page.file.src_uri)
    return _FILE.sub(lambda found: f"```python\n{(ROOT / found[1]).read_text()}```", whole)
