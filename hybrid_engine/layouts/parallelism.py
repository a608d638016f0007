"""Parallel sizes of both sides: one field for each size, with every name that it has elsewhere beside it.

                         TrainParallelism.tensor                       InferenceParallelism.tensor
    configuration        actor_config.tensor_model_parallel_size       generate_config.infer_tensor_parallel_size
    the engine's own     tensor_model_parallel_size (Megatron)         tensor_parallel_size (vLLM)

Whoever needs another name of a size derives it from here, by `sizes_of` or `named`:

    config/keys.py, config/rules.py         values from the configuration; the key of what breaks a rule
    megatron_script/script_settings.py      Megatron-LM's arguments
    trainer/megatron/build.py              process groups
    backends/megatron/megatron_config.py    TransformerConfig
    backends/vllm/arguments.py              arguments of vllm.LLM
    verification/cases.py                   the configuration of a case

To add a size: a field here; its key in config/keys.py, with a docstring that says what it means; in size_rules.py, the
rule that says what it may be.

Sources of the order of ranks: megatron-core 0.16.1, `parallel_state.initialize_model_parallel`; vLLM 0.32.0,
`distributed/parallel_state.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np

from hybrid_engine.models.packing import Over

LARGEST_SIZE = 2**20
"""Upper limit of any parallel size; far beyond any job, and small enough that nothing computed from it overflows."""


Naming = Literal["key", "script", "groups", "model", "vllm"]


@dataclass(frozen=True, slots=True)
class Size:
    """One parallel size and its names; an engine's own is None where it does not take the size.

    Attributes:
        key: in `actor_config` or `generate_config`.
        script: Megatron-LM's argument.
        groups: parameter of megatron-core's `initialize_model_parallel`.
        model: field of megatron-core's TransformerConfig.
        vllm: argument of `vllm.LLM`.
        name, default: of the field that it describes.
    """

    key: str
    script: str | None = None
    groups: str | None = None
    model: str | None = None
    vllm: str | None = None
    name: str = ""
    default: Any = None


def _megatron(key: str, *, script: str = "", groups: bool = False, model: bool = True) -> Size:
    """Megatron calls a size as `key` does: its groups and its model, if they know it; its script unless said."""
    return Size(key, script or key, key if groups else None, key if model else None)


@dataclass(frozen=True)
class TrainParallelism:
    """Parallel sizes of the training side; what each means is said at its key of `ActorConfig` (config/keys.py).

    Attributes:
        world_size: number of ranks.
        cuts_whole_projections: cut parameters that some layer specs give to every tensor parallel rank whole (the down
            projections of multi-latent attention): true for megatron-core's local spec, false for Transformer Engine's.
    """

    world_size: int
    tensor: Annotated[int, _megatron("tensor_model_parallel_size", groups=True)] = 1
    pipeline: Annotated[int, _megatron("pipeline_model_parallel_size", groups=True)] = 1
    virtual_pipeline: Annotated[int | None, _megatron("virtual_pipeline_model_parallel_size", groups=True)] = None
    num_layers_in_first_pipeline_stage: Annotated[
        int | None, _megatron("num_layers_in_first_pipeline_stage", script="decoder_first_pipeline_num_layers")
    ] = None
    num_layers_in_last_pipeline_stage: Annotated[
        int | None, _megatron("num_layers_in_last_pipeline_stage", script="decoder_last_pipeline_num_layers")
    ] = None
    account_for_embedding_in_pipeline_split: Annotated[bool, _megatron("account_for_embedding_in_pipeline_split")] = (
        False
    )
    account_for_loss_in_pipeline_split: Annotated[bool, _megatron("account_for_loss_in_pipeline_split")] = False
    pipeline_layout: Annotated[str | None, _megatron("pipeline_model_parallel_layout")] = None
    noop_layers: Annotated[tuple[int, ...], Size("noop_layers")] = ()
    hybrid_layer_pattern: Annotated[str | None, _megatron("hybrid_layer_pattern", model=False)] = None
    # What a rank holds does not depend on it, and megatron-core's own attention refuses more than 1: not the model's.
    context: Annotated[int, _megatron("context_parallel_size", groups=True, model=False)] = 1
    expert: Annotated[int, _megatron("expert_model_parallel_size", groups=True)] = 1
    expert_tensor: Annotated[int | None, _megatron("expert_tensor_parallel_size", groups=True)] = None
    make_vocab_size_divisible_by: Annotated[int, _megatron("make_vocab_size_divisible_by", model=False)] = 128
    cuts_whole_projections: bool = False

    @property
    def data(self) -> int:
        """Data parallel size of dense layers."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def expert_cut(self) -> int:
        """Ranks that split each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_data(self) -> int:
        """Data parallel size of experts."""
        return self.world_size // (self.expert_cut * self.expert * self.pipeline)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Global ranks [pipeline, data, context, tensor]: the rank at each place of the groups of dense layers."""
        return np.arange(self.world_size).reshape(self.pipeline, self.data, self.context, self.tensor)

    @cached_property
    def expert_ranks(self) -> np.ndarray:
        """Global ranks [pipeline, data, expert, expert tensor]: the same for the groups of the experts."""
        return np.arange(self.world_size).reshape(self.pipeline, self.expert_data, self.expert, self.expert_cut)

    def num_parts(self, over: Over) -> int:
        """How many ranks share a parameter that is cut over this group."""
        return {Over.NONE: 1, Over.TENSOR: self.tensor, Over.EXPERT_TENSOR: self.expert_cut}[over]

    def padded_vocabulary(self, size: int) -> int:
        """Rows of the embedding of `size` tokens over all tensor parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * self.tensor
        return -(-size // multiple) * multiple


@dataclass(frozen=True)
class ShardedParallelism:
    """Sizes of a training side that FSDP2 shards: consecutive ranks shard every parameter, each group of them a copy.

    Attributes:
        world_size: number of ranks.
        replicas: number of copies (HSDP).
    """

    world_size: int
    replicas: int = 1

    @property
    def num_shards(self) -> int:
        """Ranks that shard one copy."""
        return self.world_size // self.replicas

    @property
    def data(self) -> int:
        """Data parallel size: every rank trains on sequences of its own."""
        return self.world_size


VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this and cuts the padded one."""


