"""Documents agree with the sources, and their links work."""

from __future__ import annotations

import ast
import pkgutil
import re
import runpy
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote, urldefrag, urljoin

import pytest
import torch
import yaml
from markdown.extensions.toc import slugify

import hybrid_engine.rl
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values

PAGES = [
    str(path.relative_to(REPO_ROOT))
    for glob in ("*.md", "[deph]*/**/*.md")
    for path in sorted(REPO_ROOT.glob(glob))
]

PACKAGES = sorted(
    path.parent.relative_to(REPO_ROOT)
    for folder in ("hybrid_engine", "megatron_patches", "examples")
    for path in REPO_ROOT.glob(f"{folder}/**/__init__.py")
)


@pytest.mark.parametrize(
    "name",
    [
        "configuration",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("seventy_billion", "models", "console")
        ),
    ],
)
def test_made_pages_are_up_to_date(name: str) -> None:
    texts = runpy.run_path(str(REPO_ROOT / "docs" / f"make_{name}.py"))["texts"]()
    assert {page: page.read_text() for page in texts} == texts, "run: make docs"


def test_a_large_model_supports_the_claim_of_85_percent_less() -> None:
    page = (REPO_ROOT / "docs/planning.md").read_text()
    saved = [float(share) for share in re.findall(r"\| ([\d.]+)% \|$", page, re.MULTILINE)]
    assert [share >= 85 for share in saved] == [True] * 3


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, in the form of the site and its hosts."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        slugify(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", ""), "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_have_existing_targets(page: str) -> None:
    source = REPO_ROOT / page
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", source.read_text()):
        name, _, anchor = link.partition("#")
        target = source.parent / name if name else source
        if ":" not in name and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_fits_the_site(page: str) -> None:
    blocks = re.findall(
        r"^ *```\w*\n(.*?)^ *```", (REPO_ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


@pytest.fixture(scope="module")
def site() -> Values:
    """Return the names that the site's hook defines."""
    return runpy.run_path(str(REPO_ROOT / "docs" / "site_pages.py"))


def pages_in(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_in(part)]


def test_every_page_is_in_the_navigation_once(site: Values) -> None:
    listed = pages_in(yaml.safe_load((REPO_ROOT / "mkdocs.yml").read_text())["nav"])
    pages = [path.name for path in (REPO_ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted([*pages, *site["OUTSIDE"], site["REFERENCE_PAGE"]])
    files = [page for page in listed if page != site["REFERENCE_PAGE"]]
    assert [page for page in files if not (REPO_ROOT / site["source_of"](page)).is_file()] == []


def test_pages_of_the_site_load_no_external_scripts() -> None:
    """Without this polyfill the offline plug-in makes every page load it from unpkg.com."""
    settings = yaml.safe_load((REPO_ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert any("iframe-worker" in script for script in settings["extra"]["polyfills"])
    files = [*settings["extra"]["polyfills"], *settings["extra_css"]]
    assert [name for name in files if not (REPO_ROOT / "docs" / name).is_file()] == []


def test_the_reference_contains_every_public_name(site: Values) -> None:
    named = set[str]()
    in_modules = set[str]()
    for section in site["reference"]().split("\n## "):
        names = re.findall(r"^::: [\w.]+\.(\w+)$", section, re.MULTILINE)
        (in_modules if "`" in section.partition("\n")[0] else named).update(names)
    # Documented together with its module.
    assert set(hybrid_engine.__all__) - named - in_modules == {"HybridEngineError"}
    assert named <= set(hybrid_engine.__all__)


@pytest.mark.slow
def test_documented_names_of_the_reference_exist(site: Values) -> None:
    for name in re.findall(r"^::: ([\w.]+)$", site["reference"](), re.MULTILINE):
        assert pkgutil.resolve_name(name) is not None


@pytest.mark.slow
def test_the_table_of_abilities_lists_the_duties_of_a_loop() -> None:
    """The table contains no names that an engine lacks."""
    from tests.zoo.abilities import BY_THE_OWNER

    page = (REPO_ROOT / "docs" / "trainers.md").read_text()
    table = page.partition("## Who can what")[2].partition("## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    owners = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    owners = {name: owner for name, owner in owners.items() if name not in hybrid_engine.__all__}
    assert {name for name in owners if not hasattr(hybrid_engine.ActorHybridWorker, name)} == set()
    assert {name for name, owner in owners.items() if owner == "your loop"} == set(BY_THE_OWNER)
    assert [name for name in BY_THE_OWNER if hasattr(hybrid_engine.HybridEngine, name)] == []


@pytest.mark.parametrize(
    ("page", "written", "on_the_site"),
    [
        ("index.md", "[a](docs/gpu.md#what-it-needs)", "[a](gpu.md#what-it-needs)"),
        ("index.md", "![a](docs/plots/reward.svg)", "![a](plots/reward.svg)"),
        ("gpu.md", "[a](../CHANGELOG.md)", "[a](changelog.md)"),
        ("gpu.md", "[a](../examples/gpt_rl)", "[a](example.md)"),
        ("gpu.md", "[a](../examples/gpt_rl/task.py)", "a"),
        ("example.md", "[a](task.py), [b](../../docs/trainers.md)", "a, [b](trainers.md)"),
        (
            "gpu.md",
            "[a](https://arxiv.org/abs/1), [b](#here)",
            "[a](https://arxiv.org/abs/1), [b](#here)",
        ),
    ],
)
def test_links_of_the_site_stay_on_it(
    site: Values, page: str, written: str, on_the_site: str
) -> None:
    assert site["with_links_of_the_site"](written, page) == on_the_site


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_docstring_lists_its_files(package: Path) -> None:
    docstring = (
        ast.get_docstring(ast.parse((REPO_ROOT / package / "__init__.py").read_text())) or ""
    )
    words = set(re.findall(r"\w+", docstring))
    modules = {path.stem for path in (REPO_ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    assert modules - words == set(), "not in the docstring"
    folders = (
        REPO_ROOT / package,
        (REPO_ROOT / package).parent,
        REPO_ROOT / "hybrid_engine",
        REPO_ROOT,
    )
    files = re.findall(r"[\w/]+\.py\b", docstring)
    assert [
        file for file in files if not any((folder / file).exists() for folder in folders)
    ] == [], "do not exist"


@pytest.mark.parametrize(
    "page", ["docs/architecture.md", "docs/models.md", "docs/worker.md", "CONTRIBUTING.md"]
)
def test_files_mentioned_on_a_page_exist(page: str) -> None:
    text = (REPO_ROOT / page).read_text()
    files = set(re.findall(r"[\w./]+/[\w.]+\.py\b", text))
    missing = [
        file
        for file in files
        if not any((REPO_ROOT / top / file).exists() for top in ("", "hybrid_engine"))
    ]
    assert missing == []


def test_the_programs_of_the_readme_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand, with mocks of what downloads a model or needs engines."""
    page = (REPO_ROOT / "README.md").read_text()
    in_one_call, around = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^make \w+", page, re.MULTILINE) == ["make rl", "make test"]
    statements = [line for line in around.splitlines() if re.match(r" *(?!import|from|#)\w", line)]
    assert len(statements) <= 15
    model = mock.MagicMock()
    model.parameters.return_value = [torch.zeros(1, requires_grad=True)]
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: model)
    tokenizer = mock.MagicMock()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: tokenizer)
    engine = mock.create_autospec(hybrid_engine.HybridEngine, instance=True)
    monkeypatch.setattr("hybrid_engine.HybridEngine", mock.Mock(return_value=engine))
    exec(around, {})
    text = tokenizer.return_value.input_ids
    assert model.call_args_list == [mock.call(text, labels=text)] * 4
    assert engine.generate.call_count == 4

    train = mock.create_autospec(hybrid_engine.rl.train)
    monkeypatch.setattr("hybrid_engine.rl.train", train)
    exec(in_one_call, {})
    config_of_model, prompts, reward, config = train.call_args.args
    assert (
        hybrid_engine.HybridConfig.model_validate(config_of_model).actor_config.params_dtype
        == "float32"
    )
    assert config.prompts_per_step <= len(prompts)
    completion = type("Completion", (), {"text": "1 + 2 = 3."})
    assert [reward(prompt, completion) for prompt in prompts[:2]] == [1.0, 0.0]


# Messages of pydantic, vLLM, torch, the driver and the operating system.
BY_OTHERS = (
    "Input should be a valid integer",
    "User-specified max_model_len (",
    "CUDA_ERROR_OUT_OF_MEMORY",
)
BY_OTHERS += ("Torch not compiled with CUDA enabled", "Input should be 'off', ", "False")
BY_OTHERS += (
    ") is greater than the derived max_model_len",
    "no space left on device (",
    "/config.json",
)


def test_messages_of_the_page_about_errors_exist() -> None:
    """Parts between placeholders occur in the sources, whose string literals may span lines."""
    folders = ("hybrid_engine", "megatron_patches", "examples")
    sources = "".join(
        path.read_text() for folder in folders for path in (REPO_ROOT / folder).rglob("*.py")
    )
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    page = (REPO_ROOT / "docs" / "errors.md").read_text()
    tables = page.partition("\n## Messages")[2].partition("\n## ")[0]
    cells = [
        line.split(" | ")[0]
        for line in tables.splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    messages = [message for cell in cells for message in re.findall(r"`((?:\\`|[^`])+)`", cell)]
    assert len(messages) > 40
    missing = [
        part
        for message in messages
        for part in re.split(r"…|: |\. |, in |, found ", message.replace("\\`", "`"))
        if len(part.strip()) > 4 and part.strip(" (),") not in sources and part not in BY_OTHERS
    ]
    assert missing == []


# -- the site in a real browser: mkdocs (requirements-docs.txt) and Chromium on PATH
# --------------------

MISSING_PROGRAMS = [program for program in ("mkdocs", "chromium") if shutil.which(program) is None]
IN_MODE = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--allow-file-access-from-files",
    "--dump-dom",
]
# It looks nothing up on the network, and waits for the page's own scripts.
ALONE = ["--disable-background-networking", "--no-first-run", "--virtual-time-budget=15000"]


def shown(address: str, profile: Path) -> str:
    """Return what a browser makes of a page, once its scripts have run."""
    command = ["chromium", *IN_MODE, *ALONE, f"--user-data-dir={profile}", address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING_PROGRAMS), reason=f"not installed: {', '.join(MISSING_PROGRAMS)}")
def test_links_and_search_of_the_site_work_in_a_browser(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(
        ["mkdocs", "build", "--quiet", "--strict", "--site-dir", site], check=True, cwd=REPO_ROOT
    )
    pages = {
        path.as_uri(): shown(path.as_uri(), tmp_path / "profile")
        for path in sorted(site.rglob("*.html"))
    }
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', dom)) for page, dom in pages.items()}
    links = [
        (page, *urldefrag(link))
        for page, dom in pages.items()
        for href in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', dom)
        if (link := urljoin(page, unescape(href))).startswith(site.as_uri())
    ]
    assert len(links) > 1000
    broken = [
        link
        for link in links
        if link[1] not in pages or (link[2] and unquote(link[2]) not in anchors[link[1]])
    ]
    assert broken == []
    results = shown(f"{(site / 'index.html').as_uri()}?q=offload", tmp_path / "profile")
    assert re.search(r"\b[1-9]\d* matching documents", results)
