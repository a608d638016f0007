"""What the engine asks of the things it drives: whoever trains, whoever generates, transports.

    Trainer.weights : TrainingWeights --layout()--> plan <--layout()-- InferenceWeights
                           | buffers()                 allocate(groups) | commit(groups)
                           v                                            |
                    source tensors --- Transport.run(transfers) ---> destination tensors

Who calls what, on every rank (switch/sharding_manager.py, switch/weight_container.py):

     1  set-up   Trainer.weights.layout, .buffers; InferenceWeights.layout   then all ranks make one plan
                 InferenceWeights.release; Trainer.offload_items -> onload   state TRAIN: training state alone
     2  switch   Trainer.offload_items -> offload gradients, optimizer       weights are left
     3           TrainingWeights.prepare, .check_values, .buffers            the values to be read are final
     4           for each bucket:
                   InferenceWeights.allocate                                 + one bucket
                   Transport.start, .run (.notify)                             the bytes cross
                   Verification.filled                                       where a fill is verified
                   ReleaseFence.sent                                         - training memory of the bucket before
                   InferenceWeights.commit                                   the engine's own post-load processing
     5           ReleaseFence.finish, InferenceWeights.finish_fill           - staging memory
     6           InferenceCaches.wake_kv_cache, .reset_caches                state INFER: inference weights alone
                 Probed.probe of both sides, before 2 and here               where it is due (switch/computation.py)
        prefetch NearEnd.call -> ShardingManager.near_end -> onload          + what fits of training state
     7  back     InferenceWeights.release, onload                            state TRAIN

With `generate_config.incremental`, 3 ends with digests of the source tensors and InferenceWeights.committed, which say
what of 4 is left out, and `release` names groups that may stay.

On failure `abandon` (and `drain`) stand in place of `run`, `sent` and `commit`, so that no rank waits for one that has
failed. A second trainer implements `Trainer`, a second engine `InferenceWeights` and `InferenceCaches`. A flat buffer
is a 1-D tensor over a whole storage; offsets and strides of the records count its elements. Nothing here knows Megatron
or vLLM, or assumes that one process trains and generates: a side is what its layout says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from hybrid_engine.memory.offload_items import Guards, OffloadItem
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import Extent, Layout

Data = Literal["global", "local"]
"""Whether all ranks pass the same, or each data parallel rank its own part."""
Batch = Mapping[str, torch.Tensor]
"""Tensors whose dim 0 is sequences: `tokens` and `labels` [B, S] (`labels[i, t]` is the token after `tokens[i, t]`),
those of `attention_mask`, `position_ids`, `sequence_ids` that are needed, the `temperature` [B] or [B, S] that was
sampled with, where it is not 1, and whatever a loss function reads."""
Report = dict[str, torch.Tensor]
"""Scalars by name."""
LossResult = torch.Tensor | Mapping[str, Any] | tuple[torch.Tensor, Mapping[str, Any]]
LossFunction = Callable[[Batch, torch.Tensor], LossResult]
"""(micro batch, log-probabilities [b, S] of the labels) -> mean loss, with or without scalars to report."""

# -- sides ------------------------------------------------------------------------------------------------------------


class WeightAdaptor(Protocol):
    """One side of a reshard: says where its weights lie on this rank."""

    def layout(self) -> Layout:
        """The records of this rank. Pure data; no collective. Raises ParameterMismatchError naming every parameter."""


class TrainingWeights(WeightAdaptor, Protocol):
    """The side that is read."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """This rank's flat source buffers by `BufferId.name`; live storage, no copies."""

    def prepare(self) -> None:
        """Finish whatever is pending on the weights (parameter gathers); afterwards the buffers hold final values.

        Raises ReshardError when the weights no longer lie where `layout` said.
        """

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """Raise WeightError naming every parameter that holds a NaN or an infinity.

        `unread`: intervals of the buffers that need no look, for they are not read in this switch.
        """


class LoadableWeights(TrainingWeights, Protocol):
    """Training weights that a checkpoint can be read into (backends/huggingface)."""

    def zero_padding(self) -> None:
        """Zero what no weight covers."""

    def zero_adapters(self) -> None:
        """Make adapters add nothing."""


class SourceWeights(TrainingWeights, Protocol):
    """Training weights that may have adapters."""

    @property
    def base(self) -> LoadableWeights:
        """Without adapters."""

    @property
    def merged(self) -> TrainingWeights:
        """With adapters added."""


