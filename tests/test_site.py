"""The documentation site in a real browser: every link leads somewhere, and its search finds pages.

It needs mkdocs (`requirements-docs.txt`, an environment of its own is enough) and Chromium on PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from tests.harness.launch import REPO_ROOT

MISSING = [program for program in ("mkdocs", "chromium") if shutil.which(program) is None]
IN_MODE = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
# It looks nothing up on the network, and waits for the page's own scripts.
ALONE = ["--disable-background-networking", "--no-first-run", "--virtual-time-budget=15000"]


def shown(address: str, profile: Path) -> str:
    """Return what a browser makes of a page, once its scripts have run."""
    command = ["chromium", *IN_MODE, *ALONE, f"--user-data-dir={profile}", address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_links_and_search_of_the_site_work_in_a_browser(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(["mkdocs", "build", "--quiet", "--strict", "--site-dir", site], check=True, cwd=REPO_ROOT)
    pages = {path.as_uri(): shown(path.as_uri(), tmp_path / "profile") for path in sorted(site.rglob("*.html"))}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', dom)) for page, dom in pages.items()}
    links = [
        (page, *urldefrag(link))
        for page, dom in pages.items()
        for href in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', dom)
        if (link := urljoin(page, unescape(href))).startswith(site.as_uri())
    ]
    assert len(links) > 1000
    broken = [link for link in links if link[1] not in pages or (link[2] and unquote(link[2]) not in anchors[link[1]])]
    assert broken == []
    found = shown(f"{(site / 'index.html').as_uri()}?q=offload", tmp_path / "profile")
    assert re.search(r"\b[1-9]\d* matching documents", found)
