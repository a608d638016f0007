"""The trainer of one's own learns, and vLLM counts with its weights; every switch is verified bit by bit."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hybrid_engine.ranks.launching import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_trainer.py"
MOST_LINES = 40


@pytest.mark.engines
@pytest.mark.slow
def test_vllm_follows_the_trainer() -> None:
    ended = run_ranks([str(EXAMPLE)], 2, timeout=300)
    assert ended.status == 0, ended.output
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", ended.output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert "comes [6, 7, 8, 9, 10, 11]" in ended.output


def test_it_is_short() -> None:
    (trainer,) = [node for node in ast.parse(EXAMPLE.read_text()).body if isinstance(node, ast.ClassDef)]
    assert trainer.end_lineno - trainer.lineno < MOST_LINES
