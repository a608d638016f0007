"""Search for the sizes that a configuration leaves out: pairs of layouts that fit, best first.

    sizes that satisfy the rules  ->  memory of each pair, by counting  ->  order
        ->  the first NUM_ROWS through plan_job

Sizes in the configuration are kept. The search covers, in training, TP (within a host), PP (with
uneven ends if it does not divide the layers), EP, ETP (1 or TP), sequence parallelism with TP, or
FSDP2's replicas; in generation TP (within a host), PP, EP, and `gpu_memory_utilization`: the
largest value that leaves VLLM_RESERVE. Context parallelism and virtual stages are not changed.

Pairs that leave RESERVE of the device in every phase come first, then others that fit. Within each
group the order is that of `cost`, in doublings; lower is better. A replica over twice as many ranks
communicates more for the same tokens, and half the cache holds half the sequences, so each doubling
and each halving counts one:

    train   log2(TP x PP x CP), or log2(shards) with FSDP2; and if a group that shares experts is
            larger than a host, log2(EP x ETP / ranks of a host)
    infer   log2(ranks of a vLLM instance x PP): each stage gets a part of the sequences that are
            decoded together
    cache   log2(maximum tokens of all pairs / tokens), in the caches of all replicas, each counted
            up to `max_num_seqs` sequences

Ties are ordered by time of a switch, then by activations, then by memory left. If generation has
its weights where training has them, a switch moves almost nothing, which counting without layouts
does not show: up to MOST_IN_PLACE rows are such pairs, the best by `train` and `cache`, regardless
of their place in the order. The order contains no rate of computation: it is a rule of thumb, not a
prediction, and was never compared with a GPU.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid_engine.config import (
    FsdpConfig,
    HybridConfig,
    find_violations,
)
from hybrid_engine.config.job_rules import critic_of, megatron_state, what_stays
from hybrid_engine.config.rules import JobContext
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.inference import InferenceElements, inference_side
from hybrid_engine.layouts.kv_cache import layer_caches
from hybrid_engine.layouts.memory import GIB, MIB, TrainingMemory, largest_shard
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
)
from hybrid_engine.layouts.training import TrainingElements
from hybrid_engine.models.families import require_written
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.tools.plan.answer import JobVerdict, sizes_as_dict
from hybrid_engine.tools.plan.cluster_plan import (
    CacheRoom,
    Cluster,
    JobPlan,
    Working,
    cache_room,
    host_bytes,
    job_phases,
    longest_sequence,
    plan_job,
    sharded_model,
    sharded_working,
    stays_beside,
)
from hybrid_engine.tools.plan.searched_sizes import (
    INFER_KEYS,
    TRAIN_KEYS,
    infer_cost,
    infer_keys,
    split_alike,
    train_cost,
    train_keys,
)

RESERVE = 6 * GIB
"""Bytes of a device for uses that are not counted, 2 to 6 GiB.

These are the context, communicators, workspaces and captured graphs."""
VLLM_RESERVE = 8 * GIB
"""The same if the search chooses vLLM's share, which vLLM uses fully, next to estimated bytes."""
NUM_ROWS = 8
"""Number of planned pairs."""
MOST_ALIKE = 3
"""Maximum number of rows with the same layout of a side."""
MOST_IN_PLACE = 2
"""Maximum number of rows that are chosen because weights stay in place."""
_MOST_REFUSED = 50
"""Number of refused pairs that ends the search: a rule is broken that no size can satisfy."""
Keys = Mapping[str, Any]
Progress = Callable[[str], None]


# -- memory of a pair ------------------------------------------------------------------------------


def used_tokens(cache: CacheRoom, sizes: InferenceParallelism, max_num_seqs: int) -> int:
    """Return the tokens in all caches, each limited to `max_num_seqs` of the longest sequences."""
    return min(cache.num_tokens, max_num_seqs * cache.longest) * sizes.data


@dataclass(frozen=True, eq=False)
class LayoutPair:
    """A layout of training and one of generation; bytes of the rank with most, or upper bounds.

    Attributes:
        config: configuration with the sizes of both.
        keys: section -> keys that the search chose.
        peak: peak bytes on a device.
        device: bytes of a device.
        beyond: bytes over `device_budget_gib` or over a rank's share of its host's memory; negative
            within both.
        cache: room for vLLM's KV cache.
    """

    config: HybridConfig
    keys: Mapping[str, Keys]
    peak: int
    device: float
    beyond: float
    cache: CacheRoom

    @property
    def lacks(self) -> dict[str, float]:
        """User -> missing bytes; empty if the pair fits.

        Users are `training` (with the switch), `vllm` and `limits` (see `beyond`).
        """
        lacks = {
            "training": self.peak - self.device,
            "vllm": self.cache.lack,
            "limits": self.beyond,
        }
        return {name: nbytes for name, nbytes in lacks.items() if nbytes > 0}

    @property
    def is_tight(self) -> bool:
        """True if less than RESERVE of a device is left."""
        return min(self.device - self.peak, self.cache.left) < RESERVE


