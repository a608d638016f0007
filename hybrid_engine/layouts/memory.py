"""Bytes on a rank's device and host, before anything is allocated: of the peaks of a switch, and of a job's phases.

Training state, as megatron-core's DDP and distributed optimizer (Adam) have it:

    parameters    elements * bytes of the dtype
    gradients     elements * 4 (they are reduced in float32, unless an override says otherwise: then in the dtype, and
                  the optimizer's step makes float32 ones of its shard)
    optimizer     elements / data parallel size * 12: float32 main parameters and two moments; 8 where the parameters
                  are float32 themselves and need no main copy

and as FSDP2 with torch's AdamW has it, elements being those of the rank's shard:

    parameters    elements * bytes of the dtype, with FSDP2's padding: as many on all ranks, also on those without rows
    gradients     the same: reduced gradients are cast to the parameters' dtype
    optimizer     twice that, without padding: two moments

A switch to inference first takes gradients and optimizer state off the device (Megatron's gradients are dropped,
FSDP2's copied to the host if there are any; state is copied), then fills the inference weights bucket by bucket, while
parameters that every rank has read leave (copied). Inference memory comes bucket by bucket too, on GPUs by segments of
vLLM's allocator, so the peak at a switch is the larger of parameters and inference weights, and two buckets:
`interleaved_switch`. A bucket is larger than `bucket_mb` where what is committed at once is, as all experts of a layer
are: they are one tensor in vLLM, with one piece of memory. It is higher

    by parameters that leave at the end of a switch   FSDP2's that do not split evenly; all on a GPU without
                                                      cuda-bindings, where memory goes only by whole tensors
    to parameters + inference weights: `switch`       all inference weights have memory from the start: another
                                                      `sleep_mode_backend` than vLLM's own (not known here)
    to training + inference weights                   they keep it while training: `release_weights: false`

Activations, parameters that FSDP2 gathers for a layer, KV cache, CUDA context and libraries' workspaces are not in
these numbers, nor what vLLM keeps while the trainer has the device: `NOT_COUNTED`.

The phases of a job, whose models may be more than these two:

    phase            on the device
    train            the actor's parameters, gradients and optimizer state
    forward          the actor's parameters
    switch           the peak on the way to inference
    generate         vLLM's weights
    reference        a frozen copy of the actor's parameters
    critic train     the critic's parameters, gradients and optimizer state
    critic forward   the critic's parameters

and in each what the configuration leaves there: kinds that are not offloaded, inference weights that are not released,
a critic that stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hybrid_engine.layouts.parallelism import ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.parameters import StoredElements
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

MIB, GIB = 2**20, 2**30

NOT_COUNTED = (
    "Not counted on a GPU: its context and workspaces, NCCL's communicators of both engines, and vLLM's captured "
    "graphs, which stay while training (2 to 6 GiB in all, not measured). generate_config.vllm can give part of that "
    "back: {sleep_mode_offload_cudagraph: true, enable_nccl_comm_suspend: true}"
)
GRAD_NBYTES = 4
MOMENTS_NBYTES = 8
MAIN_NBYTES = 4


@dataclass(frozen=True, eq=False)
class TrainingMemory:
    """Bytes of a trainer's state by rank, int arrays; see the module's text.

    Attributes:
        params, grads, optimizer: on the device between steps.
        copied: of that, what is copied to host memory while vLLM generates.
        inelastic: parameters that leave the device at the end of a switch; None without any.
    """

    params: np.ndarray
    grads: np.ndarray
    optimizer: np.ndarray
    copied: np.ndarray
    inelastic: np.ndarray | None = None

    @property
    def total(self) -> np.ndarray:
        """All of it, as it is on the device between steps."""
        return self.params + self.grads + self.optimizer

    def leaving_whole(self) -> TrainingMemory:
        """The same on a device without elastic buffers."""
        return replace(self, inelastic=self.params)


def megatron_memory(
    source: SideLayout | StoredElements,
    train: TrainParallelism,
    dtype: str,
    *,
    is_distributed: bool = True,
    float32_grads: bool = True,
) -> TrainingMemory:
    """Return the memory of Megatron's ranks.

    Args:
        source: what they store of the model; the memory is by rank or by stage, as its arrays are.
        train: parallel sizes.
        dtype: of the weights.
        is_distributed: the optimizer's state is split over data parallel ranks.
        float32_grads: gradients are float32, whatever the weights are.
    """
    itemsize = DTYPE_NBYTES[dtype]
    grads = source.num_elements * (GRAD_NBYTES if float32_grads else itemsize)
    state_nbytes = MOMENTS_NBYTES + (MAIN_NBYTES if itemsize < 4 else 0)
    dense = source.num_elements - source.num_expert_elements
    # shards are padded to equal lengths
    dense_shard = -(-dense // (train.data * train.context if is_distributed else 1))
    expert_shard = -(-source.num_expert_elements // (train.expert_data if is_distributed else 1))
    if not float32_grads and itemsize < MAIN_NBYTES:  # converted for main parameters, and kept until the next step
        grads = grads + (dense_shard + expert_shard) * GRAD_NBYTES
    params = source.num_elements * itemsize
    optimizer = (dense_shard + expert_shard) * state_nbytes
    return TrainingMemory(params, grads, optimizer, copied=params + optimizer)


def sharded_memory(source: SideLayout, model: PackedModel, sizes: ShardedParallelism, dtype: str) -> TrainingMemory:
    """Return the memory of FSDP2's ranks; a module's buffers count as parameters, and are few."""
    return _of_shards(source.num_elements, 2 * source.holdings.nbytes_by_rank(), model, sizes, dtype)


def largest_shard(model: PackedModel, sizes: ShardedParallelism, dtype: str) -> TrainingMemory:
    """Return the memory of FSDP2's first rank, whose rows are no padding; arrays of one element."""
    numel = np.array([sum(model.local_numel(name, sizes.num_shards) for name in model.shapes)])
    return _of_shards(numel, 2 * numel * DTYPE_NBYTES[dtype], model, sizes, dtype)


