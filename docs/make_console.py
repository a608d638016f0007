"""Puts the output of its commands into every console block of the pages.

    python docs/make_console.py             # as `make docs` does
    python docs/make_console.py --record    # also blocks under a line "Recorded on ...:"

A block has commands after `$ `, and what they print, errors included. Commands run in a folder with
the checkout's files and the programs of the README, in order, offline; Hub ids are found in a cache
with config.json files of tests/zoo, and with what is in the user's. Those that take minutes are
recorded, and their line gets date and machine.

Run `make docs` after a change of what a command prints; a test compares.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from tests.zoo.published_configs import LLAMA_3_70B, QWEN3_8B, QWEN3_30B_A3B

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(^Recorded on [^\n]*:\n\n)?^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*<<'END'\n(?s:.*?)\nEND|(?:.*\\\n)*.*)\n", re.MULTILINE)
PROGRAM = re.compile(r"^```python\n(# (\w+\.py), .*?)^```", re.MULTILINE | re.DOTALL)
HUB = {
    "meta-llama/Meta-Llama-3-70B": LLAMA_3_70B,
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
}
WIDTH = 88
"""Characters of a line, which the site shows without a scroll bar; longer lines are wrapped."""


def texts(pages: list[Path] = PAGES, *, record: bool = False) -> dict[Path, str]:
    """Return the pages with what their commands print now. `record`: also those that take long."""
    with _environment() as environment:
        shown = partial(_shown, environment=environment, record=record)
        return {page: BLOCK.sub(shown, page.read_text()) for page in pages}


def _shown(block: re.Match[str], environment: dict[str, str], record: bool) -> str:
    marked, content = block.groups()
    if marked and not record:
        return block[0]
    if marked:
        day = f"{datetime.now(UTC):%d %B %Y}".lstrip("0")
        marked = f"Recorded on {os.cpu_count()} cores ({_processor()}), {day}:\n\n"
    parts = [
        f"$ {command}\n{_output_of(command, environment)}" for command in COMMAND.findall(content)
    ]
    return f"{marked or ''}```console\n{''.join(parts)}```"


def _output_of(command: str, environment: dict[str, str]) -> str:
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=environment["HOME"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed = ended.stdout.replace(f"{environment['HOME']}/", "")
    lines = (textwrap.wrap(line, WIDTH) or [""] for line in printed.splitlines())
    return "".join(f"{part}\n" for parts in lines for part in parts)


@contextmanager
def _environment() -> Iterator[dict[str, str]]:
    """Yield variables for commands whose folder, `HOME`, has the files of the checkout."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        programs = {name: text for text, name in PROGRAM.findall((ROOT / "README.md").read_text())}
        for path in ROOT.iterdir():
            if path.name not in (*programs, "runs"):
                (home / path.name).symlink_to(path)
        for name, config in HUB.items():
            repository = home / "hub" / f"models--{name.replace('/', '--')}"
            snapshot = repository / "snapshots" / "0" / "config.json"
            snapshot.parent.mkdir(parents=True)
            snapshot.write_text(json.dumps(config))
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text("0")
        for repository in Path(HF_HUB_CACHE).glob("models--*"):
            if repository.name not in os.listdir(home / "hub"):
                (home / "hub" / repository.name).symlink_to(repository)
        for name, text in programs.items():
            (home / name).write_text(text)
        yield {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHON_ENV": sys.prefix,
            "HOME": directory,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": str(WIDTH),
            "OMP_NUM_THREADS": "1",
        }


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else "unknown"


if __name__ == "__main__":
    for page, text in texts(record="--record" in sys.argv).items():
        page.write_text(text)
