"""The task: characters as tokens, problems in JSON lines, and a reward that code checks.

To train on something else, replace the data, `CHARACTERS` and `reward`; nothing else knows what the text means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine.errors import ConfigError, Violation, clipped
from hybrid_engine.files.documents import read_text

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
