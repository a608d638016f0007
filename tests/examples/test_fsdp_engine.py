"""The page-long example runs as it stands and learns."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hybrid_engine.ranks.launching import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp_engine.py"
MOST_LINES = 60


@pytest.mark.engines
@pytest.mark.slow
def test_rewards_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither Megatron nor its patches can be imported."""
    for package in ("megatron", "megatron_patches"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ImportError({package!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ended = run_ranks([str(EXAMPLE)], 2, timeout=300)
    assert ended.status == 0, ended.output
    rewards = [float(found) for found in re.findall(r"rank 0: step \d, reward (\d\.\d+)", ended.output)]
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0] + 0.05
    assert re.search(r"rank 1: train->infer, [1-9]\d* bytes", ended.output)
    assert "[Reshard] direction=train->infer version=4" in ended.output


def test_it_is_a_page_long() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MOST_LINES
