"""The task: characters as tokens, problems in JSON lines, and a reward that is computed by code.

For another task, replace the data, `CHARACTERS` and `reward`; nothing else depends on the text. The
rest of this file converts problems and completions for trainer.py and rollouts.py.
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
PADDING = len(CHARACTERS) + 1  # fills the rows of a batch; not part of the loss
VOCAB_SIZE = len(CHARACTERS) + 2


@dataclass(frozen=True)
class Problem:
    """A problem; all texts consist of `CHARACTERS`.

    `demonstration` is a response to imitate in the warm-up. It may be wrong.
    """

    prompt: str
    answer: str
    demonstration: str | None = None


def encode(text: str) -> list[int]:
    """Return the token ids of a text. Raises KeyError with all unknown characters."""
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown:
        raise KeyError(
            f"{text!r} has unknown characters {''.join(unknown)!r}; the tokens are {CHARACTERS!r}"
        )
    return [CHARACTERS.index(character) for character in text]


def encode_response(text: str) -> list[int]:
    """Return the token ids of a response with its end token."""
    return [*encode(text), END]


def decode(token_ids: Sequence[int]) -> str | None:
    """Return the text of a completion, or None if it is unfinished or has special tokens."""
    if not token_ids or token_ids[-1] != END or any(token >= END for token in token_ids[:-1]):
        return None
    return "".join(CHARACTERS[token] for token in token_ids[:-1])


def reward(problem: Problem, token_ids: Sequence[int]) -> float:
    """Return 1 for exactly the right answer, else 0."""
    return float(decode(token_ids) == problem.answer)


def rewards(problems: Sequence[Problem], groups: Sequence[Sequence[Completion]]) -> torch.Tensor:
    """Return rewards [P, n] of n completions for each of P problems."""
    import torch

    rows = []
    for problem, group in zip(problems, groups, strict=True):
        rows.append([reward(problem, completion.token_ids) for completion in group])
    return torch.tensor(rows)


def accuracy(problems: Sequence[Problem], answers: Sequence[Sequence[Completion]]) -> float:
    """Return the share of problems whose first completion is right."""
    pairs = zip(problems, answers, strict=True)
    return fmean(reward(problem, completions[0].token_ids) for problem, completions in pairs)


def demonstrations(problems: Sequence[Problem], seq_length: int) -> dict[str, torch.Tensor]:
    """Return a batch of demonstrations, or of answers for problems without one."""
    from hybrid_engine import build_batch

    responses = [encode_response(problem.demonstration or problem.answer) for problem in problems]
    prompts = [encode(problem.prompt) for problem in problems]
    return build_batch(prompts, responses, seq_length, PADDING)


def load_problems(path: Path) -> list[Problem]:
    """Read problems from a JSON lines file. Raises ConfigError with all invalid lines."""
    problems = []
    violations = []
    text = read_text(path, clipped(str(path)), "Run python -m examples.gpt_rl.make_data")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            problem = Problem(**json.loads(line))
            encode(problem.prompt + problem.answer + (problem.demonstration or ""))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            message = clipped(str(error.args[0] if error.args else error))
            remedy = "Give prompt, answer and optionally demonstration, over the task's characters"
            violations.append(Violation(f"{path}:{number}", message, remedy))
        else:
            problems.append(problem)
    if violations:
        raise ConfigError(violations)
    return problems
