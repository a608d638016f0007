"""Distribution of prompts over replicas, and exchange of completions between ranks.

    data="global"   all ranks pass the same prompts; replica d completes every D-th, and ranks with
                    the same place in their replicas exchange the completions
    data="local"    each rank passes different prompts; a replica completes those of its ranks, all
                    of which have the completions then, and each keeps those of its prompts

A replica of one rank exchanges nothing with local data, and a single replica exchanges nothing with
global data. Prompts travel with the seeds of their random streams, so that a completion does not
depend on the replica that makes it.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import starmap
from typing import Any, TypeVar

import numpy as np

from hybrid_engine.backends.vllm.engine_settings import Completion, TokenIds
from hybrid_engine.backends.vllm.images import ImagePrompt, PackedImage, unpacked
from hybrid_engine.backends.vllm.prompts import ModelTokenizer
from hybrid_engine.errors import ArgumentError, GenerationError, Violation, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.messages import Record, decode, encode
from hybrid_engine.ports import Data
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import Job

T = TypeVar("T")
Completions = list[list[Completion]]


class Request(Record, frozen=True):
    """A prompt to complete.

    Attributes:
        prompt: token ids.
        seed: seed of its completions.
        sampling: message for `requests.sampling_of`.
        unexpanded: token ids with one token for an image; empty without images.
        images: of the prompt.
    """

    prompt: list[int]
    seed: int | None
    sampling: bytes
    unexpanded: tuple[int, ...] = ()
    images: tuple[PackedImage, ...] = ()

    @property
    def prompted(self) -> list[int]:
        """The prompt, with its images."""
        if not self.images:
            return self.prompt
        return ImagePrompt(self.prompt, self.unexpanded, unpacked(self.images), {})


def request_of(prompt: Sequence[int], seed: int | None, sampling: bytes) -> Request:
    """Return the request for a prompt."""
    if isinstance(prompt, ImagePrompt):
        return Request(list(prompt), seed, sampling, tuple(prompt.unexpanded), tuple(prompt.packed))
    return Request(list(prompt), seed, sampling)


Share = tuple[Sequence[Request], Callable[[Completions], Completions]]
"""Requests that a replica completes, and a function from their completions to a rank's answers."""


def check_data(data: str) -> None:
    """Raise ArgumentError unless `data` is "global" or "local"."""
    if data not in ("global", "local"):
        remedy = (
            'Use "global" where all ranks pass the same, "local" where each rank passes its own'
        )
        problem = f"{shortened(data)} is unknown"
        raise ArgumentError([Violation("data", problem, remedy, code="unknown-value")])


def stream_seeds(
    seeds: Sequence[int | None] | int | None, prompts: TokenIds, data: Data, job: Job
) -> list[int | None]:
    """Return a 56-bit seed for each prompt; None for a prompt without a seed.

    It is derived from the prompt's seed, the prompt, and the number of equal prompts before it.
    vLLM draws completion i with that seed + i. So a completion does not depend on the layout or on
    other prompts, equal prompts get different completions, and neighbouring seeds share no stream.
    Local data count as global data in rank order, for which this is collective.

    `seeds` is the same on all ranks, or a list with one for each prompt.
    """
    if seeds is None:
        return [None] * len(prompts)
    seed_of = seeds if isinstance(seeds, Sequence) else [seeds] * len(prompts)
    digests = [text_digest(*map(str, prompt), *_images_text(prompt)) for prompt in prompts]
    num_before: Counter[int] = Counter()
    if data == "local":
        # Equal prompts of lower ranks come before those of this rank.
        by_rank = job.agreement.gather(digests, list[int], "counting equal prompts")
        for earlier in by_rank[: job.rank]:
            num_before.update(earlier)
    streams: list[int | None] = []
    for digest, seed in zip(digests, seed_of, strict=True):
        if seed is None:
            streams.append(None)
        else:
            streams.append(text_digest(str(seed), str(digest), str(num_before[digest])))
        num_before[digest] += 1
    return streams


def _images_text(prompt: Sequence[int]) -> tuple[str, ...]:
    """Return a digest of the images of a prompt, if it has any."""
    return (prompt.digest,) if isinstance(prompt, ImagePrompt) else ()


def sendable(completed: Completions) -> Completions:
    """Return completions without prompts and tokenizer, which all ranks have."""
    return [
        [replace(completion, prompt_token_ids=(), tokenizer=None) for completion in row]
        for row in completed
    ]


