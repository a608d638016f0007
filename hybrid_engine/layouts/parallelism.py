"""Parallel sizes of both sides: one field per size, annotated with all its other names.

                     TrainParallelism.tensor                 InferenceParallelism.tensor
    configuration    actor_config.                           generate_config.
                       tensor_model_parallel_size              infer_tensor_parallel_size
    the engine's     tensor_model_parallel_size (Megatron)   tensor_parallel_size (vLLM)

Modules that need another name of a size derive it from here, by `sizes_of` or `named`:

    config/keys.py, config/rules.py         values of the configuration; keys of violations
    megatron_script/script_settings.py      Megatron-LM's arguments
    trainer/megatron/build.py               process groups
    backends/megatron/megatron_config.py    TransformerConfig
    backends/vllm/arguments.py              arguments of vllm.LLM
    tools/verify/cases.py                   configurations of the cases

To add a size, add a field here, its key with a docstring in config/keys.py, and the rule with its
constraints in size_rules.py.

Sources of the order of ranks: megatron-core 0.16.1, `parallel_state.initialize_model_parallel`;
vLLM 0.32.0, `distributed/parallel_state.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np

from hybrid_engine.models.packing import Over

LARGEST_SIZE = 2**20
"""Upper limit of any parallel size. It exceeds any job and keeps computed numbers in int64."""

Naming = Literal["key", "script", "groups", "model", "vllm"]


@dataclass(frozen=True, slots=True)
class Size:
    """A parallel size and its names. A name is None if its owner does not take the size.

    Attributes:
        key: key in `actor_config` or `generate_config`.
        script: Megatron-LM's argument.
        groups: parameter of megatron-core's `initialize_model_parallel`.
        model: field of megatron-core's TransformerConfig.
        vllm: argument of `vllm.LLM`.
        name: name of the annotated field; set by `sizes_of`.
        default: default of the annotated field; set by `sizes_of`.
    """

    key: str
    script: str | None = None
    groups: str | None = None
    model: str | None = None
    vllm: str | None = None
    name: str = ""
    default: Any = None


def _megatron(key: str, *, script: str = "", groups: bool = False, model: bool = True) -> Size:
    """Return a size that Megatron names as `key`.

    Args:
        key: name in the configuration.
        script: argument of Megatron-LM, if its name differs from `key`.
        groups: True if the process groups depend on the size.
        model: True if it is a field of TransformerConfig.
    """
    return Size(
        key,
        script=script or key,
        groups=key if groups else None,
        model=key if model else None,
    )


@dataclass(frozen=True)
class TrainParallelism:
    """Parallel sizes of the training side.

    Each is documented at its key of `ActorConfig` (config/keys.py).

    Attributes:
        world_size: number of ranks.
        cuts_whole_projections: True if the layer spec cuts the parameters that others replicate on
            every tensor parallel rank (the down projections of multi-latent attention).
            megatron-core's local spec does, Transformer Engine's does not.
    """

    world_size: int
    tensor: Annotated[int, _megatron("tensor_model_parallel_size", groups=True)] = 1
    pipeline: Annotated[int, _megatron("pipeline_model_parallel_size", groups=True)] = 1
    virtual_pipeline: Annotated[
        int | None, _megatron("virtual_pipeline_model_parallel_size", groups=True)
    ] = None
    num_layers_in_first_pipeline_stage: Annotated[
        int | None,
        _megatron("num_layers_in_first_pipeline_stage", script="decoder_first_pipeline_num_layers"),
    ] = None
    num_layers_in_last_pipeline_stage: Annotated[
        int | None,
        _megatron("num_layers_in_last_pipeline_stage", script="decoder_last_pipeline_num_layers"),
    ] = None
    account_for_embedding_in_pipeline_split: Annotated[
        bool, _megatron("account_for_embedding_in_pipeline_split")
    ] = False
    account_for_loss_in_pipeline_split: Annotated[
        bool, _megatron("account_for_loss_in_pipeline_split")
    ] = False
    pipeline_layout: Annotated[str | None, _megatron("pipeline_model_parallel_layout")] = None
    noop_layers: Annotated[tuple[int, ...], Size("noop_layers")] = ()
    hybrid_layer_pattern: Annotated[str | None, _megatron("hybrid_layer_pattern", model=False)] = (
        None
    )
    # Not a field of the model's config here: a rank's layout does not depend on it, and
    # megatron-core's attention refuses values above 1.
    context: Annotated[int, _megatron("context_parallel_size", groups=True, model=False)] = 1
    expert: Annotated[int, _megatron("expert_model_parallel_size", groups=True)] = 1
    expert_tensor: Annotated[int | None, _megatron("expert_tensor_parallel_size", groups=True)] = (
        None
    )
    make_vocab_size_divisible_by: Annotated[
        int, _megatron("make_vocab_size_divisible_by", model=False)
    ] = 128
    cuts_whole_projections: bool = False

    @property
    def data(self) -> int:
        """Data parallel size of dense layers, without context parallelism."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def expert_cut(self) -> int:
        """Number of ranks that split each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def expert_data(self) -> int:
        """Data parallel size of experts."""
        return self.world_size // (self.expert_cut * self.expert * self.pipeline)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Global ranks of dense layers, int array [pipeline, data, context, tensor]."""
        # 8 ranks, PP 2, TP 2: stage 0 is ranks 0 to 3, of which (0, 1) and (2, 3) are tensor
        # parallel groups, and (0, 2) and (1, 3) are replicas.
        shape = (self.pipeline, self.data, self.context, self.tensor)
        return np.arange(self.world_size).reshape(shape)

    @cached_property
    def expert_ranks(self) -> np.ndarray:
        """Global ranks of experts, int array [pipeline, data, expert, expert tensor]."""
        shape = (self.pipeline, self.expert_data, self.expert, self.expert_cut)
        return np.arange(self.world_size).reshape(shape)

    def num_parts(self, over: Over) -> int:
        """Return the number of ranks that share a parameter cut over a group."""
        sizes = {Over.NONE: 1, Over.TENSOR: self.tensor, Over.EXPERT_TENSOR: self.expert_cut}
        return sizes[over]

    def padded_vocabulary(self, size: int) -> int:
        """Return the rows of the embedding of `size` tokens, over all tensor parallel ranks."""
        # GPT-2's 50,257 tokens with TP 2: a multiple of 256, 50,432 rows, 25,216 on each rank.
        multiple = self.make_vocab_size_divisible_by * self.tensor
        return -(-size // multiple) * multiple


@dataclass(frozen=True)
class ShardedParallelism:
    """Sizes of a training side that FSDP2 shards.

    Each group of consecutive ranks shards one copy of every parameter.

    Attributes:
        world_size: number of ranks.
        replicas: number of copies (HSDP).
    """

    world_size: int
    replicas: int = 1

    @property
    def num_shards(self) -> int:
        """Number of ranks that shard one copy."""
        return self.world_size // self.replicas

    @property
    def data(self) -> int:
        """Data parallel size: every rank trains on different sequences."""
        return self.world_size


VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this and cuts the padded rows."""

MAX_LOGIT_NBYTES = 2**28
"""Bytes of logits, in float32, that a training rank computes at a time for log-probabilities."""


@dataclass(frozen=True, slots=True)
class InferencePlace:
    """Place of one rank in vLLM.

    Attributes:
        position: rank in vLLM's order.
        instance: number of its vLLM instance. Instances do not communicate.
        tp_rank: tensor parallel shard.
        pp_rank: pipeline stage.
        dp_rank: replica, numbered over all instances.
    """

    position: int
    instance: int
    tp_rank: int
    pp_rank: int
    dp_rank: int


@dataclass(frozen=True)
class InferenceParallelism:
    """Parallel sizes of the inference side.

    Tensor parallel ranks have consecutive positions, then pipeline stages, then replicas. With
    expert parallelism, EP / TP consecutive replicas form one vLLM instance: they share the experts
    and step together.

    Attributes:
        world_size: number of ranks.
        tensor: tensor parallel size.
        pipeline: pipeline parallel size.
        expert: expert parallel size.
        rank_order: global rank at each position; None: rank r at position r.
    """

    world_size: int
    tensor: Annotated[int, Size("infer_tensor_parallel_size", vllm="tensor_parallel_size")] = 1
    pipeline: Annotated[
        int, Size("infer_pipeline_parallel_size", vllm="pipeline_parallel_size")
    ] = 1
    expert: Annotated[int, Size("infer_expert_parallel_size")] = 1
    rank_order: tuple[int, ...] | None = None

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that serve a request together."""
        return self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Number of replicas, whether or not they share experts."""
        return self.world_size // self.ranks_per_replica

    @property
    def replicas_per_instance(self) -> int:
        """Number of consecutive replicas that share the experts."""
        return self.expert // self.tensor if self.expert > 1 else 1

    @property
    def ranks_per_instance(self) -> int:
        """Number of ranks of a vLLM instance."""
        return self.ranks_per_replica * self.replicas_per_instance

    @cached_property
    def ranks(self) -> np.ndarray:
        """Global ranks, int array [instance, replica, pipeline, tensor]."""
        order = range(self.world_size) if self.rank_order is None else self.rank_order
        # 8 ranks, TP 2, EP 4: 2 instances of 2 replicas of 2 ranks.
        shape = (-1, self.replicas_per_instance, self.pipeline, self.tensor)
        return np.array(order, dtype=np.int64).reshape(shape)

    def place_of(self, rank: int) -> InferencePlace:
        """Return the place of a global rank."""
        position = int(np.flatnonzero(self.ranks == rank)[0])
        axes = np.unravel_index(position, self.ranks.shape)
        instance, replica, pp_rank, tp_rank = map(int, axes)
        return InferencePlace(
            position,
            instance,
            tp_rank,
            pp_rank,
            dp_rank=instance * self.replicas_per_instance + replica,
        )

    def ranks_in_step(self, rank: int) -> list[int]:
        """Return the ranks of a rank's instance, which wait for each other in every step."""
        instance = self.place_of(rank).instance
        return sorted(self.ranks[instance].ravel().tolist())

    @staticmethod
    def padded_vocabulary(size: int) -> int:
        """Return the rows of the embedding of `size` tokens, over all tensor parallel ranks."""
        return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


Parallelism = TrainParallelism | InferenceParallelism


def sizes_text(sizes: Parallelism | ShardedParallelism) -> str:
    """Return sizes for a line of text, such as "TP=2 DP=4"; PP and EP only above 1."""
    names = {"TP": "tensor", "PP": "pipeline", "EP": "expert", "DP": "data"}
    texts = (f"{short}={getattr(sizes, name, 1)}" for short, name in names.items())
    return " ".join(text for text in texts if text not in ("PP=1", "EP=1"))


def sizes_of(side: type[Parallelism]) -> tuple[Size, ...]:
    """Return the sizes of a side, in the order of its fields."""
    hints = get_type_hints(side, include_extras=True)
    sizes = []
    for field in fields(side):
        for size in getattr(hints[field.name], "__metadata__", ()):
            sizes.append(replace(size, name=field.name, default=field.default))
    return tuple(sizes)


def named(sizes: Parallelism, naming: Naming) -> dict[str, Any]:
    """Return the values of all sizes that have a name of one kind, by that name."""
    values = {}
    for size in sizes_of(type(sizes)):
        name = getattr(size, naming)
        # Sizes without a name of this kind are left out.
        if name:
            values[name] = getattr(sizes, size.name)
    return values
