"""Completions of prompts by any engine: checks, seeds, shares of ranks, and their exchange.

    prepare      prompts of any form, and sampling   checked on all ranks before anything is drawn
    begin        token ids and sampling -> Request   with its seed; no later step changes it
    Drawing      the requests of a rank's share      data="global": every D-th, on replica d of D
                                                     data="local": those of the replica's ranks
      complete   Request -> Completion               the engine: vLLM in this rank, or servers
      collect    completions of this rank's prompts, or of all, in the order of the prompts

    data="global"   all ranks pass the same prompts, and all get the completions
    data="local"    each rank passes different prompts; a replica completes those of its ranks, all
                    of which have the completions then, and each keeps those of its prompts

With servers each rank counts as a replica. A replica of one rank exchanges nothing with local data,
and a single replica exchanges nothing with global data. Requests travel with the seeds of their
random streams, so that a completion does not depend on the replica that makes it.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_engine.backends.vllm.engine_settings import Completion, TokenIds, TokenLists
from hybrid_engine.backends.vllm.images import ImagePrompt, image_faults
from hybrid_engine.backends.vllm.prompts import (
    ChatArguments,
    ModelTokenizer,
    Prompts,
    token_ids_of,
)
from hybrid_engine.backends.vllm.requests import Request, asked_for, with_values
from hybrid_engine.errors import ArgumentError, GenerationError, require_none, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.messages import decode, encode
from hybrid_engine.ports import Data
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.invitation import DrawnWith

if TYPE_CHECKING:
    import torch

    from hybrid_engine.backends.vllm.requests import AnySampling, Samplings

Completions = list[list[Completion]]


class CompletingEngine(ABC):
    """Engine that completes requests; the calls of users above it are the same for all engines.

    Attributes:
        job: the ranks.
        sizes: replicas of the ranks.
        tokenizer: of the model.
        most_requests: maximum number of concurrent requests of a rank alone, to servers; 0 if all
            ranks complete requests together.
        placeholders: token ids in whose places the model puts images and the like.
        no_images: why prompts cannot have images; "" if they can.
    """

    most_requests = 0
    placeholders: Collection[int] = ()
    no_images = ""

    def __init__(self, job: Job, sizes: InferenceParallelism, tokenizer: ModelTokenizer) -> None:
        self.job = job
        self.sizes = sizes
        self.tokenizer = tokenizer
        self.groups = ExitStack()

    @abstractmethod
    def complete(self, requests: Sequence[Request]) -> Completions:
        """Return the completions of each request, without prompts and tokenizer.

        All ranks of a replica call this together, with the same requests. With servers any rank
        calls it alone, from any thread.
        """

    @abstractmethod
    def params_of(self, sampling: AnySampling | None) -> Any:
        """Check a sampling, and return it in the engine's class. Raises ArgumentError."""

    @abstractmethod
    def check_prompts(self, prompts: TokenIds, max_tokens: int | Sequence[int]) -> None:
        """Raise ArgumentError naming prompts that are empty, too long or out of the vocabulary."""

    def weights(self, *, goes_on: bool) -> DrawnWith | None:
        """Return the weights of servers that a request asks for. Raises StateError without any.

        `goes_on`: it continues after a publish, with the next weights.
        """
        return None

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Admit one call at a time, and undo what it changed if it fails on any rank."""
        yield

    def generate_over_replicas(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        lora: str | None = None,
        attention_mask: torch.Tensor | None = None,
        data: Data = "global",
        chat: ChatArguments | None = None,
    ) -> Completions:
        """Complete prompts of any form (prompts.py), in their order, on all replicas. Collective.

        Args:
            prompts: with global data the same on every rank, each of which gets all completions;
                with local data any number of prompts of this rank, which gets their completions.
            sampling: one for all prompts or a list with one for each; `n` completions per prompt;
                default: `Sampling()`. Equal on all ranks, except for a list with local data.
                Servers take no `vllm.SamplingParams`.
            lora: name of a delivered LoRA.
            attention_mask: mask of a tensor of prompts.
            data: "global" or "local", the same on every rank.
            chat: arguments for rendering chats.

        Raises, on all ranks: ArgumentError naming every invalid prompt, StateError without weights,
        GenerationError if vLLM failed, ServerError, and RemoteError on the other ranks.
        """
        with self.one_call():
            prepared = self.prepare(prompts, sampling, attention_mask, data, chat, lora)
            return self.begin(*prepared, data, lora).collect()

    def prepare(
        self,
        prompts: Prompts,
        sampling: Samplings | None = None,
        attention_mask: torch.Tensor | None = None,
        data: Data = "global",
        chat: ChatArguments | None = None,
        lora: str | None = None,
    ) -> tuple[TokenLists, list[Any]]:
        """Return token ids and sampling of each prompt, with the seed of its random stream.

        Collective. Arguments and errors are those of `generate_over_replicas`.
        """
        is_list = isinstance(sampling, list | tuple)
        # Prompts of all ranks are checked first, so that no replica starts in vain.
        with self.job.agreement.phase("checking prompts"):
            if data not in ("global", "local"):
                raise ArgumentError.of(
                    "data",
                    f"{shortened(data)} is unknown",
                    'Use "global" where all ranks pass the same, "local" where each passes its own',
                    code="unknown-value",
                )
            token_ids = token_ids_of(prompts, self.tokenizer, attention_mask, chat)
            num = len(token_ids)
            # Also of a rank without prompts the shared one is checked, and compared.
            samplings = asked_for(sampling, num if is_list else num or 1, self.params_of)
            compared = samplings if is_list else samplings[:1]
            settings = encode((data, lora, "a list" if is_list and data == "local" else compared))
            samplings = samplings[:num]
            self.check_prompts(token_ids, [params.max_tokens or 1 for params in samplings])
            faults = image_faults(token_ids, self.placeholders, self.no_images)
            require_none(faults, ArgumentError)
        # First, because ranks with different arguments would wait for different collectives.
        self._require_same(settings, token_ids if data == "global" else (), data)
        if is_list or getattr(sampling, "seed", None) is not None:
            samplings = seeded(samplings, token_ids, None if data == "global" else self.job)
        return token_ids, samplings

    def begin(
        self,
        prompts: TokenIds,
        samplings: Sequence[AnySampling],
        data: Data = "global",
        lora: str | None = None,
        *,
        goes_on: bool = False,
    ) -> Drawing:
        """Begin to complete prompts; `collect` of the result returns the completions. Collective.

        Args:
            prompts, samplings: as `prepare` returned them.
            data, lora: as of `generate_over_replicas`.
            goes_on: see `weights`.
        """
        with self.job.agreement.phase("looking for weights"):
            # Prompts of a rank alone go to other servers than those of the rank before.
            first = 0 if data == "global" else self.job.rank
            requests = self.requests_of(prompts, samplings, lora, first, goes_on=goes_on)
        return self.drawing_of(prompts, requests, data)

    def requests_of(
        self,
        prompts: TokenIds,
        samplings: Sequence[AnySampling],
        lora: str | None = None,
        first: int = 0,
        *,
        goes_on: bool = False,
    ) -> list[Request]:
        """Return a request for each prompt, numbered from `first`; else as `begin`."""
        weights = self.weights(goes_on=goes_on)
        return [
            Request.of(prompt, params, number=number, lora=lora, weights=weights)
            for number, (prompt, params) in enumerate(zip(prompts, samplings, strict=True), first)
        ]

    def drawing_of(self, prompts: TokenIds, requests: Sequence[Request], data: Data) -> Drawing:
        """Return the drawing of these requests. Collective."""
        return Drawing(self, prompts, requests, data)

    def whole(self, prompts: TokenIds, completed: Completions) -> Completions:
        """Return what `complete` returned, with prompts and tokenizer."""
        return [
            [
                replace(
                    completion,
                    prompt_token_ids=tuple(prompt),
                    tokenizer=self.tokenizer,
                    image_inputs=prompt.inputs if isinstance(prompt, ImagePrompt) else {},
                )
                for completion in group
            ]
            for prompt, group in zip(prompts, completed, strict=True)
        ]

    def answer(self, request: Request) -> Completion:
        """Return the one completion of a request to a server. From any thread."""
        ((completion,),) = self.whole([request.prompt], self.complete([request]))
        return completion

    def _require_same(self, settings: bytes, prompts: TokenIds, data: Data) -> None:
        # 7 bytes, so that the number and its negative fit into 64 bits.
        digest = hashlib.blake2b(settings, digest_size=7)
        for prompt in prompts:
            digest.update(np.array([len(prompt), *prompt], dtype=np.int64).tobytes())
            digest.update("".join(_images_text(prompt)).encode())
        number = int.from_bytes(digest.digest(), "big")
        if self.job.agreement.is_same([number], "comparing prompts"):
            return
        if data == "global":
            problem = "the ranks differ in prompts, in sampling or in `data`"
            remedy = (
                'Pass the same on all ranks, or data="local" where each rank has its own prompts'
            )
        else:
            problem = "the ranks differ in sampling or in `data`"
            remedy = "Pass the same on all ranks"
        raise ArgumentError.of("data", problem, remedy, code="ranks-differ")

    @cached_property
    def replica(self) -> RankGroup | None:
        """The group of this replica's ranks; None for one rank.

        Its first use is collective over the job.
        """
        parts = self.sizes.ranks.reshape(self.sizes.data, -1).tolist()
        return self.job.new_group(self.groups, parts) if len(parts[0]) > 1 else None


class Drawing:
    """Completions of the prompts of a call. All methods are collective over the job.

    Args:
        engine: completes requests.
        prompts: token ids of the prompts of this call, on this rank.
        requests: for each of them.
        data: "global" if all ranks have the same prompts.
    """

    def __init__(
        self,
        engine: CompletingEngine,
        prompts: TokenIds,
        requests: Sequence[Request],
        data: Data,
    ) -> None:
        self.engine = engine
        self._prompts = prompts
        self._is_global = data == "global"
        self._answers: Completions | None = None
        self._start = 0
        rank = engine.job.rank
        if self._is_global:
            self.share = requests[engine.sizes.place_of(rank).dp_rank :: engine.sizes.data]
            return
        by_rank = {rank: requests}
        with engine.job.agreement.call("exchange of prompts"):
            if engine.replica is not None:
                messages = engine.replica.gather(encode(requests, sys.maxsize), sys.maxsize)
                # In rank order, because all ranks of a replica pass vLLM the same requests.
                by_rank = {
                    peer: decode(messages[peer], list[Request], sys.maxsize)
                    for peer in sorted(messages)
                }
        self.share = [request for of_rank in by_rank.values() for request in of_rank]
        self._start = sum(len(by_rank[peer]) for peer in by_rank if peer < rank)

    def completed(self) -> Completions:
        """Return the completions of this rank's share. Not collective over replicas."""
        return self.engine.complete(self.share)

    def collect(self) -> Completions:
        """Return the completions of each prompt; in every call the same, or the error.

        Raises the errors of `generate_over_replicas`.
        """
        if self._answers is None:
            engine = self.engine
            agreement = engine.job.agreement
            waiting = engine.sizes.ranks_in_step(engine.job.rank)
            with agreement.phase("generate", SHORT_PATIENCE, waiting, GenerationError):
                completed = self.completed()
            self._answers = engine.whole(self._prompts, self._exchanged(completed))
        return self._answers

    def _exchanged(self, completed: Completions) -> Completions:
        """Return the completions of this rank's prompts, given those of its share."""
        if not self._is_global:
            return completed[self._start : self._start + len(self._prompts)]
        sizes = self.engine.sizes
        if sizes.data == 1:
            return completed
        job = self.engine.job
        # The ranks of a replica have the same completions.
        senders = sizes.ranks.reshape(sizes.data, -1)[:, 0].tolist()
        sent = completed if job.rank in senders else []
        by_rank = job.agreement.gather(sent, Completions, "exchange of completions", sys.maxsize)
        return [
            by_rank[senders[index % sizes.data]][index // sizes.data]
            for index in range(len(self._prompts))
        ]


def seeded(samplings: Sequence[Any], prompts: TokenIds, job: Job | None = None) -> list[Any]:
    """Return the sampling of each prompt with the seed of its random stream, if it has a seed.

    The 56-bit seed is derived from the sampling's, the prompt, and the number of equal prompts
    before it. vLLM draws completion i with that seed + i. So a completion does not depend on the
    layout or on other prompts, equal prompts get different completions, and neighbouring seeds
    share no stream.

    `job`: for local data, which count as global data in rank order; then this is collective.
    """
    if job is None and all(params.seed is None for params in samplings):
        return [*samplings]
    digests = [text_digest(*map(str, prompt), *_images_text(prompt)) for prompt in prompts]
    num_before: Counter[int] = Counter()
    if job is not None:
        # Equal prompts of lower ranks come before those of this rank.
        by_rank = job.agreement.gather(digests, list[int], "counting equal prompts")
        for earlier in by_rank[: job.rank]:
            num_before.update(earlier)
    streams = []
    for digest, params in zip(digests, samplings, strict=True):
        seed = params.seed
        if seed is not None:
            seed = text_digest(str(seed), str(digest), str(num_before[digest]))
            params = with_values(params, seed=seed)
        streams.append(params)
        num_before[digest] += 1
    return streams


def _images_text(prompt: Sequence[int]) -> tuple[str, ...]:
    """Return a digest of the images of a prompt, if it has any."""
    return (prompt.digest,) if isinstance(prompt, ImagePrompt) else ()
