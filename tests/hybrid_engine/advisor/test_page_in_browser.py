"""The page as a browser shows it: at two widths, for few and many ranks, light and dark, by mouse and keys."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.advisor.cluster_plan import Cluster, plan_job
from hybrid_engine.advisor.facts import Answer, PlanningCost
from hybrid_engine.advisor.page import page_of
from hybrid_engine.advisor.sizes_text import parse_job
from hybrid_engine.advisor.trainers import Megatron
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.models import table_for
from tests.zoo.published_configs import LLAMA_3_8B

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
JOBS = {8: ("tp=4,dp=2", "tp=2"), 2048: ("tp=8,pp=16,dp=16", "tp=4")}
WIDTHS = (1440, 420)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is here; apt-get install chromium"
)


def page(num_ranks: int) -> str:
    table = table_for(LLAMA_3_8B)
    train, infer = parse_job(*JOBS[num_ranks], table)
    assert isinstance(train, TrainParallelism)
    assert train.world_size == num_ranks
    job = plan_job(table, Megatron(train), infer, Cluster(), order="sequential")
    return page_of(Answer(job, PlanningCost(seconds=0.0, peak_memory=0)), f"Llama 3: {', '.join(JOBS[num_ranks])}")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, str], Any]:
    """By number of ranks, width and scheme. One start of the browser, in which each is a frame."""
    directory = tmp_path_factory.mktemp("pages")
    shown = [(ranks, width, scheme) for ranks in JOBS for width in WIDTHS for scheme in ("light", "dark")]
    for ranks in JOBS:
        (directory / f"{ranks}.html").write_text(page(ranks))
    frames = "".join(
        f'<iframe src="{ranks}.html" style="width: {width}px; height: 900px; border: 0; color-scheme: {scheme}">'
        "</iframe>"
        for ranks, width, scheme in shown
    )
    script = (Path(__file__).parent / "measure_pages.js").read_text()
    (directory / "frames.html").write_text(f"<!DOCTYPE html>{frames}<pre id=found></pre><script>{script}</script>")
    options = ("--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--window-size=1600,1000")
    ended = subprocess.run(
        [str(BROWSER), "--headless", *options, "--dump-dom", (directory / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', ended.stdout, re.DOTALL)
    assert found, f"nothing was measured: {ended.stderr[-2000:]}"
    return dict(zip(shown, json.loads(html.unescape(found[1])), strict=True))


def test_nothing_is_wider_than_the_window_or_in_front_of_something(measured: dict[tuple[int, int, str], Any]) -> None:
    for key, found in measured.items():
        assert found["contentWidth"] <= found["width"] == key[1], key
        assert found["overlappingBlocks"] == 0, key
        assert found["overlappingTexts"] == 0, key
        assert found["picture"]["width"] > 0.4 * key[1], key


def test_texts_can_be_read(measured: dict[tuple[int, int, str], Any]) -> None:
    for key, found in measured.items():
        assert min(found["fontSizes"]) >= 12, key
        assert found["contrast"] >= 4.5, key
    grounds = {scheme: found["ground"] for (_, _, scheme), found in measured.items()}
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}


def test_verdict_and_picture_come_first(measured: dict[tuple[int, int, str], Any]) -> None:
    for (ranks, width, _), found in measured.items():
        assert found["headings"][0] == "Who holds what"
        assert found["headings"][-1] == "Numbers"
        assert ("Who sends to whom" in found["headings"]) == (ranks > 8)
        assert found["picture"]["top"] < (400 if width > 1000 else 650)
        if width > 1000:
            assert found["picture"]["drawn"] <= found["picture"]["width"], "all columns without scrolling"


def test_a_place_is_reached_by_keys_and_by_touch(measured: dict[tuple[int, int, str], Any]) -> None:
    for (ranks, width, scheme), found in measured.items():
        first, below, right, touched = found["said"]
        assert found["focused"], (ranks, width, scheme)
        assert touched == first
        rows = ["layers 0-31", "norm and head"] if ranks == 8 else ["layers 0-1", "layers 2-3"]
        columns = ("2 ranks: 0, 4", "2 ranks: 1, 5") if ranks == 8 else ("128 ranks: 0-127", "128 ranks: 128-255")
        assert first.startswith(f"{columns[0]} · embedding\ntraining: ")
        assert below.startswith(f"{columns[0]} · {rows[0]}\ntraining: ")
        assert right.startswith(f"{columns[1]} · {rows[0]}\n")
        assert "there already: " in below
