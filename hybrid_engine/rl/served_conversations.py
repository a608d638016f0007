"""Conversations with servers: each goes on when its reply is there, while others are drawn.

Rank 0 holds all of them in the background, where its environments are. The other ranks receive the
turns at the end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.messages import decode, encode
from hybrid_engine.ranks.agreement import MOST_SHARED
from hybrid_engine.ranks.background import in_background
from hybrid_engine.rl.conversation_state import (
    Conversation,
    ConversationState,
    EnvironmentRunner,
    sampling_of_turn,
)
from hybrid_engine.rl.user_callbacks import start, steps_of

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion, Sampling

_MOST_REQUESTS = 64
"""Maximum number of concurrent requests."""


class ServedConversations:
    """Conversations that have begun; rank 0 holds them.

    Args:
        engine: an engine with servers.
        groups: conversations of each prompt, whose `context` is the prompt and whose sampling draws
            one answer.
        runner: environments, which `begin` has made.
        complete: draws an answer to token ids; called in several threads.
        max_tokens_per_turn: bounds each answer.

    Attributes:
        ended_at: `time.perf_counter` when the last conversation ended. On other ranks, which
            request nothing, minus infinity: they have waited for ever.
    """

    def __init__(
        self,
        engine: HybridEngine[Any],
        groups: Sequence[Sequence[ConversationState]],
        runner: EnvironmentRunner,
        complete: Callable[[Sequence[int], Sampling], Completion],
        max_tokens_per_turn: int | None,
    ) -> None:
        self._job = engine.job
        self._tokenizer = engine.inference.tokenizer
        self._groups = groups
        self._runner = runner
        self._complete = complete
        self._max_tokens_per_turn = max_tokens_per_turn
        self._conversations: list[list[Conversation]] | None = None
        self.ended_at = -math.inf
        self._running = start(self._hold_all()) if engine.rank == 0 else None

    async def _hold_all(self) -> None:
        # They belong to the event loop of this coroutine.
        requests = asyncio.Semaphore(_MOST_REQUESTS)
        calls = asyncio.Lock()
        states = [state for group in self._groups for state in group]
        tasks = [asyncio.ensure_future(self._hold(state, requests, calls)) for state in states]
        try:
            await asyncio.gather(*tasks)
        finally:
            self.ended_at = time.perf_counter()
            # The first failure ends all.
            for task in tasks:
                task.cancel()

    async def _hold(
        self, state: ConversationState, requests: asyncio.Semaphore, calls: asyncio.Lock
    ) -> None:
        """Hold one conversation to its end."""
        goes_on = True
        turn = 0
        while goes_on:
            turn += 1
            params = sampling_of_turn(state.sampling, state.room, self._max_tokens_per_turn, turn)
            async with requests:
                request = partial(self._complete, state.context, params)
                answer = await asyncio.wrap_future(in_background(request, "completions"))
            state.add_answer(answer)
            goes_on = state.gets_reply and state.add_reply(await self._runner.reply(state, calls))

    @property
    def is_finished(self) -> bool:
        """True if this rank has nothing to wait for."""
        return self._running is None or self._running.done()

    def cancel(self) -> None:
        """Make no more requests. Not collective."""
        if self._running is not None:
            self._running.cancel()

    def collect(self) -> list[list[Conversation]]:
        """Wait for the conversations of each prompt, and return them. Collective.

        Raises the errors of `converse`, in every call.
        """
        if self._conversations is None:
            self._conversations = self._received()
        return self._conversations

    def _received(self) -> list[list[Conversation]]:
        from hybrid_engine.backends.vllm import Completion

        agreement = self._job.agreement
        steps: Iterator[None] = iter(())
        if self._running is not None:
            steps = steps_of(self._running, "environment", self._job.timeout_seconds)
        try:
            agreement.rounds("conversations", steps)
        except BaseException:  # an interrupt, or a failure of another rank
            self.cancel()
            raise
        sent = []
        with agreement.phase("conversations"):
            if self._running is not None:
                self._running.result()
                sent = [encode(self._turns(), MOST_SHARED)]
        _, (text,) = agreement.share(sent, "conversations")
        if self._running is not None:
            return [[state.result() for state in group] for group in self._groups]
        return [
            [self._conversation(turns, is_cut) for turns, is_cut in group]
            for group in decode(text, list[list[tuple[list[Completion], bool]]], MOST_SHARED)
        ]

    def _turns(self) -> list[list[tuple[list[Completion], bool]]]:
        """Return the turns of each conversation for the other ranks, and whether it was cut."""
        return [
            [
                ([replace(turn, tokenizer=None) for turn in state.turns], state.is_cut)
                for state in group
            ]
            for group in self._groups
        ]

    def _conversation(self, turns: Sequence[Completion], is_cut: bool) -> Conversation:
        decodable = [replace(turn, tokenizer=self._tokenizer) for turn in turns]
        return Conversation(tuple(decodable), is_cut)
