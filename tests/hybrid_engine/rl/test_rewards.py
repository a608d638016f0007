"""Rewards by several functions: weights, retries, completions that are left out, penalties for
length.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.errors import ArgumentError, ConfigError
from hybrid_engine.rl import BatchReward, GrpoConfig
from hybrid_engine.rl import rewards as rewards_module
from hybrid_engine.rl.losses import token_advantages
from hybrid_engine.rl.rewards import RewardFunctions, Rewards, Scores, reward_violations
from tests.harness.errors import has_violation
from tests.hybrid_engine.rl.stand_ins import ALONE

GROUPS = [["a", "bb"], ["ccc", "dddd"]]
PROMPTS = ["p", "q"]


def completions(texts: list[list[str]] = GROUPS) -> list[list[Any]]:
    return [
        [SimpleNamespace(text=text, token_ids=[0] * len(text)) for text in group] for group in texts
    ]


def compute(rewards: Rewards, groups: list[list[Any]] | None = None, **settings: Any) -> Scores:
    functions = RewardFunctions(rewards, GrpoConfig(max_tokens=4, **settings))
    return functions.compute(ALONE, [0, 1], PROMPTS, completions() if groups is None else groups)


def length(prompt: str, completion: Any) -> float:
    return float(len(completion.text))


async def is_long(prompt: str, completion: Any) -> bool | None:
    return None if prompt == "p" else len(completion.text) > 3


def test_several_functions_have_weights_and_columns() -> None:
    scores = compute([length, is_long], reward_weights={"is_long": 10})
    assert scores.totals.tolist() == [[1, 2], [3, 14]]
    assert scores.figures() == {"reward_length": 2.5, "reward_is_long": 0.5}
    named = compute({"tokens": length, "long": is_long}, reward_weights={"tokens": 0})
    assert named.totals.tolist() == [[0, 0], [0, 1]]
    assert named.figures().keys() == {"reward_tokens", "reward_long"}


def test_a_function_of_the_batch_is_called_once() -> None:
    calls = []

    def lengths(prompts: list[Any], batch: list[Any]) -> torch.Tensor:
        calls.append(prompts)
        return torch.tensor([len(completion.text) for completion in batch])

    for on_all_ranks in (False, True):
        scores = compute(BatchReward(lengths, on_all_ranks))
        assert scores.totals.tolist() == [[1, 2], [3, 4]]
        assert (scores.by_name, scores.figures()) == ({}, {})
    assert calls == [["p", "p", "q", "q"]] * 2
    with pytest.raises(
        ArgumentError, check=has_violation("reward", "wrong-length", "4 completions")
    ):
        compute(BatchReward(lambda prompts, batch: [1.0]))


@pytest.mark.parametrize(
    "returned", [dict.fromkeys(range(4), 1.0), set(range(4)), bytes(4), "four"]
)
def test_rewards_without_an_order_are_refused(returned: Any) -> None:
    kind = f"a {type(returned).__name__} of 4"
    with pytest.raises(ArgumentError, check=has_violation("reward", "wrong-length", kind)):
        compute(BatchReward(lambda prompts, batch: returned))


@pytest.mark.parametrize("other", [1e18, -1e18, 0.0])
def test_sums_are_bounded_as_rewards_are(other: float) -> None:
    """In float32 the sums would be infinite, or NaN, which means that a completion is left out."""
    rewards: Any = {"large": lambda *_: 1e18, "other": lambda *_: other}
    beyond = has_violation("sum by reward_weights", "invalid-reward", "completion 0; 4 of 4")
    with pytest.raises(ArgumentError, check=beyond):
        compute(rewards, reward_weights={"large": 1e18, "other": 1e17})
    assert compute(rewards, reward_weights={"large": 0.5, "other": 0.5}).totals.isfinite().all()
    with pytest.raises(ConfigError):
        GrpoConfig(reward_weights={"large": 1e300})


def test_a_completion_without_any_reward_is_refused() -> None:
    none = has_violation(
        "reward", "invalid-reward", "prompt 0, completion 0; prompt 0, completion 1"
    )
    with pytest.raises(ArgumentError, check=none):
        compute({"first": is_long, "second": is_long})
    with pytest.raises(ArgumentError, check=has_violation("reward", "invalid-reward", "2 of 4")):
        compute(is_long)


class Unreliable:
    """A reward that fails the first times, and always for one completion."""

    def __init__(self, failures: int, hopeless: str = "") -> None:
        self.failures = failures
        self.hopeless = hopeless

    def __call__(self, prompt: str, completion: Any) -> float:
        if completion.text == self.hopeless or self.failures > 0:
            self.failures -= 1
            raise ConnectionError("the judge is away")
        return length(prompt, completion)

    async def later(self, prompt: str, completion: Any) -> float:
        return self(prompt, completion)


AWAY = has_violation(
    "reward", "callback-failed", "a call with", "the judge is away", f"by {__file__}:"
)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_reward_that_fails_is_called_again(
    is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(reward: Unreliable) -> Any:
        return reward.later if is_awaited else reward

    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    # The names of this module, because threads of other tests look up `time.sleep`, too.
    monkeypatch.setattr(rewards_module, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(rewards_module, "asyncio", SimpleNamespace(sleep=pause))
    assert compute(function(Unreliable(3)), reward_retries=3).totals.tolist() == [[1, 2], [3, 4]]
    assert pauses == [1.0, 2.0, 4.0]
    for retries in (0, 1, 2):
        with pytest.raises(ArgumentError, check=AWAY):
            compute(function(Unreliable(100)), reward_retries=retries)
    skipped = compute(
        function(Unreliable(0, hopeless="bb")), reward_failures="skip", reward_retries=1
    )
    assert skipped.totals[0].isnan().tolist() == [False, True]
    assert skipped.totals[1].tolist() == [3, 4]
    with pytest.raises(
        ArgumentError, check=has_violation("reward", "callback-failed", "all 4 completions")
    ):
        compute(function(Unreliable(100)), reward_failures="skip")


def test_an_iterator_of_a_batch_reward_fails_as_its_function() -> None:
    def scores(prompts: list[Any], batch: list[Any]) -> Any:
        yield 1.0
        raise ConnectionError("the judge is away")

    for failures in ("end", "skip"):
        with pytest.raises(ArgumentError, check=AWAY):
            compute(BatchReward(scores), reward_failures=failures)
    assert compute(BatchReward(lambda prompts, batch: map(float, range(4)))).totals.tolist() == [
        [0, 1],
        [2, 3],
    ]


def test_a_completion_that_one_of_several_functions_failed_for_is_left_out() -> None:
    scores = compute([length, Unreliable(0, hopeless="a")], reward_failures="skip")
    assert scores.totals[0].isnan().tolist() == [True, False]


def test_overlong_completions_are_punished() -> None:
    scores = compute(lambda *_: 1.0, overlong_tokens=2, overlong_penalty=0.5)
    assert scores.totals.tolist() == [[1, 1], [0.75, 0.5]]


def test_groups_agree_if_their_rewards_are_equal_or_left_out() -> None:
    totals = torch.tensor([[1.0, 1.0], [1.0, 2.0], [math.nan, 1.0], [math.nan, math.nan]])
    assert Scores(totals, {}).agreeing.tolist() == [True, False, True, True]


@pytest.mark.parametrize("value", [0.1, 0.7, 100.7, 1e18])
@pytest.mark.parametrize("baseline", ["group", "step"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage(value: float, baseline: Any, scale: Any) -> None:
    mask = torch.ones(16, 3)
    rewards = torch.full((2, 8), value)
    assert not token_advantages(rewards, 0 * mask, mask, baseline=baseline, scale=scale).any()


@pytest.mark.parametrize("baseline", ["group", "others", "step"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_completion_that_is_left_out_counts_in_no_advantage(baseline: Any, scale: Any) -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0, math.nan], [0.0, 5.0, 1.0, math.nan]])
    mask = torch.ones(8, 1)
    expected = token_advantages(
        rewards[:, :3], 0 * mask[:6], mask[:6], baseline=baseline, scale=scale
    )
    advantages = token_advantages(rewards, 0 * mask, mask, baseline=baseline, scale=scale)
    torch.testing.assert_close(advantages.view(2, 4)[:, :3], expected.view(2, 3))
    assert not advantages[3::4].any()


@pytest.mark.parametrize(
    ("rewards", "key", "code"),
    [
        ([length], "GrpoConfig.reward_weights.lenght", "unknown-reward"),
        ({"std": length}, "reward std", "repeated-name"),
        ({"seconds": length}, "reward seconds", "repeated-name"),
        ([], "reward", "no-reward"),
        ([length, length], "reward", "repeated-name"),
        ("text", "reward", "not-callable"),
    ],
)
def test_functions_and_weights_are_checked(rewards: Any, key: str, code: str) -> None:
    weights = {"lenght": 1} if code == "unknown-reward" else {}
    violations = [*reward_violations(rewards, GrpoConfig(reward_weights=weights))]
    assert [(violation.key, violation.code) for violation in violations] == [(key, code)]
