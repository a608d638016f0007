"""Bytes on a rank's device and host, computed before any allocation.

Training state of megatron-core's DDP and distributed optimizer (Adam):

    parameters    elements * bytes of the dtype
    gradients     elements * 4, because they are reduced in float32. With float32 gradients disabled
                  they have the dtype's size, and the optimizer's step creates float32 copies of its
                  shard
    optimizer     elements / data parallel size * 12: float32 main parameters and two moments; 8 if
                  the parameters are float32 and need no main copy

Training state of FSDP2 with torch's AdamW, per element of the rank's shard:

    parameters    elements * bytes of the dtype, with FSDP2's padding: all ranks have equally many,
                  even ranks without rows
    gradients     the same: reduced gradients are cast to the parameters' dtype
    optimizer     twice that, without padding: two moments

A switch to inference first moves gradients and optimizer state off the device. Megatron's
gradients are dropped, FSDP2's are copied to the host if there are any, state is copied. It then
fills the inference weights bucket by bucket, while parameters that every rank has read are copied
to the host and released. Inference memory is allocated bucket by bucket as well, on GPUs in
segments of vLLM's allocator. The peak at a switch is therefore the larger of parameters and
inference weights, plus two buckets: `interleaved_switch`. A bucket exceeds `bucket_mb` if the
tensors that are committed together do. This is common for the experts of a layer, which vLLM keeps
in one tensor with one allocation. The peak rises

    by parameters that are released at the end of     FSDP2's that do not split evenly; all on a GPU
    a switch                                          without cuda-bindings, where only whole
                                                      tensors can be released
    to parameters + inference weights: `switch`       if all inference weights are allocated from
                                                      the start: with a `sleep_mode_backend` other
                                                      than vLLM's (not known here)
    to training + inference weights                   if they stay while training:
                                                      `release_weights: false`

These numbers do not include activations, parameters that FSDP2 gathers for a layer, KV cache, CUDA
context, libraries' workspaces, and memory that vLLM keeps during training.

The phases of a job, which may have more than two models:

    phase            on the device
    train            the actor's parameters, gradients and optimizer state
    forward          the actor's parameters
    switch           the peak on the way to inference
    generate         vLLM's weights
    reference        a frozen copy of the actor's parameters
    critic train     the critic's parameters, gradients and optimizer state
    critic forward   the critic's parameters

Each phase also includes state that the configuration keeps on the device: kinds that are not
offloaded, inference weights that are not released, a critic that stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hybrid_engine.layouts.parallelism import ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

MIB, GIB = 2**20, 2**30

_Kind = TypeVar("_Kind", bound=str)
GRAD_NBYTES = 4
MOMENTS_NBYTES = 8
MAIN_NBYTES = 4


@dataclass(frozen=True, eq=False)
class TrainingMemory:
    """Bytes of a trainer's state; int arrays by rank.

    Attributes:
        params: parameters on the device between steps.
        grads: gradients on the device between steps.
        optimizer: optimizer state on the device between steps.
        copied: bytes of these that are copied to host memory while vLLM generates.
        inelastic: parameters that leave the device at the end of a switch; None if there are none.
    """

    params: np.ndarray
    grads: np.ndarray
    optimizer: np.ndarray
    copied: np.ndarray
    inelastic: np.ndarray | None = None

    @property
    def total(self) -> np.ndarray:
        """Sum of the state on the device between steps."""
        return self.params + self.grads + self.optimizer

    def leaving_whole(self) -> TrainingMemory:
        """Return the same state on a device without elastic buffers."""
        return replace(self, inelastic=self.params)


def megatron_memory(
    source: SideLayout,
    train: TrainParallelism,
    dtype: str,
    *,
    is_distributed: bool = True,
    float32_grads: bool = True,
) -> TrainingMemory:
    """Return the memory of Megatron's ranks.

    Args:
        source: layout of all ranks.
        train: parallel sizes.
        dtype: dtype of the weights.
        is_distributed: True if data parallel ranks shard the optimizer's state.
        float32_grads: True if gradients are float32 regardless of `dtype`.
    """
    itemsize = DTYPE_NBYTES[dtype]
    needs_main = itemsize < MAIN_NBYTES
    # 12 bytes for bfloat16 parameters, 8 for float32 ones, which are their own main copy.
    state_nbytes = MOMENTS_NBYTES + (MAIN_NBYTES if needs_main else 0)
    dense = source.num_elements - source.num_expert_elements
    # Ranks of a context parallel group hold the same parameters, so the optimizer's state is
    # sharded over them as well.
    dense_shards = train.data * train.context if is_distributed else 1
    expert_shards = train.expert_data if is_distributed else 1
    # Shards are padded to equal lengths, hence the division rounds up.
    shard = -(-dense // dense_shards) + -(-source.num_expert_elements // expert_shards)
    grads = source.num_elements * (GRAD_NBYTES if float32_grads else itemsize)
    if needs_main and not float32_grads:
        # Gradients are converted for the main parameters, and the copies live until the next step.
        grads = grads + shard * GRAD_NBYTES
    params = source.num_elements * itemsize
    optimizer = shard * state_nbytes
    # Gradients are dropped, not copied: the next backward pass computes new ones.
    return TrainingMemory(params, grads, optimizer, copied=params + optimizer)


def sharded_memory(
    source: SideLayout,
    model: PackedModel,
    sizes: ShardedParallelism,
    dtype: str,
) -> TrainingMemory:
    """Return the memory of FSDP2's ranks. The few buffers of modules count as parameters."""
    # `nbytes_by_rank` counts elements of tensors, without FSDP2's padding.
    moments = 2 * source.nbytes_by_rank()
    params = source.num_elements * DTYPE_NBYTES[dtype]
    uneven_numel = 0
    for name in model.shapes:
        if not model.splits_evenly(name, sizes.num_shards):
            uneven_numel += model.local_numel(name, sizes.num_shards)
    return TrainingMemory(
        params,
        grads=params,
        optimizer=moments,
        copied=params + params + moments,
        inelastic=np.full_like(params, uneven_numel * DTYPE_NBYTES[dtype]),
    )


