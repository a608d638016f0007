"""GRPO on grade-school mathematics (GSM8K) with a chat model. Not run on GPUs.

    hybrid-engine run --nproc-per-node 8 -m examples.recipes.grpo_gsm8k \
        --config examples/recipes/qwen2.5_0.5b_gsm8k.yaml --data train.jsonl --out runs/gsm8k

The data are the JSON lines of GSM8K, with `question` and `answer`, which ends in "#### 72".
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
    """A question and its numeric answer."""

    question: str
    answer: float


def read_problems(path: Path) -> list[Problem]:
    """Read problems from JSON lines. Raises ValueError for a line without an answer."""
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        answer = number_in(row["answer"])
        if answer is None:
            raise ValueError(f"{path}, line {number}: the answer does not end in '#### number'")
        problems.append(Problem(row["question"], answer))
    return problems


def number_in(text: str) -> float | None:
    """Return the last number that follows four hashes, or None."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def prompt_of(problem: Problem) -> dict[str, Any]:
    """Return a chat with the question, and the answer for `reward`."""
    return {
        "prompt": [{"role": "user", "content": problem.question + INSTRUCTION}],
        "answer": problem.answer,
    }


def reward(prompt: Mapping[str, Any], completion: Completion) -> float:
    """Return 1 for the right number, else 0."""
    return float(number_in(completion.text) == prompt["answer"])


def main() -> None:
    """Train; the same command resumes a stopped run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="directory of metrics, checkpoints and the final model",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--problems", type=int, default=128, help="problems per step")
    parser.add_argument("--samples", type=int, default=8, help="completions per problem")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest completion")
    options = parser.parse_args()
    config = GrpoConfig(
        steps=options.steps,
        save_every=options.save_every,
        prompts_per_step=options.problems,
        samples_per_prompt=options.samples,
        max_tokens=options.max_tokens,
        kl_coefficient=1e-3,
    )
    prompts = [prompt_of(problem) for problem in read_problems(options.data)]
    train(options.config, prompts, reward, config, out=options.out)


if __name__ == "__main__":
    main()
