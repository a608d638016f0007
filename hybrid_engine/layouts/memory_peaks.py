"""What a rank keeps on its device and on its host, in bytes, before anything is allocated.

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
`interleaved_switch`; a module larger than a bucket is one. It is higher

    by parameters that leave at the end of a switch   FSDP2's that do not split evenly; all on a GPU without
                                                      cuda-bindings, where memory goes only by whole tensors
    to parameters + inference weights: `switch`       all inference weights have memory from the start: another
                                                      `sleep_mode_backend` than vLLM's own (not known here)
    to training + inference weights                   they keep it while training: `release_weights: false`

Activations, parameters that FSDP2 gathers for a layer, KV cache, CUDA context and libraries' workspaces are not in
these numbers, nor what vLLM keeps while the trainer has the device: `NOT_COUNTED`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hybrid_engine.layouts.parallelism import ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

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
        inelastic: parameters that leave the device at the end of a switch; None where there are no such.
    """

    params: np.ndarray
    grads: np.ndarray
    optimizer: np.ndarray
    copied: np.ndarray
    inelastic: np.ndarray | None = None

    def leaving_whole(self) -> TrainingMemory:
        """The same on a device without elastic buffers."""
        return replace(self, inelastic=self.params)


def megatron_memory(
    source: SideLayout,
    train: TrainParallelism,
    dtype: str,
    *,
    is_distributed: bool = True,
    float32_grads: bool = True,
) -> TrainingMemory:
    """What Megatron's ranks keep.

    Args:
        source: what they hold of the model.
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
    """What FSDP2's ranks keep; a module's buffers count as parameters, and are few."""
    params = source.num_elements * DTYPE_NBYTES[dtype]
    uneven = (name for name in model.shapes if not model.splits_evenly(name, sizes.num_shards))
    late = sum(model.local_numel(name, sizes.num_shards) for name in uneven) * DTYPE_NBYTES[dtype]
    moments = 2 * source.holdings.nbytes_by_rank()
    copied = params + params + moments
    return TrainingMemory(params, params, moments, copied, inelastic=np.full_like(params, late))


@dataclass(frozen=True, eq=False)
class MemoryPeaks:
    """Bytes by rank, int arrays; see the module's text.

    Attributes:
        state: of training. inference: vLLM's weights.
        bucket: one bucket of the switch.
        keeps_inference: inference weights keep their memory while training.
    """

    state: TrainingMemory
    inference: np.ndarray
    bucket: int
    keeps_inference: bool = False

    @property
    def training(self) -> np.ndarray:
        """All training state, as it is on the device between steps."""
        return self.state.params + self.state.grads + self.state.optimizer

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
        return np.maximum(self.training + kept, self.interleaved_switch)

    @property
    def host(self) -> np.ndarray:
        """What is copied to host memory while vLLM generates."""
        return self.state.copied
