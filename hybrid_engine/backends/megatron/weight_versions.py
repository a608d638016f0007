"""Which canonical tensors may have been written since an earlier moment, without reading them.

    what writes a parameter                                    is seen by
    an optimizer step, and the gather that follows it          the number of steps, for parameters in DDP's buffers
    LoRA, where a weight is shown with it added                the same: its matrices are in DDP's buffers
    `copy_` and the like on it: a user, a router's bias        the counter of in-place writes that torch keeps
    clipping of queries and keys (`qk_clip`), by `.data`       the same: a hook counts it there
    `.data`, a checkpoint read into flat buffers               nothing: `weights_changed()` of the engine says so

DDP's buffers have all that required a gradient when DDP was built. A step writes them whether or not they still do, for
an optimizer's moments outlive their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.ports import Version
from megatron_patches.buffers import iter_buffers


class WeightVersions:
    """Of the weights that an adaptor shows.

    Attributes:
        frozen: canonical tensors that no optimizer step changes.
    """

    def __init__(self, weights: MegatronAdaptor) -> None:
        self._origins = weights.origins()
        trained = {slot.param for record in iter_buffers(weights.model.ddp_chunks) for slot in record.slots}
        buffers = {tensor for _, tensor in weights.model.named_buffers()}
        self._trained = {name for name, origins in self._origins.items() if not trained.isdisjoint(origins)}
        self.frozen = [
            name for name, origins in self._origins.items() if name not in self._trained and buffers.isdisjoint(origins)
        ]

    def now(self, num_steps: int) -> Mapping[str, Version]:
        """By canonical tensor; `num_steps`: of the optimizer."""
        return {
            name: (num_steps if name in self._trained else 0, *(tensor._version for tensor in origins))
            for name, origins in self._origins.items()
        }
