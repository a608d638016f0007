"""Inference server of megatron.rl that gets its rollouts from vLLM servers.

    rl_utils.get_inference_interface      launch            once, on all ranks
    rl_utils.megatron_rl_inference_mode   resume            all ranks: servers get the weights
      agents, on rank 0                     base_generate     token ids in, token ids out
                                          suspend           all ranks: training state is back
    rl_utils.rl_inference_interface_shutdown   kill

Only a run of train_rl.py imports this module, because it imports megatron.rl.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.rl.inference import (
    InferenceRequest,
    InferenceResponse,
    LLMChatMessage,
    ReturnsRaw,
    ReturnsTokens,
)
from megatron.rl.server.api import InferenceServer
from megatron.training.global_vars import get_args, get_tokenizer
from pydantic import PrivateAttr

from hybrid_engine.ranks.background import in_background

logger = logging.getLogger("hybrid_engine")

MEETING_INTERVAL = 2.0
"""Interval between two meetings of all ranks, in seconds, while agents run on the first rank."""


class ServedRollouts(InferenceServer, ReturnsTokens, ReturnsRaw):
    """Replacement of `MegatronLocal`, with the same order of calls.

    Its completions come from a `megatron_script.rl_engine.RolloutEngine`, which is of a higher
    floor. All calls of that but `complete` are collective.
    """

    _rollouts: Any = PrivateAttr()
    _requests: asyncio.Semaphore = PrivateAttr()
    _meetings: asyncio.Task[None] | None = PrivateAttr(None)
    _is_generating: bool = PrivateAttr(False)
    _epoch: int = PrivateAttr(0)

    @classmethod
    async def launch(cls, rollouts: Any) -> ServedRollouts:
        """Return the server, once per process."""
        server = cls()
        server._rollouts = rollouts
        server._requests = asyncio.Semaphore(rollouts.most_requests)
        return server

    def set_generation_epoch(self, generation_epoch: int) -> None:
        """Set the iteration that trained the weights used from now on."""
        self._epoch = generation_epoch

    async def resume(self) -> None:
        """Send the weights to the servers, and let agents generate."""
        if self._is_generating:
            return
        self._rollouts.publish()
        self._is_generating = True
        if self._rollouts.is_first:
            loop = asyncio.get_running_loop()
            self._meetings = loop.create_task(self._meet_repeatedly())

    async def suspend(self) -> None:
        """Stop generation and bring training state back."""
        if not self._is_generating:
            return
        # Agents run on the first rank only. The other ranks wait for them in meetings.
        if self._meetings is None:
            while not self._rollouts.meet(is_done=False):
                pass
        else:
            self._meetings.cancel()
            with suppress(asyncio.CancelledError):
                await self._meetings
            self._meetings = None
            self._rollouts.meet(is_done=True)
        self._is_generating = False
        self._rollouts.withdraw()

    async def kill(self) -> None:
        """Release the resources of rollouts."""
        await self.suspend()
        self._rollouts.end()

    async def base_generate(self, request: InferenceRequest) -> InferenceResponse:
        """Complete a chat, up to the end token or --inference-max-seq-length tokens in all."""
        # A failed meeting means a failure on another rank, which this raises.
        if self._meetings is not None and self._meetings.done():
            self._meetings.result()
        tokenizer = get_tokenizer()
        sampling = request.generation_args
        prompt = _prompt(request, tokenizer)
        longest = get_args().inference_max_seq_length
        # Megatron's limits include the prompt.
        max_length = min(longest, sampling.max_tokens or longest)
        complete = partial(
            self._rollouts.complete,
            prompt,
            max_tokens=max_length - len(prompt),
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=sampling.top_p or 1.0,
            top_k=max(sampling.top_k or 0, 0),
            # Megatron knows only its tokenizer's end token. config.json may list others.
            stop_token_ids=(tokenizer.eod,),
            ignore_eos=True,
        )
        try:
            async with self._requests:
                completion = await asyncio.wrap_future(in_background(complete, "rollout"))
        # Megatron's agents may hide the error behind StopAsyncIteration, so it is logged here.
        except Exception as error:
            logger.error("[Reshard] a rollout failed: %s: %s", type(error).__name__, error)
            raise
        text = TextGenerationController.detokenize(tokenizer, list(completion.token_ids))
        return InferenceResponse(
            response=LLMChatMessage(role="assistant", content=text),
            raw_text=tokenizer.detokenize(prompt) + text,
            token_ids=[*prompt, *completion.token_ids],
            prompt_length=len(prompt),
            logprobs=list(completion.logprobs),
            finish_reason=completion.finish_reason,
            # No request outlives a switch, so all its tokens have the same weights.
            policy_epoch=[(0, self._epoch)],
            kv_cache_epoch=[(0, self._epoch)],
            num_evictions=0,
        )

    async def _meet_repeatedly(self) -> None:
        while True:
            self._rollouts.meet(is_done=False)
            await asyncio.sleep(MEETING_INTERVAL)


def _prompt(request: InferenceRequest, tokenizer: Any) -> list[int]:
    """Return the token ids of a chat, as Megatron's own server computes them."""
    if getattr(tokenizer, "chat_template", None) is None:
        tokens = tokenizer.tokenize("\n".join(message.content for message in request.prompt))
    else:
        tools = {} if request.tools is None else {"tools": request.tools}
        messages = [message.model_dump() for message in request.prompt]
        encoding = tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=True,
            **tools,
        )
        tokens = encoding["input_ids"] if isinstance(encoding, Mapping) else encoding
    # Exactly one BOS token at the start, or none.
    start = [] if tokenizer.bos is None or get_args().rl_skip_bos_token else [tokenizer.bos]
    num_bos = next(
        (number for number, token in enumerate(tokens) if token != tokenizer.bos), len(tokens)
    )
    return [*start, *tokens[num_bos:]]
