"""Chooses the sizes that a configuration leaves out: pairs of layouts that fit, the best of them planned.

    sizes that the rules allow  ->  memory of each pair, by counting  ->  order  ->  the first NUM_ROWS through plan_job

Sizes that the configuration has are kept. Searched are, in training, TP (within a host), PP (with uneven ends where the
layers do not divide), EP, ETP (1 or TP), sequence parallelism with TP, or FSDP2's replicas; in generation TP (within a
host), PP, EP, and `gpu_memory_utilization`: the most that leaves VLLM_RESERVE. Context parallelism and virtual stages
stay as they are.

Pairs that leave RESERVE of the device in every phase come first, then those that merely fit. Among them the order is
that of `cost`, in doublings; lower is better. A replica over twice as many ranks communicates more for the same tokens,
and half the cache is half the sequences at once, so that each doubling and each halving counts one:

    train   log2(TP x PP x CP), or log2(shards) with FSDP2; and where a group that shares experts is larger than a host,
            log2(EP x ETP / ranks of a host)
    infer   log2(ranks of a vLLM instance x PP): stages each get a part of the sequences that are decoded together
    cache   log2(most tokens of all pairs / tokens), in all replicas' caches, each for `max_num_seqs` at most

Of equals those with a quicker switch come first, then those with fewer activations, then those with more memory left.
A pair whose generation has the weights where training has them receives next to nothing, which a count without layouts
does not show: up to MOST_IN_PLACE of the rows are such pairs, the first by `train` and `cache`, wherever they are in
the order. No rate of computation is in it: it is a rule of thumb, not a prediction, and was never compared with a GPU.
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

from hybrid_engine.advisor.answer import JobVerdict, sizes_as_dict
from hybrid_engine.advisor.cluster_plan import (
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
from hybrid_engine.config import ActorConfig, FsdpConfig, GenerateConfig, HybridConfig, find_violations
from hybrid_engine.config.job_rules import critic_of, megatron_state, what_stays
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.inference import InferenceElements, inference_side
from hybrid_engine.layouts.memory import GIB, MIB, TrainingMemory, largest_shard
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism, sizes_of
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.layouts.stages import UNEVEN
from hybrid_engine.layouts.training import TrainingElements
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

RESERVE = 6 * GIB
"""Bytes of a device for what is not counted: context, communicators, workspaces, captured graphs (2 to 6 GiB)."""
VLLM_RESERVE = 8 * GIB
"""The same beside a share of vLLM that is chosen: vLLM takes it whole, and what is not counted is an estimate."""
NUM_ROWS, MOST_ALIKE, MOST_IN_PLACE = 8, 3, 2
"""Pairs that are planned; how many of them may share a layout of either side; how many are there for weights that stay
in place."""
_MOST_REFUSED = 50
"""Pairs that break a rule, after which the search gives up: a rule that no size can satisfy is broken."""
_TRAIN = {size.name: size.key for size in sizes_of(TrainParallelism)}
_INFER = {size.name: size.key for size in sizes_of(InferenceParallelism)}
Keys = Mapping[str, Any]
Progress = Callable[[str], None]


# -- sizes -----------------------------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """Return all of them, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def uneven_ends(num_layers: int, pipeline: int) -> dict[str, int]:
    """Return the first and last stage's layers where all do not divide: fewer than the others have, as even as can be.

    Empty where they divide, and where no such ends make up for it.
    """
    left = num_layers - -(-num_layers // pipeline) * (pipeline - 2)
    if num_layers % pipeline == 0 or left < 2:
        return {}
    return {UNEVEN[0]: left - left // 2, UNEVEN[1]: left // 2}


def train_keys(actor: ActorConfig, table: ModelTable, world_size: int, ranks_per_host: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of `actor_config` for all sizes that are searched and that the size rules allow.

    Keys that are written, and sizes that are the default, are not among them.
    """
    written, dims = actor.model_fields_set, table.dims
    if actor.fsdp is not None:
        is_open = not {"replicas", "sharding_strategy"} & actor.fsdp.model_fields_set
        for replicas in divisors(world_size) if is_open else [1]:
            hybrid = {"replicas": replicas, "sharding_strategy": "HYBRID_SHARD"}
            yield {"fsdp": actor.fsdp.model_copy(update=hybrid)} if replicas > 1 else {}
        return

    def options(name: str, searched: Sequence[int | None]) -> Sequence[Any]:
        return [getattr(actor, _TRAIN[name])] if _TRAIN[name] in written else searched

    num_positions = dims.num_layers + len(actor.noop_layers)
    splits_itself = {_TRAIN[name] for name in (*UNEVEN, "pipeline_layout", "hybrid_layer_pattern")} & written
    for tensor, pipeline, expert in itertools.product(
        options("tensor", divisors(min(ranks_per_host, world_size))),
        options("pipeline", [size for size in divisors(world_size) if size <= num_positions]),
        options("expert", divisors(dims.num_experts) if dims.num_experts else [1]),
    ):
        for expert_tensor in options("expert_tensor", [None, 1] if tensor > 1 and expert > 1 else [None]):
            sizes = {"tensor": tensor, "pipeline": pipeline, "expert": expert, "expert_tensor": expert_tensor}
            sizes |= {} if splits_itself else uneven_ends(num_positions, pipeline)
            keys = {_TRAIN[name]: size for name, size in sizes.items()}
            if "sequence_parallel" not in written:
                keys["sequence_parallel"] = tensor > 1 and actor.seq_length % tensor == 0
            new = actor.model_copy(update=keys)
            if not violations(new.sizes(world_size, cuts_whole_projections=True), table):
                yield {key: value for key, value in keys.items() if value != getattr(actor, key)}


def infer_keys(
    generate: GenerateConfig, table: ModelTable, world_size: int, ranks_per_host: int
) -> Iterator[dict[str, Any]]:
    """Yield the keys of `generate_config`, as `train_keys` does."""

    def options(name: str, searched: Sequence[int]) -> Sequence[int]:
        return [getattr(generate, _INFER[name])] if _INFER[name] in generate.model_fields_set else searched

    whole, replicas = divisors(world_size), generate.infer_data_parallel_size
    for tensor, pipeline, expert in itertools.product(
        options("tensor", divisors(min(ranks_per_host, world_size))),
        options("pipeline", whole),
        options("expert", whole if table.dims.num_experts else [1]),
    ):
        keys = {_INFER["tensor"]: tensor, _INFER["pipeline"]: pipeline, _INFER["expert"]: expert}
        sizes = generate.model_copy(update=keys).sizes(world_size)
        if replicas in (None, world_size / (tensor * pipeline)) and not violations(sizes, table):
            yield {key: value for key, value in keys.items() if value != getattr(generate, key)}


def train_cost(sizes: TrainParallelism | ShardedParallelism, ranks_per_host: int) -> float:
    """Return the doublings of `train`, see the module's text."""
    if isinstance(sizes, ShardedParallelism):
        return math.log2(sizes.num_shards)
    of_experts = sizes.expert * sizes.expert_cut if sizes.expert > 1 else 1
    return math.log2(sizes.tensor * sizes.pipeline * sizes.context) + math.log2(max(1, of_experts / ranks_per_host))


def infer_cost(sizes: InferenceParallelism) -> float:
    """Return the doublings of `infer`."""
    return math.log2(sizes.ranks_per_instance * sizes.pipeline)


def _cuts_alike(train: TrainParallelism | ShardedParallelism, infer: InferenceParallelism) -> bool:
    """Whether a rank of either side has the same part of the model, but for padding and uneven stages."""
    if isinstance(train, ShardedParallelism):
        return False
    # with EP vLLM has whole experts, and without it cuts them as everything else
    experts = (infer.expert, 1) if infer.expert > 1 else (1, infer.tensor)
    return (train.tensor, train.pipeline, train.expert, train.expert_cut) == (infer.tensor, infer.pipeline, *experts)


def used_tokens(cache: CacheRoom, sizes: InferenceParallelism, max_num_seqs: int) -> int:
    """Return the tokens of all replicas' caches that `max_num_seqs` longest sequences each can fill."""
    most = max_num_seqs * cache.longest if cache.longest else cache.num_tokens
    return min(cache.num_tokens, most) * sizes.data


# -- memory of a pair ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pair:
    """One training layout and one of generation; bytes are those of the rank with most, or an upper bound of them.

    Attributes:
        config: with the sizes of both. keys: section -> those that the search chose.
        peak: on a device of `device` bytes.
        beyond: over `device_budget_gib`, and over a rank's share of its host's memory; negative within them.
        cache: vLLM's.
    """

    config: HybridConfig
    keys: Mapping[str, Keys]
    peak: int
    device: float
    beyond: float
    cache: CacheRoom

    @property
    def lacks(self) -> dict[str, float]:
        """Missing bytes, by whom: `training` and the switch, `vllm`, `limits` (see `beyond`); empty: the pair fits."""
        found = {"training": self.peak - self.device, "vllm": self.cache.lack, "limits": self.beyond}
        return {name: nbytes for name, nbytes in found.items() if nbytes > 0}

    @property
    def is_tight(self) -> bool:
        """Whether less than RESERVE is left of a device."""
        return min(self.device - self.peak, self.cache.left) < RESERVE


@dataclass(frozen=True, eq=False)
class _Train:
    keys: Keys
    config: HybridConfig
    state: TrainingMemory
    working: Working
    critic: TrainingMemory | None
    largest_part: int  # bytes, see `StoredElements`
    cost: float

    @property
    def alone(self) -> int:
        """Bytes of a training step."""
        return int((self.state.total + self.working.activations + self.working.gathered).max())


@dataclass(frozen=True, eq=False)
class _Infer:
    keys: Keys
    sizes: InferenceParallelism
    cache: CacheRoom
    largest_part: int
    max_num_seqs: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the caches of all replicas; 0 where vLLM does not start."""
        return used_tokens(self.cache, self.sizes, self.max_num_seqs) if self.cache.fits else 0


class Search:
    """All pairs of a configuration on so many ranks. Raises ConfigError where no sizes keep the rules."""

    def __init__(self, config: HybridConfig, world_size: int, cluster: Cluster) -> None:
        self.config, self.world_size, self.cluster = config, world_size, cluster
        self._device = cluster.device_gib * GIB
        self._table, hf_config = read_model(config.model)
        self._trains = list(self._train_choices())
        self._infers = list(self._infer_choices(longest_sequence(config, hf_config)))
        sides = {"actor_config": self._trains, "generate_config": self._infers}
        remedy = "Leave sizes out, or use another number of ranks"
        if found := [Violation(key, "no sizes keep the rules", remedy) for key, side in sides.items() if not side]:
            raise ConfigError(found)
        self._most_tokens = max(1, *(infer.num_tokens for infer in self._infers))

    def fitting(self, *, in_place: bool = False) -> Iterator[Pair]:
        """Yield the pairs that fit and keep all rules, in order; first those that are not tight.

        `in_place`: only those that cut the model alike on both sides, in the order of `train` and `cache` alone.

        Raises ConfigError with the first pair's findings where rules alone stand in the way, unless `in_place`.
        """
        refused: list[list[Violation]] = []
        is_any = False
        for tight in (False, True):
            for pair in self._in_order(tight, in_place):
                if pair.lacks or pair.is_tight != tight:
                    continue
                if found := find_violations(pair.config, self.world_size, weights_only=True):
                    refused.append(found)
                    if not is_any and not in_place and len(refused) == _MOST_REFUSED:
                        raise ConfigError(refused[0])
                    continue
                is_any = True
                yield pair
        if refused and not is_any and not in_place:
            raise ConfigError(refused[0])

    def nearest(self) -> Pair:
        """Return the pair that lacks least."""
        trains = sorted(self._trains, key=lambda train: train.alone)[:NUM_ROWS]
        infers = sorted(self._infers, key=lambda infer: infer.cache.lack)[:NUM_ROWS]
        pairs = (self._pair(*both) for both in itertools.product(trains, infers))
        return min(pairs, key=lambda pair: max(pair.lacks.values(), default=0))

    def cost(self, job: JobPlan) -> dict[str, float]:
        """Return the doublings of a planned pair by term, see the module's text."""
        tokens = used_tokens(job.cache, job.infer, job.config.generate_config.max_num_seqs)
        return {
            "train": train_cost(job.train, self.cluster.ranks_per_host),
            "infer": infer_cost(job.infer),
            "cache": math.log2(self._most_tokens / tokens),
        }

    def _in_order(self, tight: bool, in_place: bool) -> Iterator[Pair]:
        limit = self._device - (0 if tight else RESERVE)
        ranked = sorted(
            (
                round(
                    train.cost
                    + (0 if in_place else infer_cost(infer.sizes))
                    + math.log2(self._most_tokens / infer.num_tokens),
                    2,
                ),
                train.alone,
                number,
                position,
            )
            for number, train in enumerate(self._trains)
            for position, infer in enumerate(self._infers)
            if train.alone <= limit and infer.num_tokens
            if not in_place or _cuts_alike(train.config.train_sizes(self.world_size), infer.sizes)
        )
        return (self._pair(self._trains[number], self._infers[position]) for *_, number, position in ranked)

    def _train_choices(self) -> Iterator[_Train]:
        config, host = self.config, self.cluster.ranks_per_host
        elements, model = TrainingElements(self._table), None
        for keys in train_keys(config.actor_config, self._table, self.world_size, host):
            actor = config.actor_config.model_copy(update=keys)
            new, critic = config.model_copy(update={"actor_config": actor}), None
            sizes = new.train_sizes(self.world_size)
            if isinstance(sizes, ShardedParallelism):
                model = model or sharded_model(config, self._table)
                state = largest_shard(model, sizes, actor.params_dtype)
                part = max(model.numel_by_layer(sizes.num_shards).values())
                working = sharded_working(new, self._table, model)
            else:
                stored = elements.count(sizes)
                state = megatron_state(actor, stored, sizes)
                part = stored.largest_part
                working = Working.of_megatron(new, self._table, self.world_size)
                if config.critic_config is not None:
                    beside = critic_of(new, self.world_size)
                    own = beside.actor.sizes(self.world_size)
                    critic = megatron_state(beside.actor, TrainingElements(beside.table).count(own), own)
            if not self.cluster.has_elastic_buffers:
                state = state.leaving_whole()
            part_nbytes = part * DTYPE_NBYTES[actor.params_dtype]
            yield _Train(keys, new, state, working, critic, part_nbytes, train_cost(sizes, host))

    def _infer_choices(self, longest: int) -> Iterator[_Infer]:
        config, generate = self.config, self.config.generate_config
        elements, itemsize = InferenceElements(self._table), DTYPE_NBYTES[config.served_dtype]
        for keys in infer_keys(generate, self._table, self.world_size, self.cluster.ranks_per_host):
            sizes = generate.model_copy(update=keys).sizes(self.world_size)
            stored = elements.count(sizes)
            weights = int(stored.num_elements.max()) * itemsize
            cache = cache_room(config, self._table, sizes, self._device, weights, longest, 0)
            part_nbytes = stored.largest_part * itemsize
            yield _Infer(keys, sizes, self._beside(cache, 0), part_nbytes, generate.max_num_seqs)

    def _beside(self, cache: CacheRoom, beside: int) -> CacheRoom:
        """Return the cache with the share that is written, else with the most that leaves VLLM_RESERVE."""
        share = cache.utilization
        if not {"gpu_memory_utilization", "kv_cache_mb"} & self.config.generate_config.model_fields_set:
            share = max(1, int(100 * (self._device - VLLM_RESERVE - beside) / self._device)) / 100
        return replace(cache, utilization=share, beside=beside)

    def _pair(self, train: _Train, infer: _Infer) -> Pair:
        config, inference = self.config, np.full_like(train.state.params, infer.cache.weights)
        # a bucket is closed once it is full, and what fills it is at most one part
        bucket = config.generate_config.bucket_mb * MIB + max(train.largest_part, infer.largest_part)
        phases = job_phases(train.config, train.state, inference, bucket, train.critic, train.working)
        cache = self._beside(infer.cache, stays_beside(phases))
        keys = dict(infer.keys)
        if cache.utilization != config.generate_config.gpu_memory_utilization:
            keys["gpu_memory_utilization"] = cache.utilization
        held = [np.max(phase.total - phase.by_model.get("activations", 0)) for phase in phases.values()]
        beyond = -math.inf if config.device_budget_gib is None else max(held) - config.device_budget_gib * GIB
        if self.cluster.host_gib is not None:
            most = host_bytes(train.state, train.critic, what_stays(train.config)).max()
            ranks = min(self.cluster.ranks_per_host, self.world_size)
            beyond = max(beyond, most - self.cluster.host_gib * GIB / ranks)
        return Pair(
            train.config.model_copy(update={"generate_config": config.generate_config.model_copy(update=keys)}),
            {"actor_config": train.keys, "generate_config": keys},
            int(np.max([phase.total for phase in phases.values()])),
            self._device,
            float(beyond),
            cache,
        )


# -- what is found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """A pair that was planned. keys: section -> those that the search chose; cost: doublings by term."""

    keys: Mapping[str, Keys]
    job: JobPlan
    cost: Mapping[str, float]

    @property
    def fits(self) -> bool:
        """Whether it does, as it was planned."""
        return JobVerdict(self.job).fits

    @property
    def order(self) -> tuple[float, ...]:
        """The first row has the smallest."""
        cost, seconds = round(sum(self.cost.values()), 2), float(self.job.seconds.max())
        activations = float(self.job.working.activations.max())
        return not self.fits, self.job.left < RESERVE, cost, seconds, activations, -self.job.left

    def as_dict(self) -> dict[str, Any]:
        """Its keys, and every term of its place; bytes (of the rank with most, received on average), seconds."""
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
class Found:
    """The answer of a search.

    Attributes:
        fixed: keys that the configuration has, as `section.key: value`, and that a search would have chosen.
        rows: in order.
        nearest, mends: where there are no rows, the pair that lacks least, and the changes with which one fits.
    """

    fixed: Sequence[str]
    rows: Sequence[Row]
    nearest: Pair | None = None
    mends: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """The content of `plan --search --json`."""
        nearest = None
        if self.nearest is not None:
            keys = {section: plain(keys) for section, keys in self.nearest.keys.items()}
            nearest = {"keys": keys, "lacks": self.nearest.lacks, "mended_by": [*self.mends]}
        return {"fixed": [*self.fixed], "rows": [row.as_dict() for row in self.rows], "nearest": nearest}


def find_pairs(config: HybridConfig, world_size: int, cluster: Cluster, progress: Progress = lambda _: None) -> Found:
    """Search, and plan the first NUM_ROWS pairs. `config`: by the types of its keys (`parsed_config`).

    Raises ConfigError where nothing keeps the rules, and as `plan_job`.
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
        return Found(fixed, sorted(rows, key=lambda row: row.order))
    nearest = search.nearest()
    mends = []
    for group in _changes(config, nearest, world_size, cluster.ranks_per_host):
        progress(f"trying {group[0].text}")
        mends += [change.text for change in group if change.fits(cluster)][:1]
    return Found(fixed, [], nearest, mends)


def _varied(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Yield NUM_ROWS of them, each once, of which no more than MOST_ALIKE have the same layout of either side."""
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
class _Change:
    """A configuration, and the number of its ranks, that may fit where another does not."""

    text: str
    config: HybridConfig
    world_size: int

    def fits(self, cluster: Cluster) -> bool:
        """Try it."""
        try:
            return next(Search(self.config, self.world_size, cluster).fitting(), None) is not None
        except ConfigError:
            return False


def _changed(config: HybridConfig, *keys: str, **sections: Keys) -> HybridConfig:
    """Return a configuration without `section.key`, and with other keys in some sections."""
    values = config.model_dump(exclude_unset=True)
    for section, key in (text.split(".") for text in keys):
        values.get(section, {}).pop(key, None)
    for section, more in sections.items():
        values[section] = {**values.get(section, {}), **more}
    return HybridConfig.model_validate(values)


_SEARCHED = {*_TRAIN.values(), *_INFER.values(), "infer_data_parallel_size", "gpu_memory_utilization", "kv_cache_mb"}
_STAYING = {
    *("offload_train_param", "offload_train_grad", "offload_train_optimizer", "release_weights", "incremental"),
    "max_model_len",
}
"""Keys that keep state on the device, or make the cache's least size."""


def _written(config: HybridConfig, more: Collection[str] = ()) -> Iterator[tuple[str, str, Any]]:
    """Yield section, key and value of what the configuration has of sizes and of some more keys."""
    for section, own in (("actor_config", config.actor_config), ("generate_config", config.generate_config)):
        for key in sorted(own.model_fields_set & {*_SEARCHED, *more}):
            yield section, key, getattr(own, key)


def _changes(config: HybridConfig, nearest: Pair, world_size: int, ranks_per_host: int) -> Iterator[list[_Change]]:
    """Yield groups of changes; of a group the first that helps is enough."""
    actor = config.actor_config
    for section, key, value in _written(config, _STAYING):
        text = f"without {section}.{key}: {value}"
        yield [_Change(text, _changed(config, f"{section}.{key}"), world_size)]
    wide = 2 * ranks_per_host
    tries: list[tuple[str, Keys]] = [("generate_config", {_INFER["tensor"]: wide})]
    if actor.micro_batch_size > 1:
        tries.append(("actor_config", {"micro_batch_size": 1}))
    if actor.fsdp is not None:
        fsdp = {**actor.fsdp.model_dump(exclude_unset=True), "activation_checkpointing": True}
        tries.append(("actor_config", {"fsdp": fsdp}))
    else:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        tries += [("actor_config", full), ("actor_config", {_TRAIN["tensor"]: wide})]
    if (tokens := nearest.cache.num_tokens) > 1024 and nearest.cache.longest > tokens:
        tries.append(("generate_config", {"max_model_len": tokens // 1024 * 1024}))
    for section, keys in tries:
        text = f"{section}: {flow(keys)}"
        without = ["actor_config.recompute_modules"] if "recompute_method" in keys else []
        yield [_Change(text, _changed(config, *without, **{section: keys}), world_size)]
    yield [_Change(f"--ranks {times * world_size}", config, times * world_size) for times in (2, 4, 8, 16)]


def flow(keys: Keys) -> str:
    """Return keys as YAML has them on one line."""
    return json.dumps(plain(keys)).replace('"', "")


def plain(keys: Keys) -> dict[str, Any]:
    """Return keys with sections as mappings."""
    return {
        key: value.model_dump(exclude_unset=True) if isinstance(value, FsdpConfig) else value
        for key, value in keys.items()
    }
