"""GRPO on grade-school mathematics (GSM8K) with a chat model, from the data to a checkpoint. Not run on GPUs.

    torchrun --nproc-per-node 8 -m examples.recipes.grpo_gsm8k \
        --config examples/recipes/qwen2.5_0.5b_gsm8k.yaml --data train.jsonl --out runs/gsm8k

The data are JSON lines with `question` and `answer`, as GSM8K is published: an answer ends in "#### 72".
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_engine import Completion
from hybrid_engine.rl import GrpoConfig, train

INSTRUCTION = "\nThink step by step, and end with a line of four hashes and the number: #### 42"
_NUMBER = re.compile(r"####\s*(-?\d[\d,]*(?:\.\d+)?)")


class Problem(NamedTuple):
    """A question, and the number that answers it."""

    question: str
    answer: float


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a file of JSON lines. Raises ValueError naming the first line without an answer."""
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        if (answer := number_in(row["answer"])) is None:
            raise ValueError(f"{path}, line {number}: the answer does not end in '#### number'")
        problems.append(Problem(row["question"], answer))
    return problems


def number_in(text: str) -> float | None:
    """Return the last number that follows four hashes, or None."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def prompt_of(problem: Problem) -> dict[str, Any]:
    """Return a chat that asks for the answer, and the answer, which the reward reads."""
    return {"prompt": [{"role": "user", "content": problem.question + INSTRUCTION}], "answer": problem.answer}


def reward(prompt: Mapping[str, Any], completion: Completion) -> float:
    """Return 1 for the right number, 0 for a wrong one or none."""
    return float(number_in(completion.text) == prompt["answer"])


def main() -> None:
    """Train, and print a line per step; the same command goes on where it was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="gets metrics, checkpoints and, in the end, the model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--problems", type=int, default=128, help="sampled in each step")
    parser.add_argument("--samples", type=int, default=8, help="completions of each")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a completion")
    options = parser.parse_args()
    config = GrpoConfig(
        steps=options.steps,
        save_every=options.save_every,
        prompts_per_step=options.problems,
        samples_per_prompt=options.samples,
        max_tokens=options.max_tokens,
        kl_coefficient=1e-3,
    )
    train(options.config, list(map(prompt_of, read_problems(options.data))), reward, config, out=options.out)


if __name__ == "__main__":
    main()