def interleaved(
    by_part: Sequence[Completions] | Mapping[int, Completions],
    prompts: TokenIds,
    tokenizer: ModelTokenizer,
) -> Completions:
    """Return the completions of all prompts, in their order.

    Args:
        by_part: results of `sendable`: part p of n has those of the prompts `p::n`.
        prompts: token ids of all prompts.
        tokenizer: of the completions.
    """
    num = len(by_part)
    answers = []
    for index, prompt in enumerate(prompts):
        row = by_part[index % num][index // num]
        answers.append(
            [
                replace(completion, prompt_token_ids=tuple(prompt), tokenizer=tokenizer)
                for completion in row
            ]
        )
    return answers


class ReplicaExchange:
    """Communication within a replica, and between ranks with the same place in all replicas.

    The process groups are made at first use.
    """

    def __init__(self, sizes: InferenceParallelism, job: Job, tokenizer: ModelTokenizer) -> None:
        self._sizes = sizes
        self._job = job
        self._tokenizer = tokenizer
        self._dp_rank = sizes.place_of(job.rank).dp_rank
        self._groups = ExitStack()

    def complete(
        self,
        prompts: TokenIds,
        data: Data,
        settings: object,
        seeds: Sequence[int | None] | int | None,
        sampling: Sequence[bytes],
        generate: Callable[[Sequence[Request]], Completions],
    ) -> Completions:
        """Return the completions of this rank's prompts, or of all prompts if data is global.

        Collective over the job.

        Args:
            prompts: token ids.
            data: "global" or "local".
            settings: other arguments that must be equal on all ranks; compared by their `repr`.
            seeds: see `stream_seeds`.
            sampling: message of each prompt for its `Request`.
            generate: completes requests on this replica; all its ranks call it with the same ones.

        Raises, on all ranks, ArgumentError if arguments differ that must be equal, and
        GenerationError.
        """
        # First, because ranks with different arguments would wait for different collectives.
        self._require_same(settings, prompts if data == "global" else (), data)
        streams = stream_seeds(seeds, prompts, data, self._job)
        requests = list(starmap(request_of, zip(prompts, streams, sampling, strict=True)))
        share_of = self._global_share if data == "global" else self._local_share
        share, answers_of = share_of(requests)
        agreement = self._job.agreement
        waiting = self._sizes.ranks_in_step(self._job.rank)
        with agreement.phase("generate", SHORT_PATIENCE, waiting, GenerationError):
            completed = generate(share)
        with agreement.call("exchange of completions"):
            return answers_of(completed)

    def _require_same(self, settings: object, prompts: TokenIds, data: Data) -> None:
        # 7 bytes, so that the number and its negative fit into 64 bits.
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=7)
        for prompt in prompts:
            digest.update(np.array([len(prompt), *prompt], dtype=np.int64).tobytes())
            digest.update("".join(_images_text(prompt)).encode())
        number = int.from_bytes(digest.digest(), "big")
        if self._job.agreement.is_same([number], "comparing prompts"):
            return
        if data == "global":
            problem = "the ranks differ in prompts, in sampling or in `data`"
            remedy = (
                'Pass the same on all ranks, or data="local" where each rank has its own prompts'
            )
        else:
            problem = "the ranks differ in sampling or in `data`"
            remedy = "Pass the same on all ranks"
        raise ArgumentError([Violation("data", problem, remedy, code="ranks-differ")])

    def _local_share(self, requests: Sequence[Request]) -> Share:
        """Return the requests of this replica's ranks, and the slice of this rank's completions."""
        group = self._replica
        rank = self._job.rank
        with self._job.agreement.call("exchange of prompts"):
            by_rank = _gathered(group, rank, requests, list[Request])
        # In rank order, because all ranks of a replica must pass vLLM the same requests.
        share = [request for peer in sorted(by_rank) for request in by_rank[peer]]
        start = sum(len(by_rank[peer]) for peer in by_rank if peer < rank)
        return share, lambda completed: completed[start : start + len(requests)]

    def _global_share(self, requests: Sequence[Request]) -> Share:
        """Return every D-th request for each of D replicas, and the exchange of completions."""
        num = self._sizes.data
        dp_rank = self._dp_rank
        group = self._column
        share = requests[dp_rank::num]
        if group is None:
            return share, lambda completed: completed

        def answers_of(completed: Completions) -> Completions:
            by_replica = _gathered(group, dp_rank, sendable(completed), Completions)
            prompts = [request.prompt for request in requests]
            return interleaved(by_replica, prompts, self._tokenizer)

        return share, answers_of

    def close(self) -> None:
        """End the groups; idempotent."""
        self._groups.close()

    @cached_property
    def _replica(self) -> RankGroup | None:
        """The group of this replica's ranks; None for one rank.

        Its first use is collective over the job.
        """
        return self._group(self._sizes.ranks.reshape(self._sizes.data, -1).tolist())

    @cached_property
    def _column(self) -> RankGroup | None:
        """The group of the ranks with the same shard and stage; None for one replica.

        Its first use is collective over the job.
        """
        return self._group(self._sizes.ranks.reshape(self._sizes.data, -1).T.tolist())

    def _group(self, parts: list[list[int]]) -> RankGroup | None:
        return self._job.new_group(self._groups, parts) if len(parts[0]) > 1 else None


def _gathered(group: RankGroup | None, key: int, value: T, kind: Any) -> dict[int, T]:
    """Gather the values of a group's ranks, of type `kind`, by key; their size is not limited."""
    if group is None:
        return {key: value}
    messages = group.gather(encode((key, value), sys.maxsize), sys.maxsize)
    return dict(decode(message, tuple[int, kind], sys.maxsize) for message in messages.values())
