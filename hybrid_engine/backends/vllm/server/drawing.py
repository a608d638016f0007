"""Completions that a rank requests from servers in background threads."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait

from hybrid_engine.backends.vllm.engine_settings import Sampling, TokenIds
from hybrid_engine.backends.vllm.prompts import ModelTokenizer
from hybrid_engine.backends.vllm.replica_exchange import (
    Completions,
    interleaved,
    sendable,
)
from hybrid_engine.errors import GenerationError
from hybrid_engine.ports import Data
from hybrid_engine.ranks.background import in_background
from hybrid_engine.ranks.job import Job

_PROMPTS_OF_A_REQUEST = 64
"""Prompts per request. A server decodes requests together, and nothing while it parses one."""
_MOST_REQUESTS = 64
"""Maximum number of concurrent requests of a rank."""

Ask = Callable[[int, TokenIds, Sampling], Completions]
"""(number of a server, prompts, sampling) -> completions of each prompt."""


class Drawing:
    """Completions of some prompts, of which each rank requests a share.

    A request has one sampling with one seed, and one length, so prompts with different ones are
    sent in separate requests.

    Args:
        ask: makes one request; called in several threads.
        job: the ranks.
        tokenizer: tokenizer of the completions.
        prompts: token ids of the prompts of this call, on this rank.
        samplings: sampling of each prompt.
        data: "global" if all ranks have the same prompts.
        num_servers: number of servers, which are asked in turn.

    Attributes:
        ended_at: `time.perf_counter` when a thread of this rank ended last, or at the start.
    """

    def __init__(
        self,
        ask: Ask,
        job: Job,
        tokenizer: ModelTokenizer,
        prompts: TokenIds,
        samplings: Sequence[Sampling],
        data: Data,
        num_servers: int,
    ) -> None:
        self._ask = ask
        self._job = job
        self._tokenizer = tokenizer
        self._prompts = prompts
        # Global data: rank r completes every world_size-th prompt, from r on.
        step = job.world_size if data == "global" else 1
        self._is_local = step == 1
        share = slice(job.rank % step, None, step)
        self._share = prompts[share]
        self._samplings = samplings[share]
        self._num_servers = num_servers
        is_alike = len(set(self._samplings)) == 1 and self._samplings[0].max_tokens is not None
        self._size = _PROMPTS_OF_A_REQUEST if is_alike else 1
        starts = range(0, len(self._share), self._size)
        self._waiting = deque(enumerate(starts))
        self._completed: dict[int, Completions] = {}
        self._answers: Completions | None = None
        self.ended_at = time.perf_counter()
        # Not an executor: it would be joined when the wait is interrupted, and a server that does
        # not respond would block that forever.
        num_threads = min(len(starts), _MOST_REQUESTS)
        self._threads = [in_background(self._work, "completions") for _ in range(num_threads)]
        for thread in self._threads:
            thread.add_done_callback(self._note_end)

    def _work(self) -> None:
        """Make requests until none is left; one of several threads."""
        while self._waiting:
            try:
                number, start = self._waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            server = (self._job.rank + number) % self._num_servers
            try:
                part = self._share[start : start + self._size]
                self._completed[number] = self._ask(server, part, self._samplings[start])
            except BaseException:
                self.cancel()  # the whole call fails, so draw nothing more
                raise

    def _note_end(self, _thread: object) -> None:
        self.ended_at = time.perf_counter()

    @property
    def is_finished(self) -> bool:
        """True if this rank has nothing to wait for."""
        return all(thread.done() for thread in self._threads)

    def cancel(self) -> None:
        """Make no more requests. Not collective."""
        self._waiting.clear()

    def collect(self) -> Completions:
        """Wait for the completions of each prompt, and return them. Collective.

        Raises the errors of `generate_over_replicas`, in every call.
        """
        if self._answers is not None:
            return self._answers
        with self._job.agreement.phase("generate", kind=GenerationError):
            try:
                wait(self._threads)
            except BaseException:  # an interrupt
                self.cancel()
                raise
            for thread in self._threads:
                thread.result()
            completed = [row for _, rows in sorted(self._completed.items()) for row in rows]
        if not self._is_local:
            agreement = self._job.agreement
            sent = sendable(completed)
            by_rank = agreement.gather(sent, Completions, "exchange of completions", sys.maxsize)
            completed = interleaved(by_rank, self._prompts, self._tokenizer)
        self._answers = completed
        return completed
