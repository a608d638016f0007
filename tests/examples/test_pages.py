"""Documented programs run unchanged and learn."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import REPO_ROOT, Ranks

ONE_CALL = REPO_ROOT / "examples" / "one_call.py"
LOOP = REPO_ROOT / "examples" / "loop.py"
EXAMPLE = REPO_ROOT / "examples" / "fsdp_engine.py"


def run(out: Path) -> list[float]:
    """Run one_call.py on a rank, in the checkout's root; return rewards by step."""
    names: dict[str, Any] = {}
    exec(compile(ONE_CALL.read_text().replace("runs/even", str(out)), str(ONE_CALL), "exec"), names)
    return [row["reward"] for row in names["rows"]]


def run_loop() -> tuple[list[float], int]:
    """Run loop.py; return rewards and the number of distinct completions."""
    rewards: list[float] = []
    names: dict[str, Any] = {"print": lambda line: rewards.append(float(line.split()[-1]))}
    exec(compile(LOOP.read_text(), str(LOOP), "exec"), names)
    return rewards, len({completion.token_ids for group in names["groups"] for completion in group})


@pytest.mark.slow
def test_rewards_of_the_single_call_grow(engines: Ranks, tmp_path: Path) -> None:
    rewards, others = engines.launch(run, 2, tmp_path / "out")
    assert rewards == others
    assert rewards[-1] > rewards[0] + 0.2


@pytest.mark.slow
def test_rewards_of_the_loop_grow(engines: Ranks) -> None:
    (rewards, num_distinct), others = engines.launch(run_loop, 2)
    assert (rewards, num_distinct) == others
    assert rewards[-1] > rewards[0] + 0.3
    assert num_distinct > 48  # Of 64; equal completions would teach nothing.


def run_page() -> str:
    """Run the page-long example; return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", [str(EXAMPLE)]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return output.getvalue()


def check_page(output: str) -> None:
    rewards = [float(number) for number in re.findall(r"rank 0: step \d, reward (\d\.\d+)", output)]
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0] + 0.05
    assert re.search(r"rank 1: train->infer, [1-9]\d* bytes", output)


@pytest.mark.slow
def test_rewards_of_the_page_grow(engines: Ranks) -> None:
    first, second = engines.launch(run_page, 2)
    check_page(first + second)
    phases = re.findall(r"^(building .*|.*built|model ready|closing .*)", first, re.MULTILINE)
    assert phases == [
        "building the engines on 2 ranks ...",
        "model ready",
        "vLLM TP=2 DP=1 built",
        "closing the engines ...",
    ]
    assert "the engines" not in second


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_the_page_needs_no_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("megatron", "megatron_patches"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise ImportError({package!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    page = tmp_path / "page.py"
    page.write_text(EXAMPLE.read_text().replace("engine.shutdown()", ""))
    result = run_ranks([str(page)], 2, timeout=300)
    assert result.status == 0, result.output
    check_page(result.output)
    assert re.findall("leaked|NUMA binding", result.output) == [], "printed by C++"
    assert "[Reshard] direction=train->infer version=4" in result.output


OWN_TRAINER = REPO_ROOT / "examples" / "own_trainer.py"


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_vllm_follows_the_trainer() -> None:
    result = run_ranks([str(OWN_TRAINER)], 2, timeout=300)
    assert result.status == 0, result.output
    losses = [float(number) for number in re.findall(r"loss (\d\.\d+)", result.output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert "comes [6, 7, 8, 9, 10, 11]" in result.output
    assert "trainer built in " in result.output