@dataclass(frozen=True, eq=False)
class _Train:
    """A candidate layout of training, with its memory."""

    keys: Keys
    config: HybridConfig
    state: TrainingMemory
    working: Working
    critic: TrainingMemory | None
    largest_part: int  # bytes, see `StoredElements`
    cost: float

    @property
    def alone(self) -> int:
        """Bytes of a training step on the rank with most."""
        working = self.working.activations + self.working.gathered
        return int((self.state.total + working).max())


@dataclass(frozen=True, eq=False)
class _Infer:
    """A candidate layout of generation, with its memory."""

    keys: Keys
    sizes: InferenceParallelism
    cache: CacheRoom
    largest_part: int
    max_num_seqs: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the caches of all replicas; 0 if vLLM does not start."""
        if not self.cache.fits:
            return 0
        return used_tokens(self.cache, self.sizes, self.max_num_seqs)


class Search:
    """Pairs of layouts for a configuration on a number of ranks.

    Raises:
        ConfigError: if no sizes of a side satisfy the rules.
    """

    def __init__(self, config: HybridConfig, world_size: int, cluster: Cluster) -> None:
        self.config = config
        self.world_size = world_size
        self.cluster = cluster
        self._device = cluster.device_gib * GIB
        self._table = JobContext.of(config, world_size).table
        # Sizes are compared by rules, without a trace for each.
        require_written(self._table)
        self._trains = list(self._train_choices())
        self._infers = list(self._infer_choices(longest_sequence(config)))
        without_sizes: list[Violation] = []
        for key, choices in (("actor_config", self._trains), ("generate_config", self._infers)):
            if not choices:
                problem = "no sizes satisfy the rules"
                remedy = "Leave sizes out, or use another number of ranks"
                without_sizes.append(Violation(key, problem, remedy, code="no-valid-sizes"))
        if without_sizes:
            raise ConfigError(without_sizes)
        self._most_tokens = max(1, *(infer.num_tokens for infer in self._infers))

    def fitting(self, *, in_place: bool = False) -> Iterator[LayoutPair]:
        """Yield the pairs that fit and satisfy all rules, in order; tight pairs last.

        Args:
            in_place: yield only pairs that split the model alike on both sides, in the order of
                `train` and `cache` alone.

        Raises:
            ConfigError: with the violations of the first pair, if pairs fit but none satisfies the
                rules; not with `in_place`.
        """
        refused: list[list[Violation]] = []
        has_yielded = False
        for tight in (False, True):
            for pair in self._in_order(tight, in_place):
                if pair.lacks or pair.is_tight != tight:
                    continue
                broken = find_violations(pair.config, self.world_size, weights_only=True)
                if not broken:
                    has_yielded = True
                    yield pair
                    continue
                refused.append(broken)
                if not has_yielded and not in_place and len(refused) == _MOST_REFUSED:
                    raise ConfigError(refused[0])
        if refused and not has_yielded and not in_place:
            raise ConfigError(refused[0])

    def nearest(self) -> LayoutPair:
        """Return the pair that lacks the fewest bytes, among the smallest layouts of each side."""
        trains = sorted(self._trains, key=lambda train: train.alone)[:NUM_ROWS]
        infers = sorted(self._infers, key=lambda infer: infer.cache.lack)[:NUM_ROWS]
        pairs = [self._pair(train, infer) for train in trains for infer in infers]
        return min(pairs, key=lambda pair: max(pair.lacks.values(), default=0))

    def cost(self, job: JobPlan) -> dict[str, float]:
        """Return term -> doublings of a planned pair; see the module's docstring."""
        tokens = used_tokens(job.cache, job.infer, job.config.generate_config.max_num_seqs)
        return {
            "train": train_cost(job.train, self.cluster.ranks_per_host),
            "infer": infer_cost(job.infer),
            "cache": math.log2(self._most_tokens / tokens),
        }

    def _in_order(self, tight: bool, in_place: bool) -> Iterator[LayoutPair]:
        """Yield the pairs that may fit, in the order of the cost without layouts."""
        limit = self._device - (0 if tight else RESERVE)
        ranked = []
        for number, train in enumerate(self._trains):
            if train.alone > limit:
                continue
            train_sizes = train.config.train_sizes(self.world_size)
            for position, infer in enumerate(self._infers):
                if not infer.num_tokens:
                    continue
                if in_place and not split_alike(train_sizes, infer.sizes):
                    continue
                infer_doublings = 0 if in_place else infer_cost(infer.sizes)
                cache_doublings = math.log2(self._most_tokens / infer.num_tokens)
                cost = round(train.cost + infer_doublings + cache_doublings, 2)
                ranked.append((cost, train.alone, number, position))
        ranked.sort()
        for *_, number, position in ranked:
            yield self._pair(self._trains[number], self._infers[position])

    def _train_choices(self) -> Iterator[_Train]:
        actor = self.config.actor_config
        ranks_per_host = self.cluster.ranks_per_host
        elements = TrainingElements(self._table)
        model = None
        for keys in train_keys(actor, self._table, self.world_size, ranks_per_host):
            changed = actor.model_copy(update=keys)
            config = self.config.model_copy(update={"actor_config": changed})
            sizes = config.train_sizes(self.world_size)
            critic = None
            if isinstance(sizes, ShardedParallelism):
                model = model or sharded_model(self.config, self._table)
                state = largest_shard(model, sizes, changed.params_dtype)
                part = max(model.numel_by_layer(sizes.num_shards).values())
                working = sharded_working(config, self._table, model)
            else:
                stored = elements.count(sizes)
                state = megatron_state(changed, stored, sizes)
                part = stored.largest_part
                working = Working.of_megatron(config, self._table, self.world_size)
                if config.critic_config is not None:
                    critic = self._critic_state(config)
            if not self.cluster.has_elastic_buffers:
                state = state.leaving_whole()
            yield _Train(
                keys=keys,
                config=config,
                state=state,
                working=working,
                critic=critic,
                largest_part=part * DTYPE_NBYTES[changed.params_dtype],
                cost=train_cost(sizes, ranks_per_host),
            )

    def _critic_state(self, config: HybridConfig) -> TrainingMemory:
        critic = critic_of(config, self.world_size)
        sizes = critic.actor.sizes(self.world_size)
        stored = TrainingElements(critic.table).count(sizes)
        return megatron_state(critic.actor, stored, sizes)

    def _infer_choices(self, longest: int) -> Iterator[_Infer]:
        generate = self.config.generate_config
        elements = InferenceElements(self._table)
        itemsize = DTYPE_NBYTES[self.config.served_dtype]
        ranks_per_host = self.cluster.ranks_per_host
        for keys in infer_keys(generate, self._table, self.world_size, ranks_per_host):
            sizes = generate.model_copy(update=keys).sizes(self.world_size)
            stored = elements.count(sizes)
            weights = int(stored.num_elements.max()) * itemsize
            cache = cache_room(
                self.config,
                self._table,
                sizes,
                self._device,
                weights,
                layer_caches(self._table, sizes, itemsize),
                longest,
                0,
            )
            yield _Infer(
                keys=keys,
                sizes=sizes,
                cache=self._with_training(cache, 0),
                largest_part=stored.largest_part * itemsize,
                max_num_seqs=generate.max_num_seqs,
            )

    def _with_training(self, cache: CacheRoom, beside: int) -> CacheRoom:
        """Return the room with `beside` bytes of training state on the device.

        vLLM's share is that of the configuration, or else the largest that leaves VLLM_RESERVE.
        """
        share = cache.utilization
        share_keys = {"gpu_memory_utilization", "kv_cache_mb"}
        if not share_keys & self.config.generate_config.model_fields_set:
            free = self._device - VLLM_RESERVE - beside
            share = max(1, int(100 * free / self._device)) / 100
        return replace(cache, utilization=share, beside=beside)

    def _pair(self, train: _Train, infer: _Infer) -> LayoutPair:
        generate = self.config.generate_config
        inference = np.full_like(train.state.params, infer.cache.weights)
        # A bucket is closed when it is full, and its last part is at most the largest.
        bucket = generate.bucket_mb * MIB + max(train.largest_part, infer.largest_part)
        phases = job_phases(
            train.config,
            train.state,
            inference,
            bucket,
            train.critic,
            train.working,
        )
        cache = self._with_training(infer.cache, stays_beside(phases))
        keys = dict(infer.keys)
        if cache.utilization != generate.gpu_memory_utilization:
            keys["gpu_memory_utilization"] = cache.utilization
        beyond = -math.inf
        if self.config.device_budget_gib is not None:
            # The budget does not include activations.
            held = [
                np.max(phase.total - phase.by_model.get("activations", 0))
                for phase in phases.values()
            ]
            beyond = max(held) - self.config.device_budget_gib * GIB
        if self.cluster.host_gib is not None:
            on_host = host_bytes(train.state, train.critic, what_stays(train.config))
            num_ranks = min(self.cluster.ranks_per_host, self.world_size)
            beyond = max(beyond, on_host.max() - self.cluster.host_gib * GIB / num_ranks)
        generate = generate.model_copy(update=keys)
        return LayoutPair(
            config=train.config.model_copy(update={"generate_config": generate}),
            keys={"actor_config": train.keys, "generate_config": keys},
            peak=int(np.max([phase.total for phase in phases.values()])),
            device=self._device,
            beyond=float(beyond),
            cache=cache,
        )


