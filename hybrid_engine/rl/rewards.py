"""Rewards of a step: one function or several with weights, for each completion or for all at once.

    reward                              a column `reward`
    [first, second]                     columns `reward_NAME`, by the names of the functions
    {"brief": reward, ...}              columns `reward_NAME`, by these names

The total is the sum of weight * reward over the functions that apply to a completion: one that
returns None does not apply. `LoopConfig.reward_weights` has the weights.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.errors import ArgumentError, Violation, Violations, first_of, shortened
from hybrid_engine.ranks.job import Job
from hybrid_engine.rl.losses import are_agreeing
from hybrid_engine.rl.user_callbacks import rewards_of, run_callbacks
from hybrid_engine.trainer.ports import Figures

if TYPE_CHECKING:
    from hybrid_engine.rl.config import LoopConfig

logger = logging.getLogger("hybrid_engine")

FIRST_PAUSE_SECONDS = 1.0
"""Seconds before a reward is called for the second time."""
_TAKEN = frozenset({"std", "seconds"})
"""Names of rewards whose columns would be those of `step_metrics`."""
_FAILED = object()
"""Result of a function that raised, if its completion is left out."""

Reward = Callable[[Any, Any], float | Awaitable[float | None] | None]
"""(prompt, completion) -> reward, a number as `user_callbacks.number_of` accepts it.

