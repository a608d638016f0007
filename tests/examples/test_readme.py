"""The code of README.md runs as it stands, and learns."""

from __future__ import annotations

import re

import pytest

from tests.harness.launch import REPO_ROOT, Ranks

CODE = re.search(r"```python\n(.*?)```", (REPO_ROOT / "README.md").read_text(), re.DOTALL)[1]
MOST_LINES = 35


def run() -> list[float]:
    """On a rank, in the root of the checkout: the rewards, by step."""
    rewards: list[float] = []
    exec(compile(CODE, "README.md", "exec"), {"print": lambda line: rewards.append(float(line.split()[-1]))})
    return rewards


@pytest.mark.slow
def test_rewards_grow(engines: Ranks) -> None:
    rewards, others = engines.launch(run, 2)
    assert rewards == others
    assert rewards[-1] > rewards[0] + 0.3


def test_it_is_short() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) <= MOST_LINES