# -- result ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """A planned pair.

    Attributes:
        keys: section -> keys that the search chose.
        job: the plan.
        cost: term -> doublings; see the module's docstring.
    """

    keys: Mapping[str, Keys]
    job: JobPlan
    cost: Mapping[str, float]

    @property
    def fits(self) -> bool:
        """True if the planned job fits."""
        return JobVerdict(self.job).fits

    @property
    def order(self) -> tuple[float, ...]:
        """Key by which rows are sorted, in ascending order."""
        return (
            not self.fits,
            self.job.left < RESERVE,
            round(sum(self.cost.values()), 2),
            float(self.job.seconds.max()),
            float(self.job.working.activations.max()),
            -self.job.left,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return keys, costs, seconds, and bytes of the rank with most (`received`: on average)."""
        job = self.job
        return {
            "keys": {section: plain(keys) for section, keys in self.keys.items()},
            "train": sizes_as_dict(job.train),
            "infer": sizes_as_dict(job.infer),
            "training": int(job.memory.state.total.max()),
            "activations": int((job.working.activations + job.working.gathered).max()),
            "peak": int(job.peak.max()),
            "inference": job.cache.weights,
            "vllm_step": job.cache.step,
            "cache": job.cache.room,
            "cache_tokens": job.cache.num_tokens,
            "left": job.left,
            "received": float(job.bytes.received.mean()),
            "seconds": float(job.seconds.max()),
            "cost": {**self.cost, "all": sum(self.cost.values())},
            "fits": self.fits,
        }


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Result of a search.

    Attributes:
        fixed: keys of the configuration that the search would choose otherwise, as
            `section.key: value`.
        rows: planned pairs in order.
        nearest: without rows, the pair that lacks the fewest bytes.
        mends: without rows, changes with which a pair fits.
    """

    fixed: Sequence[str]
    rows: Sequence[Row]
    nearest: LayoutPair | None = None
    mends: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `plan --search --json`."""
        nearest = None
        if self.nearest is not None:
            keys = {section: plain(keys) for section, keys in self.nearest.keys.items()}
            nearest = {"keys": keys, "lacks": self.nearest.lacks, "mended_by": [*self.mends]}
        return {
            "fixed": [*self.fixed],
            "rows": [row.as_dict() for row in self.rows],
            "nearest": nearest,
        }


