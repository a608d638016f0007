"""Rewards of a step: one function or several with weights, for each completion or for all at once.

    reward                              a column `reward`
    [first, second]                     columns `reward_NAME`, by the names of the functions
    {"brief": reward, ...}              columns `reward_NAME`, by these names

The total is the sum of weight * reward over the functions that apply to a completion: one that
returns None does not apply. `LoopConfig.reward_weights` has the weights.

`NAMED_REWARDS`, for prompts that have the right answer under "answer":

    exact_answer                        the answer itself: as a number, or as a text
    math                                an equal expression, by math-verify

In an answer only what follows the last four hashes counts, if there are any, as in GSM8K:
"... #### 72". A completion must have them, too, for `exact_answer`.

`HeldOut` evaluates by the mean reward of other prompts, and pass@k.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.errors import (
    ArgumentError,
    StateError,
    Violation,
    Violations,
    first_of,
    needing_package,
    shortened,
)
from hybrid_engine.ports import Figures
from hybrid_engine.ranks.job import Job
from hybrid_engine.rl.conversation_state import prompt_of
from hybrid_engine.rl.losses import are_agreeing
from hybrid_engine.rl.user_callbacks import rewards_of, run_callbacks

if TYPE_CHECKING:
    from hybrid_engine.rl.config import LoopConfig
    from hybrid_engine.trainer.worker import ActorHybridWorker

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


Sample = tuple[str, Any, Any]
"""Place of a completion in messages, the element of `prompts`, and the completion."""
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
        local: dict[str, list[float]] = {}
        with job.agreement.phase("reward"):
            for name, function in self._functions.items():
                local |= self._on_rank(name, function, samples, job)
        of_ranks = job.agreement.gather(local, dict[str, list[float]], "reward")
        # Ranks hold consecutive completions, so theirs follow each other by rank.
        shape = (len(groups), -1)
        # In float64, in which no product and no sum of bounded rewards overflows.
        rewards = {
            name: torch.tensor(
                [value for columns in of_ranks for value in columns.get(name, [])],
                dtype=torch.float64,
            )
            for name in self._functions
        }
        totals = self._totals(rewards, samples).view(shape)
        by_name = {} if self._is_single else rewards
        return Scores(
            totals,
            {
                name: values.where(values.isfinite(), math.nan).float().view(shape)
                for name, values in by_name.items()
            },
        )

    def _on_rank(
        self,
        name: str,
        function: Any,
        samples: Sequence[Sample],
        job: Job,
    ) -> dict[str, list[float]]:
        """Return the rewards that this rank computes with a function, by its name, if any.

        NaN where the function does not apply, infinity where it failed.
        """
        is_batch = isinstance(function, BatchReward)
        if is_batch and function.on_all_ranks:
            # 10 completions on 4 ranks: bounds 0, 2, 5, 7, 10.
            start, stop = (len(samples) * (job.rank + end) // job.world_size for end in (0, 1))
            samples = samples[start:stop]
        elif job.rank:
            return {}
        argument = argument_of(name)
        attempts = _Attempts(function, argument, self._config)
        calls: list[Any] = [
            (f"a call with {place}", attempts, arguments) for place, *arguments in samples
        ]
        whole = f"{len(samples)} completions"
        if is_batch:
            columns = [[sample[column] for sample in samples] for column in (1, 2)]
            calls = [(f"a call with {whole}", attempts, columns)]
        values = run_callbacks(argument, calls, job.timeout_seconds)
        if is_batch:
            (values,) = values
            if not isinstance(values, list) or len(values) != len(samples):
                raise ArgumentError.of(
                    argument,
                    f"returned a {type(values).__name__} of {len(values)} for {whole}",
                    "Return a list with a number, or None, for each completion",
                    code="wrong-length",
                )
        # By identity: a value may be an array.
        marks = {id(_FAILED): math.inf}
        if not self._is_single:
            marks[id(None)] = math.nan
        numbers = rewards_of(
            [0.0 if id(value) in marks else value for value in values],
            [place for place, *_ in samples],
            argument,
        )
        pairs = zip(values, numbers, strict=True)
        return {name: [marks.get(id(value), number) for value, number in pairs]}

    def _totals(
        self,
        rewards: Mapping[str, torch.Tensor],
        samples: Sequence[Sample],
    ) -> torch.Tensor:
        """Return the weighted sums [B], less the penalty for length; NaN for failed completions.

        Raises ArgumentError for a sum beyond `MAX_REWARD`.
        """
        config = self._config
        weights = [config.reward_weights.get(name, 1.0) for name in rewards]
        # A function that does not apply (NaN) or failed (infinity) adds 0.
        parts = torch.stack([*rewards.values()])  # [functions, B]
        totals = torch.tensor(weights, dtype=torch.float64) @ parts.nan_to_num(0.0, 0.0)
        is_failed = parts.isinf().any(dim=0)
        if is_failed.all():
            raise ArgumentError.of(
                "reward",
                f"failed for all {len(samples)} completions of the step",
                "See the warnings above",
                code="callback-failed",
            )
        without = parts.isnan().all(dim=0)
        if without.any():
            places = [samples[index][0] for index in without.nonzero().flatten().tolist()]
            raise ArgumentError.of(
                "reward",
                f"no function applies to {first_of(places, 3, '; ')}",
                "Let one function return a number for every completion",
                code="invalid-reward",
            )
        if config.overlong_tokens:
            lengths = torch.tensor([len(completion.token_ids) for *_, completion in samples])
            # Of at most 1,000 tokens 200 are overlong: 900 tokens get half of the penalty.
            excess = lengths - (config.max_tokens - config.overlong_tokens)
            share = (excess / config.overlong_tokens).clamp(0, 1)
            totals = totals - config.overlong_penalty * share
        # The sums are bounded as their parts are.
        rewards_of(totals.tolist(), [place for place, *_ in samples], "sum by reward_weights")
        return totals.where(~is_failed, math.nan).float()


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
            yield Violation(
                "reward",
                "several functions have the same name",
                "Pass a mapping of names",
                code="repeated-name",
            )
    for name, function in functions.items():
        key = argument_of(name)
        called: object = function.function if isinstance(function, BatchReward) else function
        if not callable(called):
            yield Violation(
                key,
                f"{shortened(called)} is not a function",
                "Pass a function, or several in a list or a mapping of names",
                code="not-callable",
            )
    for name in _TAKEN & functions.keys():
        yield Violation(
            argument_of(name),
            f"is the name of a reward, but `reward_{name}` is a column already",
            "Use another name",
            code="repeated-name",
        )
    for name in config.reward_weights.keys() - functions.keys():
        problem = f"there is no reward of this name, but {first_of(sorted(functions), 5)}"
        remedy = "Use the names of the functions"
        key = f"{config.name}.reward_weights.{name}"
        yield Violation(key, problem, remedy, code="unknown-reward")


class _Attempts:
    """A function that is called again after an exception, at most `reward_retries` times.

    Between the calls it waits for a second, then for two, four, and so on.

    Args:
        function: function or coroutine function, or a `BatchReward`, whose result becomes a list
            within the attempt, because an iterator may fail as well.
        argument: its name in log lines.
        config: has the number of further calls, and whether to return `_FAILED` after the last
            attempt in place of raising the exception.
    """

    def __init__(self, function: Any, argument: str, config: LoopConfig) -> None:
        self._is_batch = isinstance(function, BatchReward)
        self._function = function.function if self._is_batch else function
        self._argument = argument
        self._retries = config.reward_retries
        self._is_skipping = config.reward_failures == "skip" and not self._is_batch

    def _convert(self, returned: Any) -> Any:
        # Others have no order.
        unordered: Any = Mapping | Set | bytes | str
        return (
            list(returned) if self._is_batch and not isinstance(returned, unordered) else returned
        )

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
        self,
        returned: Awaitable[Any],
        arguments: tuple[Any, ...],
        first: int,
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


# -- rewards by name -------------------------------------------------------------------------------

_MARK = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?")
_TIMEOUT_SECONDS = 5
"""Longest time for an expression, which a completion may make hard to read or to compare."""


def exact_answer(prompt: Mapping[str, Any], completion: Any) -> float:
    """Return 1 if a completion ends in the answer of its prompt, else 0."""
    return float(_final_value(completion.text) == _final_value(str(prompt["answer"])))


def equal_expression(prompt: Mapping[str, Any], completion: Any) -> float:
    """Return 1 if the last expression of a completion equals the answer of its prompt, else 0.

    Raises DependencyError without math-verify, and StateError outside of the main thread, where its
    limit of time has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        raise StateError(
            "the reward math was called in another thread than the main one, in which it cannot "
            "be interrupted: call train in the main thread",
            code="not-the-main-thread",
        )
    with needing_package("the reward math needs math-verify: pip install '.[data]'"):
        from math_verify import parse, verify
    # GSM8K's answers have their derivation before the mark.
    answer = str(prompt["answer"]).rpartition(_MARK)[2].strip()
    expected = parse(f"${answer}$", parsing_timeout=_TIMEOUT_SECONDS)
    drawn = parse(completion.text, parsing_timeout=_TIMEOUT_SECONDS)
    return float(verify(expected, drawn, timeout_seconds=_TIMEOUT_SECONDS))


