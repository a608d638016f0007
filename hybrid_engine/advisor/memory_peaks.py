"""What a rank keeps on its device and on its host, in bytes, before anything is allocated.

Training state, as megatron-core's DDP and distributed optimizer (Adam) have it:

    parameters    elements * bytes of the dtype
    gradients     elements * 4 (they are reduced in float32)
    optimizer     elements / data parallel size * 12: float32 main parameters and two moments; 8 where the parameters
                  are float32 themselves and need no main copy

A switch to inference first takes gradients (dropped) and optimizer state (copied to the host) off the device, then
fills the inference weights bucket by bucket, while parameters that every rank has read leave (copied). Where inference
memory comes bucket by bucket too (on the CPU today) the peak at a switch is the larger of parameters and inference
weights, and two buckets: `interleaved_switch`; a module larger than a bucket is one. vLLM's sleep mode on GPUs wakes
all weights at once: there it is parameters + inference weights, which is what counts here.

Activations, KV cache, CUDA context and libraries' workspaces are not in these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import DTYPE_NBYTES

GRAD_NBYTES = 4
MOMENTS_NBYTES = 8
MAIN_NBYTES = 4


@dataclass(frozen=True, eq=False)
class MemoryPeaks:
    """Bytes by rank, int arrays; see the module's text.

    Attributes:
        params, grads, optimizer: training state. inference: vLLM's weights.
        bucket: one bucket of the switch.
    """

    params: np.ndarray
    grads: np.ndarray
    optimizer: np.ndarray
    inference: np.ndarray
    bucket: int

    @property
    def training(self) -> np.ndarray:
        """All training state, as it is on the device between steps."""
        return self.params + self.grads + self.optimizer

    @property
    def switch(self) -> np.ndarray:
        """Peak during a switch with vLLM's sleep mode."""
        return self.params + self.inference

    @property
    def interleaved_switch(self) -> np.ndarray:
        """Peak during a switch where inference memory comes bucket by bucket."""
        return np.minimum(self.switch, np.maximum(self.params, self.inference) + 2 * self.bucket)

    @property
    def device(self) -> np.ndarray:
        """Highest of training and switch."""
        return np.maximum(self.training, self.switch)

    @property
    def host(self) -> np.ndarray:
        """What is copied to host memory while vLLM generates: parameters and optimizer state."""
        return self.params + self.optimizer


def memory_peaks(
    source: SideLayout, destination: SideLayout, train: TrainParallelism, dtype: str, bucket_nbytes: int
) -> MemoryPeaks:
    """Device and host bytes of every rank; `dtype` is that of the weights on both sides."""
    itemsize = DTYPE_NBYTES[dtype]
    state_nbytes = MOMENTS_NBYTES + (MAIN_NBYTES if itemsize < 4 else 0)
    dense = source.num_elements - source.num_expert_elements
    # shards are padded to equal lengths
    dense_shard = -(-dense // (train.data * train.context))
    expert_shard = -(-source.num_expert_elements // train.expert_data)
    return MemoryPeaks(
        params=source.num_elements * itemsize,
        grads=source.num_elements * GRAD_NBYTES,
        optimizer=(dense_shard + expert_shard) * state_nbytes,
        inference=destination.num_elements * itemsize,
        bucket=bucket_nbytes,
    )
