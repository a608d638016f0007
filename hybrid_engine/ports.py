"""Interfaces (ports) of the parts that the engine drives: trainers and inference engines.

    Trainer.weights : TrainingWeights --layout()--> plan <--layout()-- InferenceWeights
                           | buffers()                 allocate(groups) | commit(groups)
                           v                                            |
                    source tensors --- Transport.run(transfers) ---> destination tensors

Call sequence on every rank (switch/sharding_manager.py, switch/weight_container.py):

    1  set-up    Trainer.weights.layout, .buffers; InferenceWeights.layout   all ranks make one plan
                 InferenceWeights.release; Trainer.offload_items -> onload   state TRAIN
    2  switch    Trainer.offload_items -> offload gradients, optimizer       parameters remain
    3            TrainingWeights.prepare, .check_values, .buffers            values are final
                 .finish_pending instead, if no weights are sent
    4            for each bucket:
                   InferenceWeights.allocate                                 + one bucket
                   Transport.start, .run (.notify)                           bytes are transferred
                   Verification.filled                                       if verified
                   ReleaseFence.sent                                         - the bucket before
                   InferenceWeights.commit                                   post-load processing
    5            ReleaseFence.finish, InferenceWeights.finish_fill           - staging memory
    6            InferenceCaches.wake_kv_cache, .reset_caches                state INFER
                 Probed.probe of both sides, before 2 and here               if it is due
    7  back      InferenceWeights.release, onload                            state TRAIN
                 Trainer.guard before the first use of optimizer state       its copies are done

With `generate_config.incremental`, step 3 ends with digests of the source tensors and
InferenceWeights.committed, which determine the buckets that step 4 skips; `release` then names
groups that may stay.

After a failure `abandon` (and `drain`) replace `run`, `sent` and `commit`, so that no rank waits
for a failed one. A second trainer implements `Trainer`, a second engine `InferenceWeights` and
`InferenceCaches`. A flat buffer is a 1-D tensor over a whole storage; offsets and strides of the
records count its elements. This module depends neither on Megatron nor on vLLM, and does not assume
that one process trains and generates: a side is defined by its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from hybrid_engine.memory.offload_items import Guards, OffloadItem
from hybrid_engine.memory.pool import Memories
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors
from hybrid_engine.records.layout import Extent, Layout

Data = Literal["global", "local"]
"""Global: all ranks pass the same batch. Local: each data-parallel rank passes its part."""
Batch = Tensors
"""Tensors with sequences along dim 0.

`tokens` and `labels` [B, S] (`labels[i, t]` is the token after `tokens[i, t]`); if needed,
`attention_mask`, `position_ids` and `sequence_ids`; the sampling `temperature` [B] or [B, S] if it
is not 1; the experts `routed_experts` [B, S, layers, k] of each token, which routers of the trained
Megatron model take; and any tensors that a loss function reads.
"""
Report = TensorDict
"""Name -> scalar."""
Figures = dict[str, float]
"""Name of a figure -> value."""
LossResult = torch.Tensor | Mapping[str, Any] | tuple[torch.Tensor, Mapping[str, Any]]
LossFunction = Callable[[Batch, torch.Tensor], LossResult]
"""(micro batch, log-probabilities [b, S] of the labels) -> mean loss.

Scalars to report may come with the loss.
"""

# -- sides -----------------------------------------------------------------------------------------


class WeightAdaptor(Protocol):
    """One side of a reshard: provides the layout of its weights on this rank."""

    def layout(self) -> Layout:
        """Return this rank's records. Raises ParameterMismatchError naming every parameter."""


class TrainingWeights(WeightAdaptor, Protocol):
    """Side from which weights are read, possibly with adapters."""

    def buffers(self) -> Tensors:
        """Return this rank's flat source buffers by `BufferId.name`: live storage, no copies."""

    def finish_pending(self) -> None:
        """Finish pending work on the weights (parameter gathers); stored weights are final then.

        Raises ReshardError if the weights are no longer at the places of `layout`.
        """

    def prepare(self) -> None:
        """Finish pending work and compute what is not stored; then buffers hold final values.

        Raises as `finish_pending`, which is all that it does by default.
        """
        self.finish_pending()

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """Raise WeightError naming every parameter that holds a NaN or an infinity.

        `unread`: buffer name -> intervals that need no check, because this switch does not read
        them.
        """

    def finish_loading(self) -> None:
        """Complete the weights once the layout's tensors were written (backends/huggingface).

        Zeroes padding and whatever adapters add, and stores what the model has in place of
        computed tensors. By default there are none of these.
        """
        return

    @property
    def base(self) -> TrainingWeights:
        """Weights without adapters, into which a checkpoint can be loaded; by default the same."""
        return self

    @property
    def merged(self) -> TrainingWeights:
        """Weights with adapters merged into them; by default the same."""
        return self


