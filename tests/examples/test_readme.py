"""The code of README.md runs as it stands, and learns."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.harness.launch import REPO_ROOT, Ranks

CODE = re.search(r"```python\n(.*?)```", (REPO_ROOT / "README.md").read_text(), re.DOTALL)[1]
MOST_LINES = 25


def run() -> tuple[list[float], int]:
    """On a rank, in the root of the checkout: the rewards, by step, and how many completions of the last one differ."""
    rewards: list[float] = []
    names: dict[str, Any] = {"print": lambda line: rewards.append(float(line.split()[-1]))}
    exec(compile(CODE, "README.md", "exec"), names)
    return rewards, len({one.token_ids for group in names["groups"] for one in group})


@pytest.mark.slow
def test_rewards_grow(engines: Ranks) -> None:
    (rewards, num_distinct), others = engines.launch(run, 2)
    assert (rewards, num_distinct) == others
    assert rewards[-1] > rewards[0] + 0.3
    assert num_distinct > 48  # of 64: equal ones would teach nothing


def test_it_is_short() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) <= MOST_LINES