class Trainer(Protocol):
    """Whoever trains: its weights, and what of its state can leave the device.

    Attributes:
        guard: called with the kinds of state that the trainer is about to use; raises StateError where they may be off
            the device. An `Offloader` and a `Switch` of this trainer add themselves.
        before_step: called before each optimizer step; raises StateError where servers would fall too far behind. A
            `WeightPublisher` sets it.
    """

    guard: Guards
    before_step: Callable[[], object]

    @property
    def weights(self) -> SourceWeights:
        """What is resharded; always the same object."""

    @property
    def version(self) -> int:
        """Number of optimizer steps the weights have taken."""

    @property
    def unserved(self) -> Collection[str]:
        """Canonical tensors that are trained and that the inference engine does not read."""

    @property
    def frozen(self) -> Collection[str]:
        """Those of this rank's canonical tensors that no optimizer step changes, as things stand at set-up.

        With `generate_config.incremental` they get buckets of their own. Whether a tensor changed is decided by
        its bytes.
        """

    def offload_items(self) -> Iterable[OffloadItem]:
        """Everything that can leave the device: parameters, gradients, optimizer state, caches, as they are now."""

    def reload_main_params(self) -> None:
        """Take up parameters that were written from outside, wherever the optimizer has copies of them."""


class Companion(Protocol):
    """A model beside the actor (trainer/companions/)."""

    name: str

    @property
    def has_the_device(self) -> bool:
        """Whether it is there in place of the actor."""

    def resident_nbytes(self) -> int:
        """Bytes of its state on this rank's device."""


class InferenceWeights(WeightAdaptor, Protocol):
    """The side that is written, group by group (a group is what its engine commits at once, e.g. a module)."""

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Flat destination buffers of these groups (all of this rank) by `BufferId.name`, padding already in place."""

    def commit(self, groups: Sequence[str]) -> None:
        """Make filled groups the live weights: run the engine's own post-load processing where it repacks them."""

    def finish_fill(self) -> None:
        """After the last commit of a fill: free staging memory."""

    def abandon(self) -> None:
        """This rank goes no further with a fill, wherever it failed: no other waits for it in `commit`. Waits for none.
        Idempotent.

        All ranks release the weights before they are filled again.
        """

    def release(self, keep: Collection[str] = ()) -> None:
        """Free the memory of all weights; they cannot be used before the next allocate, fill and commit.

        `keep`: committed groups that stay as they are where the engine can keep some without the others. Without
        `generate_config.incremental` none are named.
        """

    def committed(self) -> Collection[str]:
        """The groups that hold what was last committed to them; asked for with `generate_config.incremental` alone."""

    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> AbstractContextManager[None]:
        """Within this context `commit` checks of every group with one of these canonical tensors that the engine holds
        what was filled in place. Its end checks that all such groups, of earlier fills too, still have the bytes
        that were committed. `unproven` is told what is not so. Called where a fill is verified only."""

    def resident_nbytes(self) -> int:
        """Bytes of device memory that the weights take now, those in flight and memory kept for them included."""


class InferenceCaches(Protocol):
    """Caches of an inference engine, as the switch uses them.

    Attributes:
        taken_before: bytes of this rank's GPU that were taken when the engine was built; 0 on a CPU.
    """

    taken_before: int

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory again where the release of the weights gave it back."""

    def reset_caches(self) -> None:
        """Forget what was computed with older weights: no later answer depends on it, whatever it was."""


@dataclass(frozen=True)
class NearEnd:
    """What an inference engine that knows of it does for prefetch: calls in every rollout, on each rank by itself.

    Attributes:
        share: of this replica's sequences that are left, at most, when it calls.
        call: `ShardingManager.near_end`; what it raises ends the rollout.
    """

    share: float
    call: Callable[[], object]


# -- between them -----------------------------------------------------------------------------------------------------


class Transport(Protocol):
    """Moves bytes. Every rank calls `run` for every bucket, in the plan's order, with its share of it.

    Contract, checked for every transport by one test suite: after `run` returned on a rank, every transfer whose
    `dst_rank` is that rank is complete; source buffers may be overwritten only after all ranks of their host returned
    (the caller fences), whichever other hosts read them. Errors are TransportError, never a hang: waits end after the
    transport's timeout (seconds).

    A class of transports is registered in transports/router.py, which says what it carries and how it is built.
    """

    name: str

    def start(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor] | None,
        reason: str = "",
    ) -> None:
        """Begin what can be under way before `run`, or before `abandon`, of a bucket; not needed, and idempotent.

        No more than `relays.NUM_SLOTS` buckets are started and not run. Without `source` this rank failed elsewhere,
        for a `reason`.
        """

    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Carry out `transfers` (those of bucket number `bucket` that read from or write to this rank)."""

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """In place of `run`, by a rank that failed elsewhere: peers that wait for this rank fail with `reason`."""

    def notify(
        self, bucket: int, phase: str, receivers: Iterable[int], senders: Iterable[int], reason: str = ""
    ) -> str:
        """Tell `receivers` that this rank has finished a phase of a bucket, or failed for a `reason`; hear `senders`.

        Returns what the first of the senders to fail said, with peer, bucket and phase; "" when none did. Each rank
        is a listener of those that are its senders. A transport without messages does nothing: it returns "".
        """

    def take_seconds(self) -> Mapping[str, float]:
        """Seconds by phase since the last call: read (find sources, pack), transfer, write (unpack)."""

    def trim(self) -> int:
        """Between fills: give back staging memory, and say how many bytes it was."""

    def close(self) -> None:
        """Give back mappings and staging memory; idempotent."""