class GuardedTrainer(Protocol):
    """The part of a trainer that has defaults; `backends.training_side.GuardedState` has its hooks.

    Attributes:
        guard: called with the kinds of state that the trainer is about to use; waits for those that
            are on their way back, and raises StateError if others may be off the device. An
            `Offloader` and a `Switch` of this trainer add themselves.
        before_step: called before each optimizer step, even if several optimizers step in it;
            raises StateError if servers would fall too far behind. A `WeightPublisher` sets it.
    """

    guard: Guards
    before_step: Callable[[], object]

    @property
    def unserved(self) -> Collection[str]:
        """Canonical tensors that are trained but not read by the inference engine.

        Default: none.
        """
        return ()

    @property
    def frozen(self) -> Collection[str]:
        """Canonical tensors of this rank that no optimizer step should change, known at set-up.

        With `generate_config.incremental` they get separate buckets. The decision to send a tensor
        depends on its bytes, not on this list. Default: none.
        """
        return ()

    @property
    def process_groups(self) -> Collection[dist.ProcessGroup]:
        """Process groups that are unused while vLLM generates, in the same order on all ranks.

        Default: none.
        """
        return ()

    def reload_main_params(self) -> None:
        """Update the optimizer's copies of parameters after these were written from outside.

        By default there are none.
        """
        return


class Trainer(GuardedTrainer, Protocol):
    """Trainer: its weights, and the state that can be offloaded."""

    @property
    def weights(self) -> TrainingWeights:
        """Weights to reshard; always the same object."""

    @property
    def version(self) -> int:
        """Number of optimizer steps the weights have taken."""

    def offload_items(self) -> Iterable[OffloadItem]:
        """Return all state that can be offloaded now.

        These are parameters, gradients, optimizer state and caches.
        """


class ColocatedModel(Protocol):
    """Model that shares the devices with the actor (trainer/reference_and_critic/)."""

    name: str

    @property
    def has_the_device(self) -> bool:
        """True while it is on the device instead of the actor."""

    def resident_nbytes(self) -> int:
        """Return the bytes of its state on this rank's device."""


class InferenceWeights(WeightAdaptor, Protocol):
    """Side to which weights are written, group by group.

    A group is committed at once, e.g. a module.
    """

    def allocate(self, groups: Sequence[str]) -> Tensors:
        """Return flat destination buffers of these groups of this rank by `BufferId.name`.

        Padding is in place.
        """

    def commit(self, groups: Sequence[str]) -> None:
        """Make filled groups the live weights.

        Runs the engine's post-load processing if it repacks them.
        """

    def finish_fill(self) -> None:
        """Free staging memory, after the last commit of a fill."""
        return

    def abandon(self) -> None:
        """Abandon a fill on this rank, so that no other rank waits for it in `commit`.

        Does not wait. Idempotent. All ranks release the weights before the next fill.
        """
        return

    def release(self, keep: Collection[str] = ()) -> None:
        """Free the memory of all weights; unusable until the next allocate, fill and commit.

        `keep`: committed groups that stay unchanged, if the engine can keep some groups without the
        others; empty without `generate_config.incremental`.
        """

    def committed(self) -> Collection[str]:
        """Return the groups that hold their last committed weights; by default none.

        Only called with `generate_config.incremental`.
        """
        return ()

    def proving(
        self,
        tensors: Collection[str],
        unproven: Callable[[str], None],
    ) -> AbstractContextManager[None]:
        """Return a context in which the engine proves that it holds the bytes that were filled.

        `commit` checks every group that contains one of `tensors`. The end of the context checks
        that all such groups, also of earlier fills, still have the committed bytes. Only used if a
        fill is verified.

        Args:
            tensors: canonical tensors to prove.
            unproven: called with a description of every mismatch.
        """

    def share_memory(self, memories: Memories, leave: Callable[[], object]) -> bool:
        """Take memory from training's from now on, while training leaves it; see memory/pool.py.

        Called before a fill, while all weights are released, until it returns True; by default the
        sides share nothing.

        Args:
            memories: of the kinds that leave. Parameters are there, and keep their contents until
                all weights are filled; the others have left.
            leave: makes the contents leave that are still there when generation needs the memory.
        """
        return False

    def give_back(self) -> None:
        """End what `share_memory` began, while neither side has contents. Idempotent."""
        return

    def resident_nbytes(self) -> int:
        """Return the bytes of device memory in use for weights.

        They include buffers in flight and reserved memory.
        """


class InferenceCaches(Protocol):
    """Caches of an inference engine."""

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again, if the release of the weights freed it."""
        return

    def reset_caches(self) -> None:
        """Drop everything computed with older weights, so that no later output depends on it."""
