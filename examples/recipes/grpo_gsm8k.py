"""GRPO on grade-school mathematics (GSM8K) with a chat model, from the data to a checkpoint. Not run on GPUs.

    torchrun --nproc-per-node 8 -m examples.recipes.grpo_gsm8k \
        --config examples/recipes/qwen2.5_0.5b_gsm8k.yaml --data train.jsonl --out runs/gsm8k

The data are JSON lines with `question` and `answer`, as GSM8K is published: an answer ends in "#### 72".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from examples.gpt_rl.grpo import group_advantages, policy_loss
from hybrid_engine import ActorHybridWorker, Completion, ReferenceModel, Sampling, build_batch, load_config

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


def reward(problem: Problem, completion: Completion) -> float:
    """Return 1 for the right number, 0 for a wrong one or none."""
    return float(number_in(completion.text) == problem.answer)


def batch_of(groups: Sequence[Sequence[Completion]], rewards: torch.Tensor, seq_length: int) -> dict[str, torch.Tensor]:
    """Return rows of prompt and completion, and their advantages: rewards [P, n] normalised within each group."""
    rows = [completion for group in groups for completion in group]
    batch = build_batch([row.prompt_token_ids for row in rows], rows, seq_length)
    return {**batch, "advantages": group_advantages(rewards).flatten()}


def step(
    worker: ActorHybridWorker,
    reference: ReferenceModel,
    problems: Sequence[Problem],
    number: int,
    options: argparse.Namespace,
) -> Mapping[str, float]:
    """Sample completions of some problems, score them, and take one optimizer step; return what happened."""
    chats = [[{"role": "user", "content": problem.question + INSTRUCTION}] for problem in problems]
    sampling = Sampling(n=options.samples, max_tokens=options.max_tokens, temperature=1.0, seed=number)
    with worker.rollout_context():
        groups = worker.generate_sequences(chats, sampling)
    rewards = torch.tensor(
        [[reward(problem, one) for one in group] for problem, group in zip(problems, groups, strict=True)]
    )
    batch = batch_of(groups, rewards, worker.config.actor_config.seq_length)
    with worker.train_context():
        batch["ref_log_probs"] = reference.compute_log_probs(batch)
        batch["old_log_probs"] = worker.compute_log_probs(batch)
        report = worker.update(batch, policy_loss(clip_ratio=0.2, kl_coefficient=1e-3))
    return {"reward": rewards.mean().item(), **report}


def main() -> None:
    """Train, print a line per step, and write a Hugging Face checkpoint now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="gets step-N, every --save-every steps")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--problems", type=int, default=128, help="sampled in each step")
    parser.add_argument("--samples", type=int, default=8, help="completions of each")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a completion")
    options = parser.parse_args()
    config, problems = load_config(options.config, int(os.environ["WORLD_SIZE"])), read_problems(options.data)
    with ActorHybridWorker(config) as worker:
        reference = ReferenceModel(worker)
        for number in range(1, options.steps + 1):
            chosen = random.Random(number).sample(problems, options.problems)  # the same on all ranks
            found = step(worker, reference, chosen, number, options)
            if worker.rank == 0:
                print(
                    f"step {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True
                )
            if number % options.save_every == 0 or number == options.steps:
                with worker.train_context():
                    worker.save_hf_checkpoint(options.out / f"step-{number}")


if __name__ == "__main__":
    main()
