"""Conversations of several turns by token ids: tokens that the policy drew are never re-tokenized.

    prompt    token ids of the prompt, by its chat template
    answer    drawn by vLLM from all token ids so far
    reply     from the environment: messages (rendered by the template), a text, or token ids
    answer    drawn by vLLM; and so on, until the environment ends the conversation, or
              `max_tokens` tokens follow the prompt

Training uses exactly the token ids that vLLM received and drew, so log-probabilities match them.

Rank 0 holds all conversations in an event loop, where its environments are; each is a coroutine
that awaits answers and replies in turn:

    servers            an answer is requested at once, while other conversations go on
    vLLM in the ranks  once all open conversations wait for an answer, all ranks draw them together

The other ranks receive the turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    GenerationError,
    Violation,
    Violations,
    require_none,
    shortened,
)
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.ranks.background import in_background
from hybrid_engine.rl.conversation_state import (
    Conversation,
    ConversationState,
    Environment,
    prompt_of,
    sampling_of_turn,
)
from hybrid_engine.rl.user_callbacks import run_callback, start_task, steps_of
from hybrid_engine.trainer.batches.batch_building import required_whole

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion
    from hybrid_engine.backends.vllm.prompts import ChatArguments
    from hybrid_engine.backends.vllm.requests import Request, Samplings

logger = logging.getLogger("hybrid_engine")

_SINGLE_ANSWER_ARGUMENTS = ("add_generation_prompt", "continue_final_message")


def converse(
    engine: HybridEngine,
    prompts: Sequence[Any],
    sampling: Samplings,
    environment: Environment,
    *,
    max_tokens_per_turn: int | None = None,
    names: Sequence[int] | None = None,
    **chat: Unpack[ChatArguments],
) -> list[list[Conversation]]:
    """Hold `n` conversations for each prompt, each with its own random streams.

    Collective, in the rollout context; prompts are the same on all ranks.

    Args:
        engine: a worker, or another engine.
        prompts: texts, chats or lists of token ids, or mappings that have one of these under
            "prompt".
        sampling: parameters of every turn, ours or `vllm.SamplingParams`: one for all prompts, or
            a list with one for each prompt. `max_tokens` bounds everything after the prompt,
            answers and replies together.
        environment: called on rank 0 with an element of `prompts` for each conversation. It
            returns a function that is called with each answer, except those that `max_tokens` cut
            off, and returns the reply: messages, if the prompts are chats; a text or token ids,
            which are appended unchanged; or None to end the conversation. Replies of coroutine
            functions are awaited together: all those of a turn, and with servers while others are
            drawn. Other functions are called one after the other.
        max_tokens_per_turn: bounds each answer. An answer that it cuts off ("length") gets a
            reply like any other.
        names: numbers of the prompts in messages; default: their indices.
        chat: `tools` and `chat_template_kwargs`, as in `generate`.

    Raises:
        ArgumentError: on rank 0, an environment failed or returned an invalid reply.
        RemoteError: on other ranks, with the text of that error.

    Also raises the errors of `generate_sequences`.
    """
    conversations = Conversations(
        engine,
        prompts,
        sampling,
        environment,
        max_tokens_per_turn=max_tokens_per_turn,
        names=names,
        **chat,
    )
    return conversations.collect()


class Conversations:
    """Conversations that have begun; rank 0 holds them. Collective, but for `cancel`.

    With servers they go on in the background; vLLM in the ranks draws in `collect`. Arguments and
    errors are those of `converse`.

    Args:
        goes_on: with servers they continue after a publish, with the next weights; see
            `Completion.versions`. Otherwise the present weights draw all tokens.

    Attributes:
        ended_at: `time.perf_counter` when the last conversation ended. Minus infinity on other
            ranks, which never have requests.
    """

    def __init__(
        self,
        engine: HybridEngine,
        prompts: Sequence[Any],
        sampling: Samplings,
        environment: Environment,
        *,
        max_tokens_per_turn: int | None = None,
        names: Sequence[int] | None = None,
        goes_on: bool = False,
        **chat: Unpack[ChatArguments],
    ) -> None:
        from hybrid_engine.backends.vllm.requests import with_values

        with engine.job.agreement.phase("checking a conversation"):
            violations = _violations(prompts, sampling, max_tokens_per_turn, chat)
            require_none(violations, ArgumentError)
        engine.sharding.require_drawing()
        self._job = engine.job
        self._inference = inference = engine.inference
        self._lora = engine.adapter
        first_prompts = [prompt_of(prompt) for prompt in prompts]
        # A later turn may use all of max_tokens: room for them is checked now.
        token_ids, seeded = inference.prepare(first_prompts, sampling, chat=chat)
        with self._job.agreement.phase("looking for weights"):
            self._weights = inference.weights(goes_on=goes_on)
        self._max_tokens_per_turn = max_tokens_per_turn
        self._environment = environment
        self._chat = chat
        self._groups = [
            [
                ConversationState(
                    prompt,
                    f"prompt {name}, completion {number}",
                    # Seeds of the completions of a prompt as vLLM makes them.
                    with_values(
                        params,
                        n=1,
                        seed=None if params.seed is None else params.seed + number,
                    ),
                    context=list(context),
                )
                for number in range(params.n)
            ]
            for prompt, name, params, context in zip(
                prompts, names or range(len(prompts)), seeded, token_ids, strict=True
            )
        ]
        self._states = [state for group in self._groups for state in group]
        self._conversations: list[list[Conversation]] | None = None
        self.ended_at = -math.inf
        self._num_open = len(self._states)
        self._changed_at = time.monotonic()
        # Of conversations that wait for the other ranks: requests and answers, by their numbers.
        self._requests: dict[int, Request] = {}
        self._answers: dict[int, Future[Completion]] = {}
        self._ready: Future[dict[int, Request]] = Future()
        self._task = start_task(self._hold_all()) if engine.rank == 0 else None
        if self._task is not None:
            self._task.add_done_callback(lambda _: self._set_ready())

    # -- in the event loop of rank 0 ---------------------------------------------------------------

    async def _hold_all(self) -> None:
        # A semaphore of the event loop that runs this coroutine.
        room = asyncio.Semaphore(self._inference.most_requests)
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
        from hybrid_engine.backends.vllm.requests import Request

        await self._open(state)
        goes_on = True
        turn = 0
        while goes_on:
            turn += 1
            params = sampling_of_turn(state.sampling, state.room, self._max_tokens_per_turn, turn)
            request = Request.of(
                state.context,
                params,
                number=number,
                lora=self._lora,
                weights=self._weights,
            )
            state.add_answer(await self._answer(request, room))
            self._changed_at = time.monotonic()
            goes_on = state.gets_reply and state.add_reply(await self._reply(state))
            self._changed_at = time.monotonic()
        self._num_open -= 1
        self._set_ready_if_all_wait()

    async def _open(self, state: ConversationState) -> None:
        """Create the environment of a conversation. Raises ArgumentError if it fails."""
        from hybrid_engine.backends.vllm.prompts import form_of

        respond = await self._called(state, self._environment, state.prompt)
        if not callable(respond):
            raise ArgumentError.of(
                "environment",
                f"for {state.place} it returned {shortened(respond)}",
                "Return a function that takes an answer and returns the reply",
                code="not-callable",
            )
        state.respond = respond
        prompt = prompt_of(state.prompt)
        state.messages = list(prompt) if form_of(prompt) == "a chat" else None

    async def _reply(self, state: ConversationState) -> list[int] | None:
        """Return the token ids of the reply to the last answer, and note its messages."""
        from hybrid_engine.backends.vllm.prompts import form_of

        reply = await self._called(state, state.respond, state.turns[-1])
        if reply is None:
            return None
        # A reply that does not fit is dropped anyway. Its length must not fail the checks.
        room = max(1, state.room)
        try:
            token_ids = self._token_ids(reply, state, room)
            if not token_ids:
                raise ValueError("the reply has no tokens; None would end the conversation")
            token_ids = token_ids[:room]
            self._inference.check_prompts([token_ids], 1)
        except (ConfigError, ValueError) as error:
            raise ArgumentError.of(
                "environment",
                f"for {state.place}: {error}",
                "Reply with messages, a text, token ids, or None to end the conversation",
                code="invalid-reply",
            ) from error
        if state.messages is not None:
            state.last_reply = reply
            if form_of(reply) != "a chat":
                answer = state.turns[-1].token_ids
                state.last_reply = self._inference.tokenizer.decode([*answer, *token_ids])
        return token_ids

    async def _called(self, state: ConversationState, function: Any, argument: Any) -> Any:
        arguments = (argument,)
        seconds = self._job.timeout_seconds
        return await run_callback("environment", state.place, function, arguments, seconds)

    def _token_ids(self, reply: Any, state: ConversationState, room: int) -> list[int]:
        """Return the token ids of a reply, or the first `room` at least.

        Raises ValueError if it is invalid.
        """
        from hybrid_engine.backends.vllm.prompts import form_of, rendering_of

        tokenizer = self._inference.tokenizer
        form = form_of(reply)
        if form == "token ids":
            return [int(token) for token in reply]
        if form == "a text":
            return tokenizer.encode([reply], add_special_tokens=False, most_tokens=room)[0]
        if form != "a chat":
            raise ValueError(f"the reply is {form}")
        if state.messages is None:
            raise ValueError(
                "the reply has messages, but the prompt is not a chat, so there is no template "
                "to render them with"
            )
        rendering = rendering_of(self._chat, tokenizer)
        answer = state.turns[-1].token_ids
        # Some of the tokens may be drawn already.
        most = room + len(answer)
        return tokenizer.encode_reply(state.messages, answer, reply, rendering, most)

    async def _answer(self, request: Request, room: asyncio.Semaphore) -> Completion:
        """Return the answer of a server, or that of the ranks."""
        inference = self._inference
        if inference.most_requests:
            async with room:
                call = partial(inference.answer, request)
                return await asyncio.wrap_future(in_background(call, "completions"))
        answer: Future[Completion] = Future()
        self._answers[request.number] = answer
        self._requests[request.number] = request
        self._set_ready_if_all_wait()
        return await asyncio.wrap_future(answer)

    def _set_ready_if_all_wait(self) -> None:
        if self._requests and len(self._requests) == self._num_open:
            self._set_ready()

    def _set_ready(self) -> None:
        """Pass the requests on to the ranks, none after the end; also from the main thread."""
        # In the order of conversations, as completions without a seed depend on it.
        requests = dict(sorted(self._requests.items()))
        self._requests = {}
        with suppress(InvalidStateError):  # already, before a conversation failed
            self._ready.set_result(requests)

    # -- on all ranks ------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True if this rank has nothing to wait for."""
        return self._task is None or self._task.done()

    def cancel(self) -> None:
        """Make no more requests."""
        if self._task is not None:
            self._task.cancel()

    def collect(self) -> list[list[Conversation]]:
        """Wait for the conversations of each prompt, and return them.

        Raises the errors of `converse`.
        """
        if self._conversations is None:
            try:
                while requests := self._next_requests():
                    self._draw(requests)
            except BaseException:  # an interrupt, or a failure of another rank
                self.cancel()
                raise
            self._receive()
            self._conversations = [[state.result() for state in group] for group in self._groups]
        return self._conversations

    def _next_requests(self) -> dict[int, Request]:
        """Wait until rank 0 needs answers of the ranks, and return requests; none at the end."""
        from hybrid_engine.backends.vllm.requests import Request

        agreement = self._job.agreement
        agreement.rounds("conversations", self._steps())
        requests: dict[int, Request] = {}
        with agreement.phase("conversations", kind=GenerationError):
            if self._task is not None:
                requests = self._ready.result()
                self._ready = Future()
                # Otherwise the end comes later, and finds the new future.
                if self._task.done():
                    self._set_ready()  # first, for a call after an error
                    self._task.result()
        kind = dict[int, Request]
        requests, *_ = agreement.gather(requests, kind, "conversations", sys.maxsize)
        return requests

    def _draw(self, requests: Mapping[int, Request]) -> None:
        """Draw answers on all ranks, and pass them on to the conversations."""
        prompts = [request.prompt for request in requests.values()]
        with self._inference.one_call():
            drawing = self._inference.drawing_of(prompts, [*requests.values()], "global")
            groups = drawing.collect()
        for number, (answer,) in zip(requests, groups, strict=True):
            if self._task is None:
                self._states[number].add_answer(answer)
                continue
            with suppress(InvalidStateError):  # cancelled, because another conversation failed
                self._answers.pop(number).set_result(answer)

    def _receive(self) -> None:
        """Complete the conversations of this rank by what rank 0 sends."""
        from hybrid_engine.backends.vllm import Completion

        kind = list[tuple[list[Completion], bool]]
        # Where the ranks draw, each has added all answers in `_draw`.
        is_known = not self._inference.most_requests
        sent = [
            ([] if is_known else state.replies_and_answers(), state.is_cut)
            for state in self._states
            if self._task is not None
        ]
        if self._job.world_size == 1:
            return
        received = self._job.agreement.gather(sent, kind, "conversations", sys.maxsize)[0]
        if self._task is None:
            for state, (turns, is_cut) in zip(self._states, received, strict=True):
                state.is_cut = is_cut
                for turn in turns:
                    prompt = (*state.context, *turn.prompt_token_ids)
                    tokenizer = self._inference.tokenizer
                    state.add_answer(replace(turn, prompt_token_ids=prompt, tokenizer=tokenizer))

    def _steps(self) -> Iterator[None]:
        """Yield until this rank has nothing to wait for; log a long wait."""
        if self._task is None:
            return
        timeout_seconds = self._job.timeout_seconds
        for _ in steps_of(self._ready, "environment", timeout_seconds):
            seconds = time.monotonic() - self._changed_at
            if seconds > timeout_seconds:
                self._changed_at = time.monotonic()
                logger.warning(
                    "no answer and no reply in %g s: %d conversations go on",
                    timeout_seconds,
                    self._num_open,
                )
            yield


