"""When an engine calls near the end of a rollout, with a fake of vLLM's engine that answers step by step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybrid_engine.backends.vllm.requests import calling_near_end
from hybrid_engine.ports import NearEnd


class Engine:
    """Every step ends as many requests as the next number says."""

    def __init__(self, *ending: int) -> None:
        self._ending = list(ending)
        self.log: list[str] = []

    def get_num_unfinished_requests(self) -> int:
        return sum(self._ending)

    def step(self) -> int:
        self.log.append("step")
        return self._ending.pop(0)

    def generate(self, near_end: NearEnd | None) -> list[str]:
        """As `InferenceEngine._run` does."""
        with calling_near_end(SimpleNamespace(llm_engine=self), near_end):
            while self._ending:
                self.step()
        return self.log


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, ["step", "step", "step", "call"]),
        (0.1, ["step", "step", "call", "step"]),
        (0.5, ["step", "call", "step", "step"]),
        (1.0, ["call", "step", "step", "step"]),
    ],
)
def test_it_calls_once_when_few_enough_are_left(share: float, expected: list[str]) -> None:
    engine = Engine(5, 4, 1)
    assert engine.generate(NearEnd(share, lambda: engine.log.append("call"))) == expected
    assert "step" not in vars(engine)


def test_a_replica_without_prompts_calls_at_once() -> None:
    engine = Engine()
    assert engine.generate(NearEnd(0.1, lambda: engine.log.append("call"))) == ["call"]


def test_without_it_nothing_is_watched() -> None:
    assert Engine(1, 1).generate(None) == ["step", "step"]


def test_what_it_raises_ends_the_rollout() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    engine = Engine(2, 1)
    with pytest.raises(ZeroDivisionError):
        engine.generate(NearEnd(0.5, fail))
    assert engine.log == ["step"]
    assert "step" not in vars(engine)
