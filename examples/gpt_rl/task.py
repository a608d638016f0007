"""The task: characters as tokens, problems in JSON lines, and a reward that code checks.

To train on something else, replace the data, `CHARACTERS` and `reward`; nothing else knows what the text means. The
rest of this file is what both ways to train, trainer.py and rollouts.py, make of problems and completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from hybrid_engine.errors import ConfigError, Violation, clipped
from hybrid_engine.files.documents import read_text

if TYPE_CHECKING:  # settings are checked without torch
    import torch

    from hybrid_engine import Completion

CHARACTERS = "0123456789+="
END = len(CHARACTERS)  # ends a completion
PADDING = len(CHARACTERS) + 1  # fills rows of a batch up; no loss is taken there
VOCAB_SIZE = len(CHARACTERS) + 2


@dataclass(frozen=True)
class Problem:
    """A prompt, the right answer and, for the warm-up, a response to imitate, which may be wrong.

    `prompt`, `answer` and `demonstration` are text over `CHARACTERS`.
    """

    prompt: str
    answer: str
    demonstration: str | None = None


def encode(text: str) -> list[int]:
    """Return the token ids of a text. Raises KeyError naming every unknown character."""
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown:
        raise KeyError(f"{text!r} has unknown characters {''.join(unknown)!r}; the tokens are {CHARACTERS!r}")
    return [CHARACTERS.index(character) for character in text]


def encode_response(text: str) -> list[int]:
    """Token ids of a response, with the end token."""
    return [*encode(text), END]


def decode(token_ids: Sequence[int]) -> str | None:
    """Return the text of a completion, or None if it is unfinished or has tokens that are not characters."""
    if not token_ids or token_ids[-1] != END or any(token >= END for token in token_ids[:-1]):
        return None
    return "".join(CHARACTERS[token] for token in token_ids[:-1])


def reward(problem: Problem, token_ids: Sequence[int]) -> float:
    """1 for exactly the right answer, else 0."""
    return float(decode(token_ids) == problem.answer)


def rewards(problems: Sequence[Problem], groups: Sequence[Sequence[Completion]]) -> torch.Tensor:
    """Rewards [P, n] of a group of completions for each problem."""
    import torch

    pairs = zip(problems, groups, strict=True)
    return torch.tensor([[reward(problem, one.token_ids) for one in group] for problem, group in pairs])


def accuracy(problems: Sequence[Problem], answers: Sequence[Sequence[Completion]]) -> float:
    """Share of problems whose first completion is right."""
    return fmean(reward(problem, one[0].token_ids) for problem, one in zip(problems, answers, strict=True))


def demonstrations(problems: Sequence[Problem], seq_length: int) -> dict[str, torch.Tensor]:
    """A batch to imitate."""
    from hybrid_engine import build_batch

    responses = [encode_response(problem.demonstration or problem.answer) for problem in problems]
    return build_batch([encode(problem.prompt) for problem in problems], responses, seq_length, PADDING)


def load_problems(path: Path) -> list[Problem]:
    """Problems of a JSON lines file. Raises ConfigError naming every line that is none."""
    problems, violations = [], []
    text = read_text(path, clipped(str(path)), "Run python -m examples.gpt_rl.make_data")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            problem = Problem(**json.loads(line))
            encode(problem.prompt + problem.answer + (problem.demonstration or ""))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            remedy = "Give prompt, answer and perhaps demonstration, over the task's characters"
            violations.append(
                Violation(f"{path}:{number}", clipped(str(error.args[0] if error.args else error)), remedy)
            )
        else:
            problems.append(problem)
    if violations:
        raise ConfigError(violations)
    return problems
