"""Servers as an engine's inference side: completions over HTTP, weights by a `WeightPublisher`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from hybrid_engine.backends.vllm.engine_settings import Completion, Sampling, TokenIds
from hybrid_engine.backends.vllm.images import require_text
from hybrid_engine.backends.vllm.prompts import (
    ChatArguments,
    ModelTokenizer,
    Prompts,
    check_token_ids,
    token_ids_of,
)
from hybrid_engine.backends.vllm.replica_exchange import (
    Completions,
    check_data,
    stream_seeds,
)
from hybrid_engine.backends.vllm.requests import asked_for
from hybrid_engine.backends.vllm.server.drawing import Drawing
from hybrid_engine.compute_check.logprob_check import ConfigModel
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import ArgumentError, ServerError, StateError, Violation
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import Data, Trainer
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.answers import Choice, Expected, checked_choices
from hybrid_engine.serving.clients import named_server
from hybrid_engine.serving.invitation import DrawnWith
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.serving.roles import NoInference

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.requests import Samplings


class ServedInference:
    """The inference side if `generate_config.servers` names servers; replaces an `InferenceEngine`.

    Attributes:
        job: the trainers' job.
        adaptor: a placeholder: the weights are in the servers.
        tokenizer: the model's.
    """

    trained_lora: str | None = None

    def __init__(self, config: HybridConfig, job: Job, tokenizer_dir: str | None = None) -> None:
        """Check the servers' addresses. Raises ConfigError for an invalid one."""
        generate = config.generate_config
        self.job = job
        self.adaptor = NoInference()
        self.tokenizer = ModelTokenizer(tokenizer_dir or str(config.model))
        self._generate = generate
        settings = config.hf_config()
        # Without a limit in the configuration the servers check the prompts.
        self._vocab_size = int(settings.get("vocab_size") or 2**31)
        positions = int(settings.get("max_position_embeddings") or 2**31)
        self._longest = generate.max_model_len or positions
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
        self, trainer: Trainer, offloader: Offloader, reference: ConfigModel | None = None
    ) -> WeightPublisher:
        """Return the publisher that replaces a `ShardingManager`. Collective."""
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
            reference=reference,
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
    ) -> Completions:
        """Complete prompts on the servers; see `InferenceEngine.generate_over_replicas`.

        Collective. `sampling` is a `Sampling`, or a list of them.
        """
        return self.begin(prompts, sampling, attention_mask, data, chat).collect()

    def begin(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        attention_mask: torch.Tensor | None = None,
        data: Data = "global",
        chat: ChatArguments | None = None,
        *,
        goes_on: bool = False,
    ) -> Drawing:
        """Begin to draw completions in the background; `collect` of the result waits for them.

        Collective. Each rank requests its share of the prompts, starting with a different server.

        Args:
            prompts, sampling, attention_mask, data, chat: as of `generate_over_replicas`.
            goes_on: completions continue after a publish, with the next weights; see
                `Completion.versions`. Otherwise the present weights draw all tokens.
        """
        token_ids, samplings = self.requests_of(prompts, sampling, attention_mask, data, chat)
        with self.job.agreement.phase("looking for weights"):
            ask = functools.partial(self._ask, weights=self._weights(goes_on))
        return Drawing(
            ask, self.job, self.tokenizer, token_ids, samplings, data, len(self._servers)
        )

    def requests_of(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        attention_mask: torch.Tensor | None = None,
        data: Data = "global",
        chat: ChatArguments | None = None,
    ) -> tuple[list[list[int]], list[Sampling]]:
        """Return token ids and sampling of each prompt, with the seed of its random stream.

        Collective. Raises ArgumentError on all ranks for invalid prompts.
        """
        with self.job.agreement.phase("checking prompts"):
            check_data(data)
            token_ids = token_ids_of(prompts, self.tokenizer, attention_mask, chat)
            require_text(token_ids)
            requested = asked_for(sampling, len(token_ids), _over_http)
            self.check_prompts(token_ids, requested.max_tokens)
        seeds = stream_seeds(requested.seeds, token_ids, data, self.job)
        samplings = [
            replace(unseeded, seed=seed)
            for unseeded, seed in zip(requested.each, seeds, strict=True)
        ]
        return token_ids, samplings

    def check_prompts(self, prompts: TokenIds, max_tokens: int | Sequence[int]) -> None:
        """Raise ArgumentError naming prompts that are empty, too long or out of the vocabulary."""
        check_token_ids(prompts, max_tokens, self._longest, self._vocab_size)

    def complete_one(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Complete one prompt for this rank alone, on each server in turn; from any thread.

        Raises ArgumentError for an invalid prompt, GenerationError, ServerError.
        """
        self.check_prompts([prompt], sampling.max_tokens or 1)
        return self._complete(next(self._turns), prompt, sampling, self._weights())

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self._servers)

    def completer(self, *, goes_on: bool) -> Callable[[int, Sequence[int], Sampling], Completion]:
        """Return a function (number, prompt, sampling) -> completion, from any thread.

        It does not check prompts. The same number reaches the same server. Collective. Raises
        StateError without weights. For `goes_on` see `begin`.
        """
        with self.job.agreement.phase("looking for weights"):
            return functools.partial(self._complete, weights=self._weights(goes_on))

    def _complete(
        self, number: int, prompt: Sequence[int], sampling: Sampling, weights: DrawnWith
    ) -> Completion:
        server = number % len(self._servers)
        ((completion,),) = self._ask(server, [prompt], replace(sampling, n=1), weights)
        return completion

    def _weights(self, goes_on: bool = False) -> DrawnWith:
        """Return the weights that a request asks for. Raises StateError if there are none."""
        weights = None if self._publisher is None else self._publisher.drawn_with
        if weights is None:
            raise StateError(
                "the servers have no weights of these trainers: generate in a rollout context",
                code="no-weights",
            )
        return DrawnWith(job=weights.job, version=None) if goes_on else weights

    def _ask(
        self,
        number: int,
        prompts: TokenIds,
        sampling: Sampling,
        weights: DrawnWith,
    ) -> Completions:
        """Complete prompts in one request to server `number`."""
        # Without a value vLLM would generate 16 tokens.
        max_tokens = sampling.max_tokens or self._longest - len(prompts[0])
        values = {name: value for name, value in asdict(sampling).items() if value is not None}
        body = {
            **values,
            "logprobs": 0 if sampling.logprobs else None,
            # A server takes values that are missing from the model's generation_config.json.
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": max_tokens,
            "prompt": [list(prompt) for prompt in prompts],
            "return_token_ids": True,
            # A server without a tokenizer makes no text.
            "return_tokens_as_token_ids": True,
            "vllm_xargs": weights.arguments(),
        }
        expected = Expected(
            len(prompts) * sampling.n, max_tokens, self._vocab_size, sampling.logprobs, weights
        )
        choices = checked_choices(self._servers[number].complete(body), expected)
        completions = []
        for index, prompt in enumerate(prompts):
            own_choices = choices[index * sampling.n : (index + 1) * sampling.n]
            completions.append(
                [self._completion(choice, prompt, sampling, weights) for choice in own_choices]
            )
        return completions

    def _completion(
        self, choice: Choice, prompt: Sequence[int], sampling: Sampling, weights: DrawnWith
    ) -> Completion:
        if choice.prompt_token_ids not in (None, list(prompt)):  # not every server returns them
            raise ServerError(
                f"choice {choice.index} completes another prompt than the one of the request",
                code="unexpected-completion",
            )
        return Completion(
            tuple(choice.token_ids),
            tuple(choice.log_probs) if sampling.logprobs else (),
            choice.finish_reason,
            choice.stop_reason,
            tuple(prompt),
            drawn_text=choice.text if sampling.stop else None,
            tokenizer=self.tokenizer,
            temperature=sampling.temperature or 1.0,
            versions=choice.versions(weights),
        )

    def shutdown(self) -> None:
        """Do nothing: the servers stay up."""


def _over_http(sampling: object) -> Sampling:
    if sampling is None or isinstance(sampling, Sampling):
        return sampling or Sampling()
    violation = Violation(
        "sampling",
        "vLLM's own parameters cannot be sent over HTTP",
        "Pass hybrid_engine.Sampling, or send other requests to the server yourself",
        code="not-over-http",
    )
    raise ArgumentError([violation])