def find_pairs(
    config: HybridConfig,
    world_size: int,
    cluster: Cluster,
    progress: Progress = lambda _: None,
) -> SearchResult:
    """Search pairs of layouts, and plan the first NUM_ROWS.

    Args:
        config: configuration with checked types (`parsed_config`).
        world_size: number of ranks.
        cluster: hosts, devices and links.
        progress: callback with the name of each step.

    Raises:
        ConfigError: if no sizes satisfy the rules, and as `plan_job`.
    """
    progress("counting memory of all pairs")
    search = Search(config, world_size, cluster)
    sides: dict[InferenceParallelism, SideLayout] = {}

    def inference(table: ModelTable, sizes: InferenceParallelism, dtype: str) -> SideLayout:
        if sizes not in sides:
            sides[sizes] = inference_side(table, sizes, dtype)
        return sides[sizes]

    in_place = itertools.islice(search.fitting(in_place=True), MOST_IN_PLACE)
    pairs = list(_varied(itertools.chain(in_place, search.fitting())))
    rows = []
    for number, pair in enumerate(pairs, 1):
        progress(f"planning pair {number} of {len(pairs)}")
        job = plan_job(pair.config, world_size, cluster, inference=inference)
        rows.append(Row(pair.keys, job, search.cost(job)))
    fixed = [f"{section}.{key}: {value}" for section, key, value in _written(config)]
    if rows:
        return SearchResult(fixed, sorted(rows, key=lambda row: row.order))
    nearest = search.nearest()
    mends = []
    for group in _changes(config, nearest, world_size, cluster.ranks_per_host):
        progress(f"trying {group[0].text}")
        mends += [change.text for change in group if change.fits(cluster)][:1]
    return SearchResult(fixed, [], nearest, mends)


