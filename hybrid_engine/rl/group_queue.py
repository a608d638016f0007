"""Prompts and completions of steps; with servers those of the next steps are drawn ahead.

    step n, which learns with the weights that step n - 1 made, and k = max_staleness

    publish         servers pause, are filled, and go on, with completions in flight too
    begin   n + k   request its completions, for any weights of this job; at first n ... n + k
    take    n       wait for its completions, and check the version of each token
    learn   n       servers draw n + 1 ... n + k

So no token of step n is older than the publish of step n - k. With k = 0, `take` draws the step.

A checkpoint has the completions of all begun steps. The run waits for them before it saves, so it
learns the same completions whether it goes on or is resumed. Conversations are not saved, because
their environments cannot be; a resumed run holds them again.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from hybrid_engine.errors import (
    GenerationError,
    HybridEngineError,
    LostRankError,
    MessageError,
    clipped,
    first_of,
)
from hybrid_engine.files.durable import naming, write_bytes
from hybrid_engine.files.reading import read_regular
from hybrid_engine.messages import decode, encode
from hybrid_engine.ports import Figures
from hybrid_engine.rl.conversation_state import prompt_of
from hybrid_engine.rl.conversations import Conversations
from hybrid_engine.rl.prompt_source import (
    PromptSource,
    StepPrompts,
    StreamedPrompts,
    are_listed,
)
from hybrid_engine.rl.run_checks import RunArguments, RunLimits, require_room
from hybrid_engine.rl.step_metrics import Groups
from hybrid_engine.rl.user_callbacks import calling
from hybrid_engine.trainer.worker import ActorHybridWorker

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion, Sampling
    from hybrid_engine.backends.vllm.completing import Completions
    from hybrid_engine.backends.vllm.server.inference import ServedDrawing

logger = logging.getLogger("hybrid_engine")

_FILE = "queue.msgpack"
_REMEDY = (
    "Remove the checkpoint's directory to resume from the one before it, or begin a new run "
    "elsewhere"
)


@dataclass(frozen=True)
class _Restored:
    """Completions of a step, from a checkpoint."""

    groups: Completions
    ended_at: float = field(default_factory=time.perf_counter)
    is_finished = True

    def collect(self) -> Completions:
        """Return the completions of each prompt."""
        return self.groups

    def cancel(self) -> None:
        """Do nothing: there are no requests."""


class GroupQueue:
    """Completions of the present step, and with `max_staleness` of the next ones.

    Args:
        worker: both engines.
        arguments: arguments of the run.
        limits: limits of its engines.
        source: prompts of each step.

    Attributes:
        ready: with `max_staleness`, the number of steps that had been drawn completely when the
            trainer asked for one, including that one.
    """

    def __init__(
        self,
        worker: ActorHybridWorker,
        arguments: RunArguments,
        limits: RunLimits,
        source: PromptSource | StreamedPrompts,
    ) -> None:
        self.ready = 0
        self._worker = worker
        self._arguments = arguments
        self._limits = limits
        self._source = source
        # A list was checked before.
        self._checks_each_step = not are_listed(arguments.prompts)
        # A stream is read once.
        self._prompts: dict[int, StepPrompts] = {}
        self._depth = arguments.config.max_staleness
        self._environment: Any = arguments.callbacks.get("environment")
        self._chat: Any = arguments.chat
        self._begun: dict[int, ServedDrawing | Conversations | _Restored] = {}
        self._published: list[int] = []

    def prompts_of(self, number: int) -> StepPrompts:
        """Return the numbers of a step's prompts, and the prompts. Collective.

        Raises ArgumentError or ConfigError if the caller's function returns invalid ones.
        """
        if number not in self._prompts:
            with calling(self._worker.job.agreement, "prompts", f"step {number}"):
                names, prompts = self._source.take(number)
                if self._checks_each_step:
                    require_room(prompts, self._arguments, self._limits)
            self._prompts[number] = names, prompts
        return self._prompts[number]

    def others(self, number: int, count: int) -> Iterator[tuple[int, Any]]:
        """Yield number and prompt of up to `count` prompts of a list that a step does not have.

        They are the same in a repeated run. Yields nothing if the caller's prompts are not a list.
        """
        prompts = self._arguments.prompts
        if are_listed(prompts):
            names, _ = self._prompts[number]
            numbers = randomness(self._arguments.config.seed, number, "other prompts")
            # A sample of this size has at least `count` that the step does not have.
            size = min(len(prompts), len(names) + count)
            for index in numbers.sample(range(len(prompts)), size):
                if index not in names:
                    yield index, prompts[index]

    def sampling(self, number: int, draw: int = 0) -> Sampling:
        """Return the sampling of a step; `draw` is above 0 if groups are drawn again."""
        config = self._arguments.config
        stream = randomness(config.seed, number, f"samples{draw or ''}")
        return config.sampling(stream.getrandbits(62))

    def begin(self, number: int) -> float:
        """Begin all steps that may be drawn during step `number`. Collective, in rollout context.

        Returns the seconds in which this rank had no requests before it began the next step.
        """
        if not self._depth:
            return 0.0
        version = self._worker.train.version
        # In the warm-up of PPO's critic, steps change no weight.
        if version not in self._published:
            # With k = 2 this version and the two before it: their tokens have ages 0, 1 and 2.
            self._published = [*self._published[-self._depth :], version]
        last = min(number + self._depth, self._arguments.config.steps)
        new = [step for step in range(number, last + 1) if step not in self._begun]
        waited = 0.0
        begun = self._begun.values()
        if new and begun and all(drawing.is_finished for drawing in begun):
            waited = time.perf_counter() - max(drawing.ended_at for drawing in begun)
        for step in new:
            self._begun[step] = self._begin_step(step)
        return waited

    def _begin_step(self, number: int) -> ServedDrawing | Conversations:
        """Request the completions of a step, with any weights of this job."""
        names, prompts = self.prompts_of(number)
        if self._environment is not None:
            return self._conversations(names, prompts, self.sampling(number), goes_on=True)
        servers = self._worker.inference
        plain_prompts = [prompt_of(prompt) for prompt in prompts]
        prepared = servers.prepare(plain_prompts, self.sampling(number), chat=self._chat)
        return cast("ServedDrawing", servers.begin(*prepared, goes_on=True))

    def take(self, number: int) -> Groups:
        """Return the completions of each prompt of a step. Collective, in the rollout context.

        Raises GenerationError if a token is older than `max_staleness` allows.
        """
        if not self._depth:
            return self.draw(*self.prompts_of(number), self.sampling(number))
        begun = list(self._begun.values())
        unfinished = self._worker.job.agreement.any_of(
            [not step.is_finished for step in begun], "looking at the queue"
        )
        self.ready = unfinished.count(False)
        groups: Groups = self._begun[number].collect()
        self.staleness(groups)
        return groups

    def draw(self, names: Sequence[int], prompts: Sequence[Any], sampling: Sampling) -> Groups:
        """Draw completions, or hold conversations, of prompts with the present weights."""
        if self._environment is None:
            plain_prompts = [prompt_of(prompt) for prompt in prompts]
            return self._worker.generate_sequences(plain_prompts, sampling, **self._chat)
        return self._conversations(names, prompts, sampling).collect()

    def _conversations(
        self,
        names: Sequence[int],
        prompts: Sequence[Any],
        sampling: Sampling,
        *,
        goes_on: bool = False,
    ) -> Conversations:
        """Begin conversations of prompts with these numbers."""
        return Conversations(
            self._worker,
            prompts,
            sampling,
            self._environment,
            max_tokens_per_turn=self._arguments.config.max_tokens_per_turn,
            names=names,
            goes_on=goes_on,
            **self._chat,
        )

    def staleness(self, groups: Any) -> list[int]:
        """Return the number of publishes since the weights of each token of `groups`.

        Raises GenerationError if it is above `max_staleness`.
        """
        ages = {version: age for age, version in enumerate(reversed(self._published))}
        versions = [
            version for group in groups for completion in group for version in completion.versions
        ]
        unknown = sorted(set(versions) - ages.keys())
        if unknown:
            drawn = first_of([str(version) for version in unknown], 3)
            allowed = ", ".join(map(str, self._published))
            raise GenerationError(
                f"servers drew tokens with weights of version {drawn}, but max_staleness is "
                f"{self._depth}, and the last publishes are {allowed}",
                code="too-stale",
            )
        return [ages[version] for version in versions]

    def figures(self, groups: Any) -> Figures:
        """Return the figures of a step's completions; none without `max_staleness`."""
        if not self._depth:
            return {}
        ages = self.staleness(groups)
        return {
            "staleness_mean": fmean(ages),
            "staleness_max": float(max(ages)),
            "queue_length": float(self.ready),
        }

    def learned(self, number: int) -> None:
        """Forget a step, after which no checkpoint needs its completions."""
        self._begun.pop(number, None)
        self._prompts.pop(number, None)

    def wait(self) -> None:
        """Wait for the completions of all begun steps, before a checkpoint. Collective.

        Steps whose requests failed are begun again when they are needed. Conversations are not
        waited for, because they are not saved.
        """
        if self._environment is not None:
            return
        for number in list(self._begun):
            try:
                self._begun[number].collect()
            except LostRankError:  # no collective can follow
                raise
            except HybridEngineError as error:
                logger.warning("step %d will be drawn again: %s", number, clipped(str(error), 500))
                self._begun.pop(number).cancel()

    def save(self, directory: Path, step: int) -> None:
        """Write the place in the prompts after a step, and the completions of all begun steps.

        After `wait`, on one rank. Raises FileError.
        """
        self._source.save(directory, step)
        if not self._depth:
            return
        groups: dict[int, Any] = {}
        # An environment's state cannot be saved, so a resumed run holds conversations again.
        if self._environment is None:
            for number, begun in self._begun.items():
                groups[number] = [
                    [replace(completion, tokenizer=None) for completion in group]
                    for group in cast("Sequence[Sequence[Completion]]", begun.collect())
                ]
        write_bytes(directory / _FILE, encode((self._published, groups), sys.maxsize))

    def load(self, directory: Path, step: int) -> None:
        """Read what `save` wrote, on rank 0 for all ranks. Collective.

        Raises FileError that names a damaged or missing file.
        """
        self.close()
        agreement = self._worker.job.agreement
        with agreement.phase("reading the place in the prompts"):
            self._source.load(directory, step)
        if not self._depth:
            return
        from hybrid_engine.backends.vllm.completing import Completions

        # Versions of the last publishes, and completions by step.
        kind = tuple[list[int], dict[int, Completions]]
        path = directory / _FILE
        local: tuple[list[int], dict[int, Completions]] = [], {}
        with agreement.phase("reading the queue"):
            if self._worker.rank == 0:
                with naming("reading", path, _REMEDY):
                    try:
                        local = decode(read_regular(path, sys.maxsize), kind, sys.maxsize)
                    except MessageError as error:
                        raise ValueError(str(error)) from error
        of_ranks = agreement.gather(local, kind, "reading the queue", sys.maxsize)
        self._published, saved = of_ranks[0]
        # Without an environment then, with one now: conversations are held again.
        saved = saved if self._environment is None else {}
        tokenizer = self._worker.inference.tokenizer
        for number, groups in saved.items():
            restored = [
                [replace(completion, tokenizer=tokenizer) for completion in group]
                for group in groups
            ]
            self._begun[number] = _Restored(restored)

    def close(self) -> None:
        """Forget all steps, and make no more requests. Not collective."""
        for drawing in self._begun.values():
            drawing.cancel()
        self._begun = {}
        self._prompts = {}


def randomness(seed: int, number: int, purpose: str) -> random.Random:
    """Return the random numbers of a step for one purpose."""
    # Seeded per purpose, so that a new random choice does not change the existing ones. The
    # seed is a string, which Random hashes alike in every process.
    return random.Random(f"{seed}/{number}/{purpose}")
