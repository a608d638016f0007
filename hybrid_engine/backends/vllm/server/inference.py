"""Servers as an engine's inference side: completions over HTTP, weights by a `WeightPublisher`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hybrid_engine.backends.vllm.completing import (
    CompletingEngine,
    Completions,
    Drawing,
)
from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling, TokenIds
from hybrid_engine.backends.vllm.prompts import ModelTokenizer, check_token_ids
from hybrid_engine.backends.vllm.requests import Request
from hybrid_engine.compute_check.logprob_check import ConfigModel
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import ArgumentError, StateError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.messages import decode
from hybrid_engine.ports import Data, Trainer
from hybrid_engine.ranks.background import in_background
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.answers import Expected, checked_choices
from hybrid_engine.serving.clients import named_server
from hybrid_engine.serving.invitation import DrawnWith
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.serving.roles import NoInference

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.requests import AnySampling

_MAX_REQUESTS = 256
"""Maximum number of concurrent requests of a rank, or of conversations to each server.

vLLM queues those above its max_num_seqs."""


class ServedInference(CompletingEngine):
    """The inference side if `generate_config.servers` names servers; replaces an `InferenceEngine`.

    Attributes:
        adaptor: a placeholder: the weights are in the servers.
    """

    trained_lora: str | None = None
    no_images = "a server takes text alone"

    def __init__(self, config: HybridConfig, job: Job, tokenizer_dir: str | None = None) -> None:
        """Check the servers' addresses. Raises ConfigError for an invalid one."""
        generate = config.generate_config
        tokenizer = ModelTokenizer(tokenizer_dir or str(config.model))
        super().__init__(job, InferenceParallelism(job.world_size), tokenizer)
        self.adaptor = NoInference()
        self._generate = generate
        settings = config.hf_config()
        # Without a limit in the configuration the servers check the prompts.
        self._vocab_size = int(settings.get("vocab_size") or 2**31)
        positions = int(settings.get("max_position_embeddings") or 2**31)
        self._longest = generate.max_model_len or positions
        self.most_requests = _MAX_REQUESTS * len(generate.servers)
        self._turns = itertools.count()
        self._publisher: WeightPublisher | None = None
        with job.agreement.phase("looking at the servers"):
            self._servers = [
                named_server(
                    server, generate.timeout_seconds, allow_public=generate.server_allow_public
                )
                for server in generate.servers
            ]

    def switch(
        self,
        trainer: Trainer,
        offloader: Offloader,
        reference: ConfigModel | None = None,
    ) -> WeightPublisher:
        """Return the publisher that replaces a `ShardingManager`. Collective."""
        self._publisher = WeightPublisher(
            trainer,
            self._servers,
            config=self._generate,
            job=self.job,
            offloader=offloader,
            reference=reference,
        )
        return self._publisher

    def params_of(self, sampling: AnySampling | None) -> Sampling:
        """Return `sampling`. Raises ArgumentError for vLLM's own parameters."""
        if sampling is None or isinstance(sampling, Sampling):
            return sampling or Sampling()
        raise ArgumentError.of(
            "sampling",
            "vLLM's own parameters cannot be sent over HTTP",
            "Pass hybrid_engine.Sampling, or send other requests to the server yourself",
            code="not-over-http",
        )

    def drawing_of(self, prompts: TokenIds, requests: Sequence[Request], data: Data) -> Drawing:
        """Return a drawing whose requests are made in the background."""
        return ServedDrawing(self, prompts, requests, data)

    def check_prompts(self, prompts: TokenIds, max_tokens: int | Sequence[int]) -> None:
        """See the base class."""
        check_token_ids(prompts, max_tokens, self._longest, self._vocab_size)

    def complete_one(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Complete one prompt for this rank alone, on each server in turn; from any thread.

        Raises ArgumentError for an invalid prompt, GenerationError, ServerError.
        """
        self.check_prompts([prompt], sampling.max_tokens or 1)
        weights = self.weights(goes_on=False)
        number = next(self._turns)
        request = Request.of(prompt, replace(sampling, n=1), number=number, weights=weights)
        return self.answer(request)

    def weights(self, *, goes_on: bool) -> DrawnWith:
        """See the base class."""
        weights = None if self._publisher is None else self._publisher.drawn_with
        if weights is None:
            raise StateError(
                "the servers have no weights of these trainers: generate in a rollout context",
                code="no-weights",
            )
        return DrawnWith(job=weights.job, version=None) if goes_on else weights

    def complete(self, requests: Sequence[Request]) -> Completions:
        """See the base class."""
        return [self._completed(request) for request in requests]

    def _completed(self, request: Request) -> list[Completion]:
        sampling: Sampling = decode(request.sampling, Sampling)
        assert request.weights is not None
        # Without a value vLLM would generate 16 tokens.
        max_tokens = sampling.max_tokens or self._longest - len(request.prompt)
        values = {name: value for name, value in asdict(sampling).items() if value is not None}
        body = {
            **values,
            "logprobs": 0 if sampling.logprobs else None,
            # A server takes values that are missing from the model's generation_config.json.
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": max_tokens,
            "prompt": request.prompt,
            "return_token_ids": True,
            # A server without a tokenizer makes no text.
            "return_tokens_as_token_ids": True,
            "vllm_xargs": request.weights.arguments(),
        }
        server = self._servers[request.number % len(self._servers)]
        expected = Expected(
            request.prompt,
            sampling.n,
            max_tokens,
            self._vocab_size,
            sampling.logprobs,
            request.weights,
        )
        return [
            Completion(
                tuple(choice.token_ids),
                tuple(choice.log_probs) if sampling.logprobs else (),
                choice.finish_reason,
                choice.stop_reason,
                drawn_text=choice.text if sampling.stop else None,
                temperature=sampling.temperature or 1.0,
                versions=choice.versions(request.weights),
            )
            for choice in checked_choices(server.complete(body), expected)
        ]

    def shutdown(self) -> None:
        """Do nothing: the servers stay up."""


class ServedDrawing(Drawing):
    """Completions that a rank requests in the background, from its creation on.

    Attributes:
        ended_at: `time.perf_counter` when a thread of this rank ended last, or at the start.
    """

    def __init__(
        self,
        engine: ServedInference,
        prompts: TokenIds,
        requests: Sequence[Request],
        data: Data,
    ) -> None:
        super().__init__(engine, prompts, requests, data)
        self._waiting = enumerate(self.share)
        self._is_cancelled = False
        self._rows: dict[int, list[Completion]] = {}
        self.ended_at = time.perf_counter()
        # Not an executor: it would be joined when the wait is interrupted, and a server that does
        # not respond would block that forever.
        num_threads = min(len(self.share), engine.most_requests)
        self._threads = [in_background(self._work, "completions") for _ in range(num_threads)]
        for thread in self._threads:
            thread.add_done_callback(self._note_end)

    def _work(self) -> None:
        """Make requests until none is left; one of several threads."""
        for number, request in self._waiting:  # each request goes to one of the threads
            if self._is_cancelled:
                return
            try:
                (self._rows[number],) = self.engine.complete([request])
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
        self._is_cancelled = True

    def completed(self) -> Completions:
        """Wait for the completions of this rank's share."""
        try:
            wait(self._threads)
        except BaseException:  # an interrupt
            self.cancel()
            raise
        for thread in self._threads:
            thread.result()
        return [self._rows[number] for number in range(len(self.share))]
