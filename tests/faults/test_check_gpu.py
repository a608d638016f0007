"""`check-gpu --device cpu` as a whole: minutes, for stage 2 builds both engines and a vLLM of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.engines]

SHORTAGES = ("weights", "weights half-way", "KV cache")


def test_all_is_green_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--device", "cpu", "--budget", "540", "--json", str(path)]
    command = [sys.executable, "-m", "hybrid_engine", "check-gpu", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=570)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _, engines = json.loads(path.read_text())["stages"]
    colours = {check["name"]: check["colour"] for check in engines["checks"]}
    assert colours.pop("with CUDA graphs") == "left out"
    assert {name for name, colour in colours.items() if colour != "green"} == set()
    assert {"eager: all weights compared in the switch", "eager: completions as of a fresh vLLM"} < set(colours)
    assert {f"eager: failed wake-up, {what}: the next switch" for what in SHORTAGES} < set(colours)
    assert {"eager: shut down asleep: nothing is left", "eager: built again"} < set(colours)
