"""Writes the problems: python -m examples.gpt_rl.make_data

Sums of two numbers from 0 to 99, such as "07+35=" with the answer "042". Training and held-out
problems are disjoint. Every training problem has a demonstration by a pupil who usually forgets to
carry (042 becomes 032). A model that imitates the pupil makes the same mistake, but sometimes
samples the right answer, which the reward reinforces. The same seed gives the same files.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from examples.gpt_rl.task import Problem

LIMIT = 100  # operands are smaller
NUM_HELD_OUT = 256
NUM_TRAIN = 4096
FORGETS_TO_CARRY = 0.7  # share of demonstrations
SEED = 2026


def make_problems(seed: int = SEED) -> dict[str, list[Problem]]:
    """Return the problems of each file."""
    generator = random.Random(seed)
    pairs = [(left, right) for left in range(LIMIT) for right in range(LIMIT)]
    generator.shuffle(pairs)
    held_out = pairs[:NUM_HELD_OUT]
    train = pairs[NUM_HELD_OUT : NUM_HELD_OUT + NUM_TRAIN]
    return {
        "train.jsonl": [_demonstrated(left, right, generator) for left, right in train],
        "held_out.jsonl": [_problem(left, right) for left, right in held_out],
    }


def sum_without_carry(left: int, right: int) -> int:
    """Add each column modulo 10: 17 + 25 is 32."""
    return (left // 10 + right // 10) % 10 * 10 + (left + right) % 10


def to_json_lines(problems: Sequence[Problem]) -> str:
    """Format an object per line, without fields that are None."""
    lines = ""
    for problem in problems:
        fields = dataclasses.asdict(problem)
        given = {name: text for name, text in fields.items() if text is not None}
        lines += json.dumps(given) + "\n"
    return lines


def _problem(left: int, right: int, demonstration: str | None = None) -> Problem:
    return Problem(f"{left:02d}+{right:02d}=", f"{left + right:03d}", demonstration)


def _demonstrated(left: int, right: int, generator: random.Random) -> Problem:
    forgets = generator.random() < FORGETS_TO_CARRY
    answer = sum_without_carry(left, right) if forgets else left + right
    return _problem(left, right, f"{answer:03d}")


def main(
    directory: Annotated[Path, typer.Option(help="Output directory.")] = Path(__file__).parent
    / "data",
) -> None:
    """Write train.jsonl and held_out.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, problems in make_problems().items():
        (directory / name).write_text(to_json_lines(problems))
        print(f"{directory / name}: {len(problems)} problems")


if __name__ == "__main__":
    typer.run(main)
