"""Megatron-LM's own RL, whose rollouts vLLM servers answer: an `InferenceServer` of megatron.rl.

    rl_utils.get_inference_interface      launch            once, on all ranks
    rl_utils.megatron_rl_inference_mode   resume            all ranks: servers get the weights
      agents, on rank 0                     base_generate     token ids out, token ids in
                                          suspend           all ranks: training state is back
    rl_utils.rl_inference_interface_shutdown   kill

Imports megatron.rl, so only a run of train_rl.py imports it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.rl.inference import InferenceRequest, InferenceResponse, LLMChatMessage, ReturnsRaw, ReturnsTokens
from megatron.rl.server.api import InferenceServer
from megatron.training.global_vars import get_args, get_tokenizer
from pydantic import PrivateAttr

from hybrid_engine.ranks.background import in_background

logger = logging.getLogger("hybrid_engine")

SECONDS_BETWEEN_MEETINGS = 2.0
"""Time between meetings of all ranks while agents run on the first, for as long as they need."""


class Rollouts(Protocol):
    """The engine that draws completions for agents. All methods but `complete` are collective."""

    @property
    def is_first(self) -> bool:
        """Whether agents run on this rank."""

    @property
    def most_requests(self) -> int:
        """At once."""

    def publish(self) -> None:
        """Give the servers the present weights."""

    def meet(self, *, is_done: bool) -> bool:
        """Whether the first rank is done; within the timeout of the job."""

    def withdraw(self) -> None:
        """Bring training state back."""

    def complete(
        self, prompt: list[int], *, end_token: int, max_tokens: int, temperature: float, top_p: float, top_k: int
    ) -> Any:
        """Draw one completion of these tokens, from any thread; waits for it.

        Returns what has `token_ids`, with the end token where it came to that, `logprobs` of each, and
        `finish_reason`, "stop" or "length".
        """

    def end(self) -> None:
        """Release what rollouts need."""


class ServedRollouts(InferenceServer, ReturnsTokens, ReturnsRaw):
    """In place of `MegatronLocal`, with the same order of calls."""

    _rollouts: Rollouts = PrivateAttr()
    _requests: asyncio.Semaphore = PrivateAttr()
    _meetings: asyncio.Task[None] | None = PrivateAttr(None)
    _draws: bool = PrivateAttr(False)
    _epoch: int = PrivateAttr(0)

    @classmethod
    async def launch(cls, rollouts: Rollouts) -> ServedRollouts:
        server = cls()
        server._rollouts = rollouts
        server._requests = asyncio.Semaphore(rollouts.most_requests)
        return server

    def set_generation_epoch(self, generation_epoch: int) -> None:
        """The iteration by whose weights tokens are drawn from now on."""
        self._epoch = generation_epoch

    async def resume(self) -> None:
        if self._draws:
            return
        self._rollouts.publish()
        self._draws = True
        if self._rollouts.is_first:
            self._meetings = asyncio.get_running_loop().create_task(self._meet())

    async def suspend(self) -> None:
        if not self._draws:
            return
        if self._meetings is None:
            while not self._rollouts.meet(is_done=False):
                """The first rank is not done."""
        else:
            self._meetings.cancel()
            with suppress(asyncio.CancelledError):
                await self._meetings
            self._meetings = None
            self._rollouts.meet(is_done=True)
        self._draws = False
        self._rollouts.withdraw()

    async def kill(self) -> None:
        await self.suspend()
        self._rollouts.end()

    async def base_generate(self, request: InferenceRequest) -> InferenceResponse:
        """Complete a chat, up to the tokenizer's end token or to --inference-max-seq-length with its prompt."""
        if self._meetings is not None and self._meetings.done():
            self._meetings.result()  # raises what failed elsewhere
        tokenizer, wanted = get_tokenizer(), request.generation_args
        prompt = _prompt(request, tokenizer)
        longest = get_args().inference_max_seq_length
        drawing = functools.partial(
            self._rollouts.complete,
            prompt,
            end_token=tokenizer.eod,
            max_tokens=min(longest, wanted.max_tokens or longest) - len(prompt),  # Megatron's is of both
            temperature=1.0 if wanted.temperature is None else wanted.temperature,
            top_p=wanted.top_p or 1.0,
            top_k=max(wanted.top_k or 0, 0),
        )
        try:
            async with self._requests:
                drawn = await asyncio.wrap_future(in_background(drawing, "rollout"))
        except Exception as error:  # Megatron's agents may hide it behind StopAsyncIteration
            logger.error("[Reshard] a rollout failed: %s: %s", type(error).__name__, error)
            raise
        text = TextGenerationController.detokenize(tokenizer, list(drawn.token_ids))
        return InferenceResponse(
            response=LLMChatMessage(role="assistant", content=text),
            raw_text=tokenizer.detokenize(prompt) + text,
            token_ids=[*prompt, *drawn.token_ids],
            prompt_length=len(prompt),
            logprobs=list(drawn.logprobs),
            finish_reason=drawn.finish_reason,
            policy_epoch=[(0, self._epoch)],  # no request outlives a switch
            kv_cache_epoch=[(0, self._epoch)],
            num_evictions=0,
        )

    async def _meet(self) -> None:
        while True:
            self._rollouts.meet(is_done=False)
            await asyncio.sleep(SECONDS_BETWEEN_MEETINGS)


def _prompt(request: InferenceRequest, tokenizer: Any) -> list[int]:
    """Token ids of a chat, as Megatron's own server makes them."""
    if getattr(tokenizer, "chat_template", None) is None:
        tokens = tokenizer.tokenize("\n".join(message.content for message in request.prompt))
    else:
        tools = {} if request.tools is None else {"tools": request.tools}
        messages = [message.model_dump() for message in request.prompt]
        made = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, **tools)
        tokens = made["input_ids"] if isinstance(made, Mapping) else made
    start = [] if tokenizer.bos is None or get_args().rl_skip_bos_token else [tokenizer.bos]
    num_given = next((number for number, token in enumerate(tokens) if token != tokenizer.bos), len(tokens))
    return [*start, *tokens[num_given:]]