def _varied(pairs: Iterator[LayoutPair]) -> Iterator[LayoutPair]:
    """Yield up to NUM_ROWS different pairs, at most MOST_ALIKE with the same layout of a side."""
    seen: Counter[tuple[str, str]] = Counter()
    chosen: list[Mapping[str, Keys]] = []
    for pair in pairs:
        if pair.keys in chosen:
            continue
        sides = [(section, str(sorted(keys.items()))) for section, keys in pair.keys.items()]
        if all(seen[side] < MOST_ALIKE for side in sides):
            seen.update(sides)
            chosen.append(pair.keys)
            yield pair
        if len(chosen) == NUM_ROWS:
            return


@dataclass(frozen=True)
class _KeyChange:
    """A changed configuration and number of ranks that may fit."""

    text: str
    config: HybridConfig
    world_size: int

    def fits(self, cluster: Cluster) -> bool:
        """Return whether a pair fits, by a search."""
        try:
            search = Search(self.config, self.world_size, cluster)
            return next(search.fitting(), None) is not None
        except ConfigError:
            return False


def _changed(config: HybridConfig, *keys: str, **sections: Keys) -> HybridConfig:
    """Return a configuration without the keys `section.key`, and with given keys in sections."""
    values = config.model_dump(exclude_unset=True)
    for section, key in (text.split(".") for text in keys):
        values.get(section, {}).pop(key, None)
    for section, more in sections.items():
        values[section] = {**values.get(section, {}), **more}
    return HybridConfig.model_validate(values)


_SEARCHED = {
    *TRAIN_KEYS.values(),
    *INFER_KEYS.values(),
    "infer_data_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_mb",
}
"""Keys that the search chooses, or that limit its choice."""
_STAYING = {
    "offload_train_param",
    "offload_train_grad",
    "offload_train_optimizer",
    "release_weights",
    "incremental",
    "max_model_len",
}
"""Keys that keep state on the device, or that set the smallest size of the cache."""


def _written(config: HybridConfig, more: Collection[str] = ()) -> Iterator[tuple[str, str, Any]]:
    """Yield section, key and value of all searched keys, and of `more`, that are set."""
    for name in ("actor_config", "generate_config"):
        section = getattr(config, name)
        for key in sorted(section.model_fields_set & {*_SEARCHED, *more}):
            yield name, key, getattr(section, key)


def _changes(
    config: HybridConfig, nearest: LayoutPair, world_size: int, ranks_per_host: int
) -> Iterator[list[_KeyChange]]:
    """Yield groups of changes to try; the first change of a group that fits is sufficient."""
    actor = config.actor_config
    for section, key, value in _written(config, _STAYING):
        text = f"without {section}.{key}: {value}"
        yield [_KeyChange(text, _changed(config, f"{section}.{key}"), world_size)]
    wide = 2 * ranks_per_host
    changes: list[tuple[str, Keys]] = [("generate_config", {INFER_KEYS["tensor"]: wide})]
    if actor.micro_batch_size > 1:
        changes.append(("actor_config", {"micro_batch_size": 1}))
    if actor.fsdp is not None:
        fsdp = {**actor.fsdp.model_dump(exclude_unset=True), "activation_checkpointing": True}
        changes.append(("actor_config", {"fsdp": fsdp}))
    else:
        full = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        changes += [("actor_config", full), ("actor_config", {TRAIN_KEYS["tensor"]: wide})]
    tokens = nearest.cache.num_tokens
    if tokens > 1024 and nearest.cache.longest > tokens:
        changes.append(("generate_config", {"max_model_len": tokens // 1024 * 1024}))
    for section, keys in changes:
        # recompute_modules would contradict full recomputation.
        removed = ["actor_config.recompute_modules"] if "recompute_method" in keys else []
        changed = _changed(config, *removed, **{section: keys})
        yield [_KeyChange(f"{section}: {flow(keys)}", changed, world_size)]
    more_ranks = [times * world_size for times in (2, 4, 8, 16)]
    yield [_KeyChange(f"--ranks {number}", config, number) for number in more_ranks]


def flow(keys: Keys) -> str:
    """Return keys as one line of YAML."""
    return json.dumps(plain(keys)).replace('"', "")


def plain(keys: Keys) -> dict[str, Any]:
    """Return keys with sections converted to mappings."""
    return {
        key: value.model_dump(exclude_unset=True) if isinstance(value, FsdpConfig) else value
        for key, value in keys.items()
    }