def _of_shards(
    numel: np.ndarray, moments: np.ndarray, model: PackedModel, sizes: ShardedParallelism, dtype: str
) -> TrainingMemory:
    params = numel * DTYPE_NBYTES[dtype]
    uneven = (name for name in model.shapes if not model.splits_evenly(name, sizes.num_shards))
    late = sum(model.local_numel(name, sizes.num_shards) for name in uneven) * DTYPE_NBYTES[dtype]
    copied = params + params + moments
    return TrainingMemory(params, params, moments, copied, inelastic=np.full_like(params, late))


@dataclass(frozen=True, eq=False)
class MemoryPeaks:
    """Bytes by rank, int arrays; see the module's text.

    Attributes:
        state: of training. inference: vLLM's weights.
        bucket: the largest bucket of the switch.
        keeps_inference: inference weights keep their memory while training.
    """

    state: TrainingMemory
    inference: np.ndarray
    bucket: int
    keeps_inference: bool = False

    @property
    def switch(self) -> np.ndarray:
        """Peak during a switch where all inference weights have memory from the start."""
        return self.state.params + self.inference

    @property
    def interleaved_switch(self) -> np.ndarray:
        """Peak during a switch where inference memory comes bucket by bucket, unless it is there already."""
        if self.keeps_inference:
            return self.switch
        late = 0 if self.state.inelastic is None else self.state.inelastic
        return np.minimum(self.switch, late + np.maximum(self.state.params - late, self.inference) + 2 * self.bucket)

    @property
    def device(self) -> np.ndarray:
        """Highest of training, with what vLLM keeps meanwhile, and switch."""
        kept = self.inference if self.keeps_inference else 0
        return np.maximum(self.state.total + kept, self.interleaved_switch)


MODELS = ("actor", "vLLM", "reference", "critic")
"""Whose bytes a phase is made of."""


@dataclass(frozen=True)
class Stays:
    """State that the configuration keeps on the device in every phase.

    Attributes:
        kinds: of the actor's state: "param", "grad", "optimizer".
        inference_nbytes: of vLLM's weights on a rank, at most; None: all.
        critic: all of the critic.
        prefetches: training state moves while inference weights come and go.
    """

    kinds: frozenset[str] = frozenset()
    inference_nbytes: int | None = 0
    critic: bool = False
    prefetches: bool = False


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase.

    Attributes:
        name: as in the module's text.
        by_model: entry of MODELS -> bytes by rank, int arrays.
        peak: bytes by rank where they are not the sum of these.
    """

    name: str
    by_model: Mapping[str, np.ndarray]
    peak: np.ndarray | None = None

    @property
    def total(self) -> np.ndarray:
        """Bytes by rank."""
        return np.asarray(sum(self.by_model.values())) if self.peak is None else self.peak

    @property
    def largest_rank(self) -> int:
        """The rank with most."""
        return int(self.total.argmax())


@dataclass(frozen=True, eq=False)
class MemoryPlan:
    """All phases of a job.

    Attributes:
        phases: by name.
        budget: bytes of each device for them; None: not stated.
    """

    phases: Mapping[str, Phase]
    budget: int | None = None

    def over_budget(self) -> list[Phase]:
        """The phases that do not fit."""
        if self.budget is None:
            return []
        return [phase for phase in self.phases.values() if phase.total.max() > self.budget]

    def __str__(self) -> str:
        """A table of the rank with most in each phase, in GiB."""
        return "\n".join(self.lines())

    def lines(self, rank: int | None = None, measured: Mapping[str, int] | None = None) -> Iterator[str]:
        """The table's: of one rank, or of the one with most in each phase; `measured`: bytes by phase."""
        most = max(int(phase.total.max()) for phase in self.phases.values())
        name, unit = ("GiB", GIB) if most >= GIB else ("MiB", MIB)

        def shown(nbytes: int) -> str:
            return f"{nbytes / unit:,.2f}"

        heads = [*MODELS, "all", *(["measured"] if measured is not None else [])]
        budget = "" if self.budget is None else f", of a budget of {shown(self.budget)}"
        where = "the rank with most" if rank is None else f"rank {rank}"
        yield f"[Memory] {name} on {where}{budget}; activations and KV cache not counted"
        yield f"{'phase':<16}" + "".join(f"{head:>11}" for head in heads)
        for phase in self.phases.values():
            shown_rank = phase.largest_rank if rank is None else rank
            cells = [shown(phase.by_model[model][shown_rank]) if model in phase.by_model else "-" for model in MODELS]
            cells.append(shown(phase.total[shown_rank]))
            if measured is not None:
                cells.append(shown(measured[phase.name]) if phase.name in measured else "-")
            yield f"{phase.name:<16}" + "".join(f"{cell:>11}" for cell in cells)