@dataclass(frozen=True, slots=True)
class InferencePlace:
    """One rank's place in vLLM.

    Attributes:
        position: number in vLLM's own order.
        instance: of those that know nothing of each other.
        tp_rank, pp_rank, dp_rank: shard, stage and, over all instances, replica.
    """

    position: int
    instance: int
    tp_rank: int
    pp_rank: int
    dp_rank: int


@dataclass(frozen=True)
class InferenceParallelism:
    """Parallel sizes of the inference side.

    Positions count tensor parallel ranks first, then pipeline stages, then replicas. With expert parallelism, EP / TP
    consecutive replicas are one vLLM instance: they share the experts and step together.

    Attributes:
        world_size: number of ranks.
        rank_order: the global rank at each position; None: rank r at position r.
    """

    world_size: int
    tensor: Annotated[int, Size("infer_tensor_parallel_size", vllm="tensor_parallel_size")] = 1
    pipeline: Annotated[int, Size("infer_pipeline_parallel_size", vllm="pipeline_parallel_size")] = 1
    expert: Annotated[int, Size("infer_expert_parallel_size")] = 1
    rank_order: tuple[int, ...] | None = None

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that answer a request together."""
        return self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Replicas, whether they share experts or not."""
        return self.world_size // self.ranks_per_replica

    @property
    def replicas_per_instance(self) -> int:
        """Consecutive replicas that share the experts."""
        return self.expert // self.tensor if self.expert > 1 else 1

    @property
    def ranks_per_instance(self) -> int:
        """Ranks that know of each other in vLLM."""
        return self.ranks_per_replica * self.replicas_per_instance

    @cached_property
    def ranks(self) -> np.ndarray:
        """Global ranks [instance, replica, pipeline, tensor]: the rank at each place."""
        order = range(self.world_size) if self.rank_order is None else self.rank_order
        return np.array(order, dtype=np.int64).reshape(-1, self.replicas_per_instance, self.pipeline, self.tensor)

    def place_of(self, rank: int) -> InferencePlace:
        """Where a global rank stands."""
        position = int(np.flatnonzero(self.ranks == rank)[0])
        instance, replica, pp_rank, tp_rank = (int(axis) for axis in np.unravel_index(position, self.ranks.shape))
        return InferencePlace(
            position,
            instance,
            tp_rank,
            pp_rank,
            dp_rank=instance * self.replicas_per_instance + replica,
        )

    def ranks_in_step(self, rank: int) -> list[int]:
        """The ranks of a rank's instance, which wait for each other in every step, itself included."""
        return sorted(self.ranks[self.place_of(rank).instance].ravel().tolist())

    @staticmethod
    def padded_vocabulary(size: int) -> int:
        """Rows of the embedding of `size` tokens over all tensor parallel ranks."""
        return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


Parallelism = TrainParallelism | InferenceParallelism


def sizes_of(side: type[Parallelism]) -> tuple[Size, ...]:
    """The sizes of a side, in the order of its fields."""
    hints = get_type_hints(side, include_extras=True)
    return tuple(
        replace(note, name=each.name, default=each.default)
        for each in fields(side)
        for note in getattr(hints[each.name], "__metadata__", ())
    )


def named(sizes: Parallelism, naming: Naming) -> dict[str, Any]:
    """All values by one kind of their names; those without such a name are left out."""
    return {name: getattr(sizes, size.name) for size in sizes_of(type(sizes)) if (name := getattr(size, naming))}