def _violations(
    prompts: Sequence[Any],
    sampling: Samplings,
    max_tokens_per_turn: int | None,
    chat: Mapping[str, Any],
) -> Violations:
    from hybrid_engine.backends.vllm.images import has_images
    from hybrid_engine.backends.vllm.prompts import form_of

    for name in _SINGLE_ANSWER_ARGUMENTS:
        if name in chat:
            yield Violation(
                name,
                "not available here: every turn begins with an answer of the model",
                "Leave it out",
                code="not-supported",
            )
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        yield Violation(
            "prompts", f"got {shortened(prompts)}", "Pass a list of prompts", code="not-a-list"
        )
        prompts = ()
    # Later turns begin with token ids, which have no images.
    for index, prompt in enumerate(map(prompt_of, prompts)):
        if form_of(prompt) == "a chat" and has_images(prompt):
            yield Violation(
                f"prompts[{index}]",
                "has images, and conversations are text alone",
                "Leave the environment out",
                code="images-unsupported",
            )
    if max_tokens_per_turn is not None:
        yield from required_whole(
            max_tokens_per_turn,
            "max_tokens_per_turn",
            "Pass a number of tokens, at least 1",
            least=1,
        )
    for params in sampling if isinstance(sampling, list | tuple) else [sampling]:
        if getattr(params, "max_tokens", None) is None:
            yield Violation(
                "sampling",
                f"got {shortened(params)}",
                "Pass Sampling or vllm.SamplingParams with max_tokens, the conversation's bound",
                code="unbounded-sampling",
            )