@dataclass(frozen=True, eq=False)
class MemoryPeaks:
    """Peaks of training state and inference weights; bytes, int arrays by rank.

    Attributes:
        state: training state.
        inference: vLLM's weights.
        bucket: the largest bucket of the switch.
        keeps_inference: True if inference weights keep their memory while training.
    """

    state: TrainingMemory
    inference: np.ndarray
    bucket: int
    keeps_inference: bool = False

    @property
    def switch(self) -> np.ndarray:
        """Peak of a switch if all inference weights are allocated from the start."""
        return self.state.params + self.inference

    @property
    def interleaved_switch(self) -> np.ndarray:
        """Peak of a switch if inference memory is allocated bucket by bucket.

        The same as `switch` if inference weights keep their memory.
        """
        if self.keeps_inference:
            return self.switch
        late = 0 if self.state.inelastic is None else self.state.inelastic
        interleaved = np.maximum(self.state.params - late, self.inference)
        # 16 GiB on each side and buckets of 0.5 GiB: 17 GiB in place of 32. For a small model two
        # buckets may exceed what is left of the smaller side, and the sum of both sides is the
        # limit.
        return np.minimum(self.switch, late + interleaved + 2 * self.bucket)

    @property
    def device(self) -> np.ndarray:
        """Higher of the switch, and training including weights that vLLM keeps."""
        kept = self.inference if self.keeps_inference else 0
        return np.maximum(self.state.total + kept, self.interleaved_switch)


def fitting_kinds(nbytes: Mapping[_Kind, int], room: float) -> frozenset[_Kind]:
    """Return the kinds of training state that fit together in `room` bytes, the largest first."""
    fitting = set()
    # Largest first: its copy to the host and back would take the longest.
    for kind in sorted(nbytes, key=nbytes.__getitem__, reverse=True):
        if nbytes[kind] <= room:
            fitting.add(kind)
            room -= nbytes[kind]
    return frozenset(fitting)


MODELS = ("actor", "vLLM", "reference", "critic")
"""Models whose bytes make up a phase."""


@dataclass(frozen=True)
class Stays:
    """State that the configuration keeps on the device in every phase.

    Attributes:
        kinds: kinds of the actor's state: "param", "grad", "optimizer".
        fitting: further kinds that stay unless a reference or a critic takes the device.
        inference_nbytes: upper limit of vLLM's weights on a rank that stay; None: all.
        critic: True if all of the critic stays.
    """

    kinds: frozenset[str] = frozenset()
    fitting: frozenset[str] = frozenset()
    inference_nbytes: int | None = 0
    critic: bool = False


@dataclass(frozen=True, eq=False)
class Phase:
    """Memory of one phase.

    Attributes:
        name: name in the module's table.
        by_model: bytes by entry of MODELS; int arrays by rank.
        peak: bytes by rank, if they are not the sum of `by_model`.
    """

    name: str
    by_model: Mapping[str, np.ndarray]
    peak: np.ndarray | None = None

    @property
    def total(self) -> np.ndarray:
        """Bytes, int array by rank."""
        return np.asarray(sum(self.by_model.values())) if self.peak is None else self.peak

    @property
    def largest_rank(self) -> int:
        """Rank with the most bytes."""
        return int(self.total.argmax())


