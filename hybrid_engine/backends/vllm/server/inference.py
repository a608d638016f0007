"""Servers as an engine's inference side: completions come over HTTP, weights by the switches of a `WeightPublisher`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling
from hybrid_engine.backends.vllm.prompts import ChatArguments, ModelTokenizer, Prompts, check_token_ids, token_ids_of
from hybrid_engine.backends.vllm.replica_exchange import check_data, stream_seeds
from hybrid_engine.backends.vllm.requests import asked_for
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import ArgumentError, GenerationError, StateError, Violation
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.messages import LIMIT
from hybrid_engine.ports import Data, NearEnd, Trainer
from hybrid_engine.ranks.background import in_background
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.answers import Choice, Expected, checked_choices
from hybrid_engine.serving.clients import named_server
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.serving.roles import NoInference

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.requests import Samplings

_PROMPTS_OF_A_REQUEST = 64
"""Servers decode requests together; one of many prompts would be parsed while nothing is decoded."""
_MOST_REQUESTS = 64
"""Under way at once, of a rank."""


class ServedInference:
    """What takes the place of an `InferenceEngine` where `generate_config.servers` names servers.

    Attributes:
        job: of the trainers.
        adaptor: nothing: weights are in the servers.
        tokenizer: the model's.
    """

    taken_before = 0
    near_end: NearEnd | None = None
    trained_lora: str | None = None

    def __init__(self, config: HybridConfig, job: Job, tokenizer_dir: str | None = None) -> None:
        """Raises ConfigError for addresses that cannot be."""
        generate = config.generate_config
        self.job, self.adaptor = job, NoInference()
        self.tokenizer = ModelTokenizer(tokenizer_dir or str(config.model))
        self._generate, self._limits = generate, config.hf_config()
        self._longest = generate.max_model_len or int(self._limits.get("max_position_embeddings") or 2**31)
        self._turns = itertools.count()
        self._publisher: WeightPublisher | None = None
        with job.agreement.phase("looking at the servers"):
            self._servers = [
                named_server(each, generate.timeout_seconds, allow_public=generate.server_allow_public)
                for each in generate.servers
            ]

    def switch(self, trainer: Trainer, offloader: Offloader) -> WeightPublisher:
        """What takes the place of a `ShardingManager`. Collective."""
        generate = self._generate
        self._publisher = WeightPublisher(
            trainer,
            self._servers,
            config=generate,
            job=self.job,
            offloader=offloader,
            pause=generate.server_pause,
            address=generate.server_address,
            allow_public=generate.server_allow_public,
            take_over=generate.server_take_over,
        )
        return self._publisher

    def generate_over_replicas(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        lora: str | None = None,
        attention_mask: torch.Tensor | None = None,
        data: Data = "global",
        chat: ChatArguments | None = None,
    ) -> list[list[Completion]]:
        """See `InferenceEngine.generate_over_replicas`; `sampling` is a `Sampling`, or a list of them. Collective.

        Each rank asks for its share of the prompts, each of another server.
        """
        job = self.job
        with job.agreement.phase("checking prompts"):
            check_data(data)
            token_ids = token_ids_of(prompts, self.tokenizer, attention_mask, chat)
            wanted = asked_for(sampling, len(token_ids), _over_http)
            self.check_prompts(token_ids, wanted.max_tokens)
        seeds = stream_seeds(wanted.seeds, token_ids, data, job)
        each = [replace(one, seed=seed) for one, seed in zip(wanted.each, seeds, strict=True)]
        step = job.world_size if data == "global" else 1
        own = slice(job.rank % step, None, step)
        with job.agreement.phase("generate", kind=GenerationError):
            completed = self._complete(token_ids[own], each[own])
        if data == "local" or step == 1:
            return completed
        sent = [[replace(one, prompt_token_ids=(), tokenizer=None) for one in of] for of in completed]
        by_rank = job.agreement.gather(sent, list[list[Completion]], "exchange of completions", LIMIT)
        return [
            [
                replace(one, prompt_token_ids=tuple(prompt), tokenizer=self.tokenizer)
                for one in by_rank[index % step][index // step]
            ]
            for index, prompt in enumerate(token_ids)
        ]

    def check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int]) -> None:
        """Raise ConfigError naming every prompt that is empty, too long or out of the vocabulary."""
        check_token_ids(prompts, max_tokens, self._longest, int(self._limits.get("vocab_size") or 2**31))

    def complete_one(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Completion of one prompt, asked by this rank alone, of each server in turn; from any thread.

        Raises ConfigError for a prompt that cannot be, GenerationError, ServerError.
        """
        self.check_prompts([prompt], sampling.max_tokens or 1)
        ((completion,),) = self._ask(next(self._turns) % len(self._servers), [prompt], replace(sampling, n=1))
        return completion

    def _complete(self, prompts: Sequence[Sequence[int]], each: Sequence[Sampling]) -> list[list[Completion]]:
        """By this rank's requests, all under way together. A request has one sampling with one seed, and one length, so
        prompts with their own are asked apart."""
        is_alike = len(set(each)) == 1 and each[0].max_tokens is not None
        size = _PROMPTS_OF_A_REQUEST if is_alike else 1
        waiting = deque(enumerate(range(0, len(prompts), size)))
        completed: dict[int, list[list[Completion]]] = {}

        def ask() -> None:
            while waiting:
                try:
                    number, start = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                server = (self.job.rank + number) % len(self._servers)
                try:
                    completed[number] = self._ask(server, prompts[start : start + size], each[start])
                except BaseException:
                    waiting.clear()  # the call fails: what nobody has asked for yet is not to be drawn
                    raise

        # An executor would be joined when the wait is interrupted, and a silent server would hold that up without end.
        asking = [in_background(ask, "completions") for _ in range(min(len(waiting), _MOST_REQUESTS))]
        try:
            wait(asking)
        finally:
            waiting.clear()
        for answer in asking:
            answer.result()
        return [of_prompt for _, of_request in sorted(completed.items()) for of_prompt in of_request]

    def _ask(self, number: int, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        values = {name: value for name, value in asdict(sampling).items() if value is not None}
        # what is not said, a server takes from the model's generation_config.json
        values |= {"logprobs": 0 if sampling.logprobs else None, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        values |= {"max_tokens": sampling.max_tokens or self._longest - len(prompts[0])}  # without any, 16 for vLLM
        body = {**values, "prompt": [list(prompt) for prompt in prompts], "return_token_ids": True}
        body["return_tokens_as_token_ids"] = True  # a server without a tokenizer makes no text
        weights = None if self._publisher is None else self._publisher.drawn_with
        if weights is None:
            raise StateError("the servers have no weights of these trainers: generate in a rollout context")
        body["vllm_xargs"] = weights.arguments()
        vocab_size = int(self._limits.get("vocab_size") or 2**31)
        expected = Expected(len(prompts) * sampling.n, values["max_tokens"], vocab_size, sampling.logprobs, weights)
        choices = checked_choices(self._servers[number].complete(body), expected)
        return [
            [self._completion(choice, prompt, sampling) for choice in choices[at * sampling.n : (at + 1) * sampling.n]]
            for at, prompt in enumerate(prompts)
        ]

    def _completion(self, choice: Choice, prompt: Sequence[int], sampling: Sampling) -> Completion:
        return Completion(
            tuple(choice.token_ids),
            tuple(choice.log_probs) if sampling.logprobs else (),
            choice.finish_reason,
            choice.stop_reason,
            tuple(prompt),
            drawn_text=choice.text if sampling.stop else None,
            tokenizer=self.tokenizer,
            temperature=sampling.temperature or 1.0,
        )

    def shutdown(self) -> None:
        """Servers are not ended."""


def _over_http(sampling: object) -> Sampling:
    if sampling is None or isinstance(sampling, Sampling):
        return sampling or Sampling()
    remedy = "Pass hybrid_engine.Sampling, or ask the server yourself for what it does not say"
    raise ArgumentError([Violation("sampling", "vLLM's own parameters do not go over HTTP", remedy)])
