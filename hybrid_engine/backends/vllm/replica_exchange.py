"""Who completes which prompts, and how completions reach the ranks that asked.

    data="global"   all ranks pass the same prompts; replica d completes every D-th, and the ranks with the same place
                    in their replicas tell each other what those completed
    data="local"    each rank passes prompts of its own; a replica completes those of its ranks, all of which have the
                    answers then, and each keeps its own

A replica of one rank has nobody to tell in the second, and a single replica nobody in the first: nothing is sent then.
Prompts go with the seeds of their random streams, so that who completes them does not matter.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from hybrid_engine.backends.vllm.engine_settings import Completion
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
TokenIds = Sequence[Sequence[int]]
Completions = list[list[Completion]]


class Request(Record, frozen=True):
    """A prompt to be completed.

    Attributes:
        prompt: token ids.
        seed: of its completions.
        sampling: how, as `requests.sampling_of` reads it.
    """

    prompt: list[int]
    seed: int | None
    sampling: bytes


Share = tuple[Sequence[Request], Callable[[Completions], Completions]]
"""What a replica completes, and what makes a rank's answers of that."""


def check_data(data: str) -> None:
    """Raise ArgumentError unless `data` is "global" or "local"."""
    if data not in ("global", "local"):
        remedy = 'Use "global" where all ranks pass the same, "local" where each rank passes its own'
        raise ArgumentError([Violation("data", f"{shortened(data)} is unknown", remedy)])


def stream_seeds(seeds: Sequence[int | None] | int | None, prompts: TokenIds, data: Data, job: Job) -> list[int | None]:
    """A number of 56 bits for each prompt, made of its seed, the prompt, and how often it came before; None without.

    `seeds` is the same on all ranks, or a list with one for each prompt.

    vLLM draws completion i by that number + i. So a completion depends on no layout and on no other prompt, equal
    prompts get different ones, and no seed shares a stream with its neighbours. Local data count as global data in
    which ranks come one after another, for which all ranks are asked (collective).
    """
    if seeds is None:
        return [None] * len(prompts)
    each = seeds if isinstance(seeds, Sequence) else [seeds] * len(prompts)
    digests = [text_digest(*map(str, prompt)) for prompt in prompts]
    num_before: Counter[int] = Counter()
    if data == "local":
        by_rank = job.agreement.gather(digests, list[int], "counting equal prompts")
        num_before.update(digest for of_rank in by_rank[: job.rank] for digest in of_rank)
    streams: list[int | None] = []
    for digest, seed in zip(digests, each, strict=True):
        streams.append(None if seed is None else text_digest(str(seed), str(digest), str(num_before[digest])))
        num_before[digest] += 1
    return streams


class ReplicaExchange:
    """Connects the ranks of a replica, and those with one place in all replicas; the groups are made at first use."""

    def __init__(self, sizes: InferenceParallelism, job: Job, tokenizer: ModelTokenizer) -> None:
        self._sizes, self._job, self._tokenizer = sizes, job, tokenizer
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
        """The completions of this rank's prompts, or of all ranks'. Collective over the job.

        Args:
            prompts: token ids.
            data: whose they are.
            settings: everything else that all ranks must give alike, and that says so in its `repr`.
            seeds: as of `stream_seeds`.
            sampling: of each prompt, for its `Request`.
            generate: completes prompts by this replica; all its ranks call it with the same.

        Raises, on all ranks, ArgumentError where they differ in what they must give alike, and GenerationError.
        """
        self._require_same(settings, prompts if data == "global" else (), data)
        streams = stream_seeds(seeds, prompts, data, self._job)
        share = self._global_share if data == "global" else self._local_share
        asked = [Request(list(prompt), own, how) for prompt, own, how in zip(prompts, streams, sampling, strict=True)]
        requests, answers_of = share(asked)
        agreement = self._job.agreement
        waiting = self._sizes.ranks_in_step(self._job.rank)
        with agreement.phase("generate", SHORT_PATIENCE, waiting, GenerationError):
            completed = generate(requests)
        with agreement.call("exchange of completions"):
            return answers_of(completed)

    def _require_same(self, settings: object, prompts: TokenIds, data: Data) -> None:
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=7)  # a number of 56 bits and its negative fit
        for prompt in prompts:
            digest.update(np.array([len(prompt), *prompt], dtype=np.int64).tobytes())
        if self._job.agreement.is_same([int.from_bytes(digest.digest(), "big")], "comparing prompts"):
            return
        problem, remedy = "the ranks differ in sampling or in `data`", "Pass the same on all ranks"
        if data == "global":
            problem = "the ranks differ in prompts, in sampling or in `data`"
            remedy = 'Pass the same on all ranks, or data="local" where each rank has prompts of its own'
        raise ArgumentError([Violation("data", problem, remedy)])

    def _local_share(self, asked: Sequence[Request]) -> Share:
        """What the ranks of this replica pass together, and how this rank finds its own completions."""
        group = self._replica
        with self._job.agreement.call("exchange of prompts"):
            by_rank = _gathered(group, self._job.rank, asked, list[Request])
        requests = [request for rank in sorted(by_rank) for request in by_rank[rank]]
        start = sum(len(by_rank[rank]) for rank in by_rank if rank < self._job.rank)
        return requests, lambda completed: completed[start : start + len(asked)]

    def _global_share(self, asked: Sequence[Request]) -> Share:
        """Every D-th prompt for each of D replicas, and how each rank gets what the others completed."""
        num, own, group = self._sizes.data, self._dp_rank, self._column

        def answers_of(completed: Completions) -> Completions:
            # all ranks have the prompts and a tokenizer
            sent = [[replace(one, prompt_token_ids=(), tokenizer=None) for one in each] for each in completed]
            by_replica = _gathered(group, own, sent, Completions)

            def whole(one: Completion, prompt: Sequence[int]) -> Completion:
                return replace(one, prompt_token_ids=tuple(prompt), tokenizer=self._tokenizer)

            return [
                [whole(one, request.prompt) for one in by_replica[index % num][index // num]]
                for index, request in enumerate(asked)
            ]

        return asked[own::num], answers_of if group is not None else lambda completed: completed

    def close(self) -> None:
        """End the groups; idempotent."""
        self._groups.close()

    @cached_property
    def _replica(self) -> RankGroup | None:
        """Of the ranks of a replica; None where it is one rank. Collective over the job at its first use."""
        return self._group(self._sizes.ranks.reshape(self._sizes.data, -1).tolist())

    @cached_property
    def _column(self) -> RankGroup | None:
        """Of the ranks with one shard and stage; None where there is one replica. Collective at its first use."""
        return self._group(self._sizes.ranks.reshape(self._sizes.data, -1).T.tolist())

    def _group(self, parts: list[list[int]]) -> RankGroup | None:
        return self._job.new_group(self._groups, parts) if len(parts[0]) > 1 else None


def _gathered(group: RankGroup | None, key: int, value: T, kind: Any) -> dict[int, T]:
    """Return what every rank of a group gives, of type `kind`, by its key; as much as users ask for."""
    if group is None:
        return {key: value}
    told = group.gather(encode((key, value), sys.maxsize), sys.maxsize)
    return dict(decode(each, tuple[int, kind], sys.maxsize) for each in told.values())