def _final_value(text: str) -> tuple[bool, float | str]:
    """Return whether there are four hashes, and the number or the text behind them, or all of it.

    What follows the number behind hashes does not count.
    """
    _, mark, final = text.rpartition(_MARK)
    final = final.strip()
    # "#### 72 apples" is 72, "72 apples" a text.
    number = _NUMBER.match(final) if mark else _NUMBER.fullmatch(final)
    value = final.casefold() if number is None else float(number[0].replace(",", ""))
    return bool(mark), value


NAMED_REWARDS: dict[str, Callable[[Mapping[str, Any], Any], float]] = {
    "exact_answer": exact_answer,
    "math": equal_expression,
}
"""Rewards that a file can name."""


# -- held-out prompts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """An `evaluate` of `train`: draws completions of the same prompts each time.

        train(model, prompts, reward, config, evaluate=HeldOut(others, reward, config, samples=4))

    Figures: `held_out_reward`, the mean, and held_out_pass_K for K = 1, 2, 4, ... `samples`: the
    chance that one of K completions passes, without bias (arXiv:2107.03374).

    Attributes:
        prompts: as of `train`, in a list.
        reward: as of `train`.
        config: its max_tokens, stops, temperature and seed.
        samples: completions of each prompt. With 1 it is the most probable one.
        passing_reward: least reward of a completion that passes.
    """

    prompts: Sequence[Any]
    reward: Rewards
    config: LoopConfig
    samples: int = field(default=1, kw_only=True)
    passing_reward: float = field(default=1.0, kw_only=True)

    def __call__(self, worker: ActorHybridWorker) -> Figures:
        """Return the figures of the present weights. Collective, in the rollout context."""
        config = self.config
        temperature = config.temperature if self.samples > 1 else 0.0
        drawn_alike = config.sampling(config.seed)
        sampling = replace(drawn_alike, n=self.samples, temperature=temperature)
        groups = worker.generate_sequences([*map(prompt_of, self.prompts)], sampling)
        numbers = range(len(self.prompts))
        rewards = RewardFunctions(self.reward, config)
        totals = rewards.compute(worker.job, numbers, self.prompts, groups).totals
        num_passing = (totals >= self.passing_reward).sum(1).tolist()
        figures: Figures = {"held_out_reward": totals.nanmean().item()}
        # 6 samples, a number of 3 bits: k is 1, 2 and 4.
        for k in (2**exponent for exponent in range(self.samples.bit_length())):
            chances = [pass_at(k, self.samples, passing) for passing in num_passing]
            figures[f"held_out_pass_{k}"] = fmean(chances)
        return figures


def pass_at(k: int, num_samples: int, num_passing: int) -> float:
    """Return the chance that one of `k` of the samples passes, drawn without replacement."""
    # 2 of 4 samples, of which 1 passes: 3 of the 6 pairs are without it, so the chance is 1/2.
    return 1 - math.comb(num_samples - num_passing, k) / math.comb(num_samples, k)
