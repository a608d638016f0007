"""Conversations with servers: each goes on when its reply is there, while others are drawn.

Rank 0 holds all of them in the background, where its environments are. The other ranks receive the
turns at the end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import GenerationError
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.ranks.background import in_background
from hybrid_engine.rl.conversation_state import (
    Conversation,
    ConversationState,
    EnvironmentRunner,
    sampling_of_turn,
)
from hybrid_engine.rl.user_callbacks import start_task, steps_of

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion, Sampling

logger = logging.getLogger("hybrid_engine")


class ServedConversations:
    """Conversations that have begun; rank 0 holds them.

    Args:
        engine: an engine with servers.
        groups: conversations of each prompt, whose `context` is the prompt and whose sampling draws
            one answer.
        runner: environments.
        complete: (number, token ids, sampling) -> answer; called in several threads. Requests with
            the same number reach the same server, which has their prefix in its cache.
        max_tokens_per_turn: bounds each answer.

    Attributes:
        ended_at: `time.perf_counter` when the last conversation ended. Minus infinity on other
            ranks, which never have requests.
    """

    def __init__(
        self,
        engine: HybridEngine,
        groups: Sequence[Sequence[ConversationState]],
        runner: EnvironmentRunner,
        complete: Callable[[int, Sequence[int], Sampling], Completion],
        max_tokens_per_turn: int | None,
    ) -> None:
        self._job = engine.job
        self._tokenizer = engine.inference.tokenizer
        self._groups = groups
        self._states = [state for group in groups for state in group]
        self._runner = runner
        self._complete = complete
        inference: Any = engine.inference
        self._most_requests = inference.most_requests
        self._max_tokens_per_turn = max_tokens_per_turn
        self._conversations: list[list[Conversation]] | None = None
        self.ended_at = -math.inf
        self._num_open = len(self._states)
        self._changed_at = time.monotonic()
        self._task = start_task(self._hold_all()) if engine.rank == 0 else None

    async def _hold_all(self) -> None:
        # A semaphore of the event loop that runs this coroutine.
        room = asyncio.Semaphore(self._most_requests)
        tasks = [
            asyncio.ensure_future(self._hold(number, state, room))
            for number, state in enumerate(self._states)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            self.ended_at = time.perf_counter()
            # The first failure ends all.
            for task in tasks:
                task.cancel()

    async def _hold(self, number: int, state: ConversationState, room: asyncio.Semaphore) -> None:
        """Hold one conversation to its end."""
        await self._runner.open(state)
        goes_on = True
        turn = 0
        while goes_on:
            turn += 1
            params = sampling_of_turn(state.sampling, state.room, self._max_tokens_per_turn, turn)
            async with room:
                request = partial(self._complete, number, state.context, params)
                answer = await asyncio.wrap_future(in_background(request, "completions"))
            self._changed_at = time.monotonic()
            state.add_answer(answer)
            goes_on = state.gets_reply and state.add_reply(await self._runner.reply(state))
            self._changed_at = time.monotonic()
        self._num_open -= 1

    @property
    def is_finished(self) -> bool:
        """True if this rank has nothing to wait for."""
        return self._task is None or self._task.future.done()

    def cancel(self) -> None:
        """Make no more requests. Not collective."""
        if self._task is not None:
            self._task.future.cancel()

    def collect(self) -> list[list[Conversation]]:
        """Wait for the conversations of each prompt, and return them. Collective.

        Raises the errors of `converse`.
        """
        if self._conversations is None:
            self._receive()
            self._conversations = [[state.result() for state in group] for group in self._groups]
        return self._conversations

    def _receive(self) -> None:
        """Wait for rank 0, and complete the conversations of this rank by the turns it sends."""
        from hybrid_engine.backends.vllm import Completion

        agreement = self._job.agreement
        try:
            agreement.rounds("conversations", self._steps())
        except BaseException:  # an interrupt, or a failure of another rank
            self.cancel()
            raise
        kind = list[tuple[list[Completion], bool]]
        sent: list[tuple[list[Completion], bool]] = []
        with agreement.phase("conversations", kind=GenerationError):
            if self._task is not None:
                self._task.future.result()
                sent = [(state.replies_and_answers(), state.is_cut) for state in self._states]
        if self._job.world_size == 1:
            return
        received = agreement.gather(sent, kind, "conversations", sys.maxsize)[0]
        if self._task is None:
            for state, (turns, is_cut) in zip(self._states, received, strict=True):
                state.is_cut = is_cut
                for turn in turns:
                    prompt = (*state.context, *turn.prompt_token_ids)
                    state.add_answer(
                        replace(turn, prompt_token_ids=prompt, tokenizer=self._tokenizer)
                    )

    def _steps(self) -> Iterator[None]:
        """Yield until this rank has nothing to wait for; log a long wait."""
        if self._task is None:
            return
        timeout_seconds = self._job.timeout_seconds
        for _ in steps_of(self._task, "environment", timeout_seconds):
            seconds = time.monotonic() - self._changed_at
            if seconds > timeout_seconds:
                self._changed_at = time.monotonic()
                logger.warning(
                    "no answer and no reply in %g s: %d conversations go on",
                    timeout_seconds,
                    self._num_open,
                )
            yield
