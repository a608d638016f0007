"""Rewards by name, for prompts that have the right answer under "answer".

    exact_answer    the answer itself: as a number, or as a text
    math            an equal expression, by math-verify

In an answer, and in a completion for `exact_answer`, only what follows the last four hashes counts,
if there are any, as in GSM8K: "... #### 72".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_engine.errors import DependencyError

_MARK = "####"
_TIMEOUT_SECONDS = 5
"""Longest time for an expression, which a completion may make hard to read or to compare."""


def exact_answer(prompt: Mapping[str, Any], completion: Any) -> float:
    """Return 1 if a completion ends in the answer of its prompt, else 0."""
    return float(_value_of(completion.text) == _value_of(str(prompt["answer"])))


def math(prompt: Mapping[str, Any], completion: Any) -> float:
    """Return 1 if the last expression of a completion equals the answer of its prompt, else 0.

    Raises DependencyError without math-verify.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise DependencyError(
            "the reward math needs math-verify: pip install '.[data]'", code="needs-package"
        ) from error
    # math-verify interrupts by a signal, which only the main thread gets.
    is_main = threading.current_thread() is threading.main_thread()
    seconds = _TIMEOUT_SECONDS if is_main else None
    answer = parse(f"${_final_part(str(prompt['answer']))}$", parsing_timeout=seconds)
    drawn = parse(completion.text, parsing_timeout=seconds)
    return float(verify(answer, drawn, timeout_seconds=seconds))


def _final_part(text: str) -> str:
    return text.rpartition(_MARK)[2].strip()


def _value_of(text: str) -> float | str:
    final = _final_part(text).replace(",", "").rstrip(".")
    try:
        return float(final)
    except ValueError:
        return final.casefold()


REWARDS: dict[str, Callable[[Mapping[str, Any], Any], float]] = {
    "exact_answer": exact_answer,
    "math": math,
}
"""Rewards that a file can name."""
