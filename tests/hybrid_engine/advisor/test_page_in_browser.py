"""The page as a browser lays it out: at two widths, for few and many ranks."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hybrid_engine.advisor.cluster_plan import plan_job
from hybrid_engine.advisor.facts import Answer, PlanningCost
from hybrid_engine.advisor.page import page_of
from hybrid_engine.config import load_config
from tests.zoo.families import write_config
from tests.zoo.published_configs import LLAMA_3_8B

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
JOBS = {8: (4, 1), 2048: (8, 16)}
WIDTHS = (1440, 420)
MEASURE = """
const found = frame => {
  const { documentElement: root, defaultView: view } = frame.contentDocument;
  const bars = [...root.querySelectorAll(".picture td")].map(cell => view.getComputedStyle(cell).backgroundSize);
  return [root.scrollWidth, new Set(bars).size, root.querySelector(".picture").getBoundingClientRect().top];
};
const write = () => {
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(found));
};
addEventListener("load", write);
"""


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is here; apt-get install chromium")
def test_pages_fit_the_window_and_draw_bars(tmp_path: Path) -> None:
    """The picture comes first, with bars of several heights; what is too wide scrolls inside the page."""
    model = {"model": str(write_config(tmp_path, LLAMA_3_8B)), "generate_config": {"infer_tensor_parallel_size": 2}}
    for ranks, (tp, pp) in JOBS.items():
        actor = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        config = load_config({**model, "actor_config": actor}, ranks, own_weights=True)
        answer = Answer(plan_job(config, ranks), PlanningCost(seconds=0.0, peak_memory=0))
        (tmp_path / f"{ranks}.html").write_text(page_of(answer, f"{ranks} ranks"))
    shown = [(ranks, width) for ranks in JOBS for width in WIDTHS]
    frames = "".join(
        f'<iframe src="{ranks}.html" style="width: {width}px; border: 0"></iframe>' for ranks, width in shown
    )
    (tmp_path / "frames.html").write_text(f"<!DOCTYPE html>{frames}<pre id=found></pre><script>{MEASURE}</script>")
    options = ("--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--window-size=1600,1000")
    ended = subprocess.run(
        [str(BROWSER), "--headless", *options, "--dump-dom", (tmp_path / "frames.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', ended.stdout, re.DOTALL)
    assert found, f"nothing was measured: {ended.stderr[-2000:]}"
    for (ranks, width), (content, heights, top) in zip(shown, json.loads(html.unescape(found[1])), strict=True):
        assert content <= width, (ranks, width)
        assert heights > 2, (ranks, width)
        assert top < (400 if width > 1000 else 700), (ranks, width)