def plan_memory(
    actor: TrainingMemory,
    inference: np.ndarray,
    bucket_nbytes: int,
    critic: TrainingMemory | None = None,
    *,
    stays: Stays | None = None,
    budget: int | None = None,
) -> MemoryPlan:
    """Return the plan of every phase.

    Args:
        actor: of the training side. inference: bytes of vLLM's weights by rank. critic: where there is one.
        bucket_nbytes: of the largest bucket of a switch.
        stays: state that remains in addition to what a phase needs; default: nothing.
        budget: bytes of each device.
    """
    stays = stays or Stays()
    kept_inference = inference if stays.inference_nbytes is None else np.minimum(inference, stays.inference_nbytes)
    beside: dict[str, np.ndarray] = {}
    if kept_inference.any():
        beside["vLLM"] = kept_inference
    if critic is not None and stays.critic:
        beside["critic"] = critic.total

    def with_actor(kinds: frozenset[str]) -> dict[str, np.ndarray]:
        resident = _of_kinds(actor, kinds | stays.kinds)
        return {**beside, **({"actor": resident} if resident.any() else {})}

    switch = _switch(actor, inference, bucket_nbytes, stays, beside)
    phases = [
        Phase("train", with_actor(frozenset({"param", "grad", "optimizer"}))),
        Phase("forward", with_actor(frozenset({"param"}))),
        switch,
        # prefetched state comes in addition to the weights, within the peak of a switch
        Phase("generate", {**with_actor(frozenset()), "vLLM": inference}, switch.peak if stays.prefetches else None),
        Phase("reference", {**with_actor(frozenset()), "reference": actor.params}),
    ]
    if critic is not None:
        phases += [
            Phase("critic train", {**with_actor(frozenset()), "critic": critic.total}),
            Phase("critic forward", {**with_actor(frozenset()), "critic": critic.params, **beside}),
        ]
    return MemoryPlan({phase.name: phase for phase in phases}, budget)


def _switch(
    actor: TrainingMemory,
    inference: np.ndarray,
    bucket_nbytes: int,
    stays: Stays,
    beside: Mapping[str, np.ndarray],
) -> Phase:
    """`beside` is a critic that stays, and inference weights, which are counted as such."""
    peaks = MemoryPeaks(actor, inference, bucket_nbytes, keeps_inference=stays.inference_nbytes is None)
    peak = peaks.switch if "param" in stays.kinds else peaks.interleaved_switch
    # where all of both is there at once, vLLM's weights arrive in one more bucket before it derives its own from them
    peak = peak + np.where(peak == peaks.switch, np.minimum(bucket_nbytes, inference), 0)
    peak = peak + _of_kinds(actor, stays.kinds - {"param"})
    if stays.inference_nbytes:
        peak = peak + beside.get("vLLM", 0)
    if stays.prefetches:
        peak = np.maximum(peak, actor.total)
    return Phase("switch", {}, peak + beside.get("critic", 0))


def _of_kinds(memory: TrainingMemory, kinds: frozenset[str]) -> np.ndarray:
    by_kind = {"param": memory.params, "grad": memory.grads, "optimizer": memory.optimizer}
    return np.asarray(sum((nbytes for kind, nbytes in by_kind.items() if kind in kinds), np.zeros_like(memory.params)))


def gib(nbytes: float) -> str:
    """Bytes in a sentence, in GiB, or in MiB where these would be few."""
    size, unit = (nbytes / GIB, "GiB") if abs(nbytes) >= GIB / 10 else (nbytes / MIB, "MiB")
    return f"{size:.1f} {unit}" if abs(size) >= 10 else f"{size:.3g} {unit}"