Called on rank 0 only, which sends the rewards to the other ranks. The calls of a coroutine function
run concurrently. With an environment the second argument is a `Conversation`.
"""


@dataclass(frozen=True)
class BatchReward:
    """A function of all completions of a step, such as a reward model.

    Attributes:
        function: (prompts, completions), two lists of B elements -> B numbers, in a list, tensor
            or array; None: does not apply. It may be a coroutine function.
        on_all_ranks: call it on every rank with the rank's share of the completions, which may be
            empty, instead of on rank 0 with all of them.
    """

    function: Callable[[list[Any], list[Any]], Any]
    on_all_ranks: bool = False

    @property
    def __name__(self) -> str:
        return str(getattr(self.function, "__name__", "reward"))


Rewards = (
    Reward | BatchReward | Mapping[str, "Reward | BatchReward"] | Sequence["Reward | BatchReward"]
)


@dataclass(frozen=True)
class Scores:
    """Rewards of the completions of a step, [P, n] for P prompts with n completions.

    Attributes:
        totals: weighted sums; NaN for completions that are left out, because a function failed.
        by_name: rewards by the names of several functions; NaN where one does not apply. Empty for
            a single function.
    """

    totals: torch.Tensor
    by_name: Mapping[str, torch.Tensor]

    @property
    def agreeing(self) -> torch.Tensor:
        """True [P] for prompts whose completions all have the same reward, or none."""
        return are_agreeing(self.totals)

    def replaced(self, indices: Sequence[int], scores: Scores) -> Scores:
        """Return these scores with those of the prompts at `indices` replaced."""
        totals = self.totals.clone()
        totals[indices] = scores.totals
        by_name = {name: rewards.clone() for name, rewards in self.by_name.items()}
        for name, rewards in by_name.items():
            rewards[indices] = scores.by_name[name]
        return Scores(totals, by_name)

    def figures(self) -> Figures:
        """Return the mean of each of several functions, over the completions that it applies to."""
        means = {f"reward_{name}": rewards.nanmean() for name, rewards in self.by_name.items()}
        return {name: mean.item() for name, mean in means.items() if not mean.isnan()}


class RewardFunctions:
    """Functions of a run. `reward_violations` has what is refused.

    Args:
        rewards: a function, a mapping of names to functions, or a sequence of functions.
        config: has weights, retries, and how failures and overlong completions count.
    """

    def __init__(self, rewards: Rewards, config: LoopConfig) -> None:
        self._config = config
        self._is_single = not isinstance(rewards, Mapping | Sequence)
        self._functions = named_rewards(rewards)

    def compute(
        self,
        job: Job,
        names: Sequence[int],
        prompts: Sequence[Any],
        groups: Sequence[Sequence[Any]],
    ) -> Scores:
        """Compute the rewards of `groups`, the completions of each prompt. Collective.

        `names`: index of each prompt, for messages.

        Raises ArgumentError for functions that fail, unless their completions are left out, and for
        values that are no finite numbers.
        """
        samples = [
            (f"prompt {name}, completion {number}", prompt, completion)
            for name, prompt, group in zip(names, prompts, groups, strict=True)
            for number, completion in enumerate(group)
        ]
        local: tuple[dict[str, list[float]], list[int]] = ({}, [])
        with job.agreement.phase("reward"):
            local = self._on_rank(samples, job)
        kind = tuple[dict[str, list[float]], list[int]]
        of_ranks = job.agreement.gather(local, kind, "reward")
        rewards: dict[str, list[float]] = {}
        for name, function in self._functions.items():
            is_shared = isinstance(function, BatchReward) and function.on_all_ranks
            sources = of_ranks if is_shared else of_ranks[:1]
            rewards[name] = [value for columns, _ in sources for value in columns[name]]
        failed = of_ranks[0][1]
        totals = self._totals(rewards, failed, samples)
        shape = (len(groups), -1)
        by_name = {} if self._is_single else rewards
        return Scores(
            totals.view(shape),
            {name: torch.tensor(values).view(shape) for name, values in by_name.items()},
        )

    def _on_rank(
        self, samples: Sequence[tuple[str, Any, Any]], job: Job
    ) -> tuple[dict[str, list[float]], list[int]]:
        """Return the rewards that this rank computes, and the indices of failed completions."""
        rewards: dict[str, list[float]] = {}
        failed: set[int] = set()
        for name, function in self._functions.items():
            argument = argument_of(name)
            if isinstance(function, BatchReward):
                part = list(samples)
                if function.on_all_ranks:
                    start = len(samples) * job.rank // job.world_size
                    stop = len(samples) * (job.rank + 1) // job.world_size
                    part = part[start:stop]
                elif job.rank:
                    continue
                rewards[name] = self._of_batch(argument, function, part, job.timeout_seconds)
            elif job.rank == 0:
                is_skipping = self._config.reward_failures == "skip"
                attempts = _Attempts(
                    function, argument, self._config.reward_retries, is_skipping=is_skipping
                )
                calls = [(sample[0], attempts, sample[1:]) for sample in samples]
                values = run_callbacks(argument, calls, job.timeout_seconds)
                failed.update(index for index, value in enumerate(values) if value is _FAILED)
                rewards[name] = self._checked(argument, values, samples)
        return rewards, sorted(failed)

    def _of_batch(
        self,
        argument: str,
        reward: BatchReward,
        samples: Sequence[tuple[str, Any, Any]],
        timeout_seconds: float,
    ) -> list[float]:
        retries = self._config.reward_retries
        # A list within the attempt: an iterator may fail as well. Others have no order.
        unordered: Any = Mapping | Set | bytes | str
        attempts = _Attempts(
            reward.function,
            argument,
            retries,
            convert=lambda values: values if isinstance(values, unordered) else list(values),
        )
        prompts = [prompt for _, prompt, _ in samples]
        completions = [completion for *_, completion in samples]
        place = f"{len(samples)} completions"
        (values,) = run_callbacks(
            argument, [(place, attempts, (prompts, completions))], timeout_seconds
        )
        if not isinstance(values, list) or len(values) != len(samples):
            problem = f"returned a {type(values).__name__} of {len(values)} for {place}"
            remedy = "Return a list with a number, or None, for each completion"
            raise ArgumentError([Violation(argument, problem, remedy, code="wrong-length")])
        return self._checked(argument, values, samples)

    def _checked(
        self,
        argument: str,
        values: Sequence[Any],
        samples: Sequence[tuple[str, Any, Any]],
    ) -> list[float]:
        """Return the values as floats; NaN for failures, and for None of several functions."""
        missing = (_FAILED,) if self._is_single else (_FAILED, None)
        present = [
            index
            for index, value in enumerate(values)
            if not any(value is absent for absent in missing)
        ]
        rewards = [math.nan] * len(values)
        places = [samples[index][0] for index in present]
        converted = rewards_of([values[index] for index in present], places, argument)
        for index, reward in zip(present, converted, strict=True):
            rewards[index] = reward
        return rewards

    def _totals(
        self,
        rewards: Mapping[str, Sequence[float]],
        failed: Sequence[int],
        samples: Sequence[tuple[str, Any, Any]],
    ) -> torch.Tensor:
        """Return the weighted sums [B], less the penalty for length; NaN for failed completions.

        Raises ArgumentError for a sum beyond `MAX_REWARD`.
        """
        config = self._config
        weights = [config.reward_weights.get(name, 1.0) for name in rewards]
        # [functions, B]; in float64, in which no product and no sum of bounded rewards overflows.
        parts = torch.tensor([*rewards.values()], dtype=torch.float64)
        totals = torch.tensor(weights, dtype=torch.float64) @ parts.nan_to_num(0.0)
        if len(failed) == len(samples):
            problem = f"failed for all {len(samples)} completions of the step"
            remedy = "See the warnings above"
            raise ArgumentError([Violation("reward", problem, remedy, code="callback-failed")])
        without = parts.isnan().all(dim=0)
        without[list(failed)] = False
        if without.any():
            places = [samples[index][0] for index in without.nonzero().flatten().tolist()]
            problem = f"no function applies to {first_of(places, 3, '; ')}"
            remedy = "Let one function return a number for every completion"
            raise ArgumentError([Violation("reward", problem, remedy, code="invalid-reward")])
        if config.overlong_tokens:
            lengths = torch.tensor([len(completion.token_ids) for *_, completion in samples])
            excess = lengths - (config.max_tokens - config.overlong_tokens)
            share = (excess / config.overlong_tokens).clamp(0, 1)
            totals = totals - config.overlong_penalty * share
        # The sums are bounded as their parts are.
        rewards_of(totals.tolist(), [place for place, *_ in samples], "sum by reward_weights")
        totals[list(failed)] = math.nan
        return totals.float()


def named_rewards(rewards: Any) -> dict[str, Any]:
    """Return functions by name: the keys of a mapping, else the names of the functions."""
    if isinstance(rewards, str):  # a text is a sequence, too
        return {"reward": rewards}
    if isinstance(rewards, Mapping):
        return {str(name): function for name, function in rewards.items()}
    if isinstance(rewards, Sequence):
        return {
            str(getattr(function, "__name__", number)): function
            for number, function in enumerate(rewards)
        }
    return {"reward": rewards}


def argument_of(name: str) -> str:
    """Return how messages name a function; "reward" is the name of a single one."""
    return name if name == "reward" else f"reward {name}"


def reward_violations(rewards: Any, config: LoopConfig) -> Violations:
    """Yield what is wrong with the functions, and with their settings."""
    functions = named_rewards(rewards)
    if isinstance(rewards, Mapping | Sequence) and not isinstance(rewards, str):
        if not functions:
            yield Violation("reward", "there is no function", "Pass one", code="no-reward")
        if len(functions) < len(rewards):
            problem = "several functions have the same name"
            yield Violation("reward", problem, "Pass a mapping of names", code="repeated-name")
    for name, function in functions.items():
        key = argument_of(name)
        called: object = function.function if isinstance(function, BatchReward) else function
        if not callable(called):
            problem = f"{shortened(called)} is not a function"
            remedy = "Pass a function, or several in a list or a mapping of names"
            yield Violation(key, problem, remedy, code="not-callable")
    for name in _TAKEN & functions.keys():
        problem = f"is the name of a reward, but `reward_{name}` is a column already"
        yield Violation(argument_of(name), problem, "Use another name", code="repeated-name")
    for name in config.reward_weights.keys() - functions.keys():
        problem = f"there is no reward of this name, but {first_of(sorted(functions), 5)}"
        remedy = "Use the names of the functions"
        key = f"{config.name}.reward_weights.{name}"
        yield Violation(key, problem, remedy, code="unknown-reward")


class _Attempts:
    """A function that is called again after an exception, at most `retries` times.

    Between the calls it waits for a second, then for two, four, and so on.

    Args:
        function: function or coroutine function.
        argument: its name in log lines.
        retries: number of further calls.
        is_skipping: after the last attempt, return `_FAILED` in place of raising the exception.
        convert: converts the result, within the same attempt.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        argument: str,
        retries: int,
        *,
        is_skipping: bool = False,
        convert: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._function = function
        self._argument = argument
        self._retries = retries
        self._is_skipping = is_skipping
        self._convert = convert

    def __call__(self, *arguments: Any) -> Any:
        """Return the result, or an awaitable of it."""
        for attempt in range(self._retries + 1):
            try:
                returned = self._function(*arguments)
                if inspect.isawaitable(returned):
                    return self._awaited(returned, arguments, attempt)
                return self._convert(returned)
            except Exception as error:
                if self._is_last(attempt, error):
                    break
                time.sleep(_pause_seconds(attempt))
        return _FAILED

    async def _awaited(
        self, returned: Awaitable[Any], arguments: tuple[Any, ...], first: int
    ) -> Any:
        """Return the result of the attempt that returned an awaitable, or of a later one."""
        for attempt in range(first, self._retries + 1):
            try:
                if attempt > first:
                    returned = self._function(*arguments)
                is_awaitable = inspect.isawaitable(returned)
                return self._convert(await returned if is_awaitable else returned)
            except Exception as error:
                if self._is_last(attempt, error):
                    break
                await asyncio.sleep(_pause_seconds(attempt))
        return _FAILED

    def _is_last(self, attempt: int, error: Exception) -> bool:
        """Log a failure; return True after the last attempt, or raise the exception there."""
        is_last = attempt == self._retries
        if is_last and not self._is_skipping:
            raise error
        what_follows = "its completion is left out"
        if not is_last:
            what_follows = f"it is called again in {_pause_seconds(attempt):g} s"
        logger.warning("%s failed, %s: %s", self._argument, what_follows, shortened(error))
        return is_last


def _pause_seconds(attempt: int) -> float:
    """Return the pause after an attempt, from 0."""
    return FIRST_PAUSE_SECONDS * 2.0**attempt
