"""What the engine asks of the things it drives: adaptors, transports and memory.

    TrainingWeights   --layout()-->  plan  <--layout()--  InferenceWeights
          |                                                   ^
          | buffers()                        allocate(groups) | commit(groups)
          v                                                   |
       source tensors  ---- Transport.run(transfers) ---->  destination tensors

Every port is tiny. A flat buffer is a 1-D tensor over a whole storage; offsets and strides of the records count its
elements. Nothing here knows Megatron or vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import Layout


@runtime_checkable
class WeightAdaptor(Protocol):
    """One side of a reshard: says where its weights lie on this rank."""

    def layout(self) -> Layout:
        """The records of this rank. Pure data; no collective. Raises ParameterMismatchError naming every parameter."""
        ...


@runtime_checkable
class TrainingWeights(WeightAdaptor, Protocol):
    """The side that is read."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """This rank's flat source buffers by `BufferId.name`; live storage, no copies."""
        ...

    def prepare(self) -> None:
        """Finish whatever is pending on the weights (parameter gathers); afterwards the buffers hold final values.

        Raises ReshardError when the weights no longer lie where `layout` said.
        """
        ...

    def check_values(self) -> None:
        """Raise WeightError naming every parameter that holds a NaN or an infinity."""
        ...


@runtime_checkable
class InferenceWeights(WeightAdaptor, Protocol):
    """The side that is written, group by group (a group is what its engine commits at once, e.g. a module)."""

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Flat destination buffers of these groups (all of this rank) by `BufferId.name`, padding already in place."""
        ...

    def commit(self, groups: Sequence[str]) -> None:
        """Put filled groups in force: run the engine's own post-load processing where it repacks weights."""
        ...

    def settle(self) -> None:
        """After the last commit of a fill: free the memory that only the way there needed."""
        ...

    def release(self) -> None:
        """Free the memory of all weights; they cannot be used before the next allocate, fill and commit."""
        ...

    def resident_nbytes(self) -> int:
        """Bytes of device memory that the weights take now, those on their way and memory kept for them included."""
        ...


@dataclass
class PhaseClock:
    """Seconds by phase, summed up until `take`.

    read: find the sources, pack them; transfer: bytes cross from rank to rank, and copies that go straight from
    source to destination; write: unpack into destinations. On CUDA a phase that only queues work ends before the work
    does, and the next phase that waits has its time.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "transfer", "write"), 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The sums since the last call, which start again at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken


class Transport(Protocol):
    """Moves bytes. Every rank calls `run` with its share of the same bucket, in the same order.

    Contract, checked for every transport by one test suite: after `run` returned on a rank, every transfer whose
    `dst_rank` is that rank is complete; source buffers may be overwritten only after all ranks returned (the caller
    fences). Errors are TransportError, never a hang: waits end after the transport's timeout (seconds).
    """

    name: str
    clock: PhaseClock

    def start(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor] | None,
        reason: str = "",
    ) -> None:
        """Begin what can be under way before `run`, or before `abandon`, of a bucket; not needed, and idempotent.

        All ranks start, run and abandon in one order, and no more than `relays.NUM_SLOTS` buckets are started and not
        run. Without `source` this rank failed elsewhere, for a `reason`.
        """
        ...

    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Carry out `transfers` (those of bucket number `bucket` that read from or write to this rank)."""
        ...

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """In place of `run`, by a rank that failed elsewhere: peers that wait for this rank fail with `reason`."""
        ...

    def trim(self) -> int:
        """Between fills: give back staging memory, and say how many bytes it was."""
        ...

    def close(self) -> None:
        """Give back mappings and staging memory; idempotent."""
        ...


@runtime_checkable
class ExportableBuffer(Protocol):
    """A flat buffer whose pages can be given back and taken again under the same address, and shared with peers."""

    tensor: torch.Tensor

    def export(self) -> Any:
        """A small picklable handle with which a process on the same host can map the buffer."""
        ...

    def release(self) -> None:
        """Give the physical pages back; the contents are lost, every view stays valid (and reads zeros or traps)."""
        ...

    def close(self) -> None:
        """End the mapping; idempotent."""
        ...