@dataclass(frozen=True, eq=False)
class MemoryPlan:
    """Memory of all phases of a job.

    Attributes:
        phases: by name.
        budget: bytes of each device for them; None: not configured.
    """

    phases: Mapping[str, Phase]
    budget: int | None = None

    def over_budget(self) -> list[Phase]:
        """Return the phases that exceed the budget."""
        if self.budget is None:
            return []
        return [phase for phase in self.phases.values() if phase.total.max() > self.budget]

    def __str__(self) -> str:
        """Format a table: bytes of each model in each phase, on the rank with the most in it.

        Sizes are in GiB, or in MiB if all phases are smaller.
        """
        largest = max(int(phase.total.max()) for phase in self.phases.values())
        name, unit = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)

        def shown(nbytes: int) -> str:
            return f"{nbytes / unit:,.2f}"

        budget = "" if self.budget is None else f", of a budget of {shown(self.budget)}"
        title = f"[Memory] {name} on the rank with most{budget}"
        lines = [
            f"{title}; activations and KV cache not counted",
            f"{'phase':<16}" + "".join(f"{head:>11}" for head in (*MODELS, "all")),
        ]
        for phase in self.phases.values():
            rank = phase.largest_rank
            cells = []
            for model in MODELS:
                nbytes = phase.by_model.get(model)
                cells.append("-" if nbytes is None else shown(nbytes[rank]))
            cells.append(shown(phase.total[rank]))
            lines.append(f"{phase.name:<16}" + "".join(f"{cell:>11}" for cell in cells))
        return "\n".join(lines)


def plan_memory(
    actor: TrainingMemory,
    inference: np.ndarray,
    bucket_nbytes: int,
    critic: TrainingMemory | None = None,
    *,
    stays: Stays | None = None,
    budget: int | None = None,
) -> MemoryPlan:
    """Return the memory of every phase.

    Args:
        actor: training side.
        inference: bytes of vLLM's weights, int array by rank.
        bucket_nbytes: bytes of the largest bucket of a switch.
        critic: critic, if there is one.
        stays: state that remains in addition to a phase's requirements; default: none.
        budget: bytes of each device.
    """
    stays = stays or Stays()
    kept_inference = inference
    if stays.inference_nbytes is not None:
        kept_inference = np.minimum(inference, stays.inference_nbytes)
    kept: dict[str, np.ndarray] = {}  # bytes of other models in every phase
    if kept_inference.any():
        kept["vLLM"] = kept_inference
    if critic is not None and stays.critic:
        kept["critic"] = critic.total

    def with_actor(*kinds: str) -> dict[str, np.ndarray]:
        """Return the bytes of everything that stays, and of these kinds of the actor's state."""
        resident = of_kinds(actor, stays.kinds.union(kinds))
        return {**kept, "actor": resident} if resident.any() else dict(kept)

    switch = _switch(actor, inference, bucket_nbytes, stays, kept)
    phases = [
        Phase("train", with_actor("param", "grad", "optimizer")),
        Phase("forward", with_actor("param", *stays.fitting)),
        switch,
        Phase("generate", {**with_actor(*stays.fitting), "vLLM": inference}),
        Phase("reference", {**with_actor(), "reference": actor.params}),
    ]
    if critic is not None:
        phases += [
            Phase("critic train", {**with_actor(), "critic": critic.total}),
            # `kept` last: a critic that stays counts whole, not by its parameters alone.
            Phase("critic forward", {**with_actor(), "critic": critic.params, **kept}),
        ]
    return MemoryPlan({phase.name: phase for phase in phases}, budget)


def _switch(
    actor: TrainingMemory,
    inference: np.ndarray,
    bucket_nbytes: int,
    stays: Stays,
    kept: Mapping[str, np.ndarray],
) -> Phase:
    """Return the phase of a switch; `kept`: inference weights and a critic that stay."""
    peaks = MemoryPeaks(
        actor,
        inference,
        bucket_nbytes,
        keeps_inference=stays.inference_nbytes is None,
    )
    kinds = stays.kinds | stays.fitting
    peak = peaks.switch if "param" in kinds else peaks.interleaved_switch
    # If everything of both sides is present at once, one more bucket receives vLLM's weights
    # before vLLM derives its own tensors from them.
    extra_bucket = np.minimum(bucket_nbytes, inference)
    peak = peak + np.where(peak == peaks.switch, extra_bucket, 0)
    peak = peak + of_kinds(actor, kinds - {"param"})
    # Neither all (None), which `peaks` has counted, nor none (0). These weights are there before
    # the first bucket frees parameters. Counting them on top is an upper bound.
    if stays.inference_nbytes:
        peak = peak + kept.get("vLLM", 0)
    return Phase("switch", {}, peak + kept.get("critic", 0))


def of_kinds(memory: TrainingMemory, kinds: Collection[str]) -> np.ndarray:
    """Return the bytes of these kinds of training state; int array by rank."""
    by_kind = {"param": memory.params, "grad": memory.grads, "optimizer": memory.optimizer}
    total = np.zeros_like(memory.params)
    for kind, nbytes in by_kind.items():
        if kind in kinds:
            total = total + nbytes
    return total


def gib(nbytes: float) -> str:
    """Format bytes for a sentence, in GiB, or in MiB below 0.1 GiB."""
    size, unit = (nbytes / MIB, "MiB") if 0 < abs(nbytes) < GIB / 10 else (nbytes / GIB, "GiB")
    return f"{size:.1f} {unit}" if abs(size) >= 10 else f"{size:.3g} {unit}"
