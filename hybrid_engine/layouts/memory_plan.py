"""What the models of a job keep on the devices in each of its phases, in bytes, before any of them is built.

    phase            on the device
    train            the actor's parameters, gradients and optimizer state
    forward          the actor's parameters
    switch           the peak on the way to inference (memory_peaks.py)
    generate         vLLM's weights
    reference        a frozen copy of the actor's parameters
    critic train     the critic's parameters, gradients and optimizer state
    critic forward   the critic's parameters

and in each what the configuration leaves there: kinds that are not offloaded, inference weights that are not released,
a critic that stays. Activations, KV cache and what libraries keep are not counted (`memory_peaks.NOT_COUNTED`), nor is
the padding of buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybrid_engine.layouts.memory_peaks import MemoryPeaks, TrainingMemory

MODELS = ("actor", "vLLM", "reference", "critic")
"""Whose bytes a phase is made of."""

GIB = 1024**3


@dataclass(frozen=True)
class Stays:
    """What the configuration leaves on the device in every phase.

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
        name, unit = ("GiB", GIB) if most >= GIB else ("MiB", 2**20)

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
    """Every phase.

    Args:
        actor: of the training side. inference: bytes of vLLM's weights by rank. critic: where there is one.
        bucket_nbytes: of a switch.
        stays: beside what a phase needs; default: nothing.
        budget: bytes of each device.
    """
    stays = stays or Stays()
    kept_inference = inference if stays.inference_nbytes is None else np.minimum(inference, stays.inference_nbytes)
    beside: dict[str, np.ndarray] = {}
    if kept_inference.any():
        beside["vLLM"] = kept_inference
    if critic is not None and stays.critic:
        beside["critic"] = _all_of(critic)

    def with_actor(kinds: frozenset[str]) -> dict[str, np.ndarray]:
        resident = _of_kinds(actor, kinds | stays.kinds)
        return {**beside, **({"actor": resident} if resident.any() else {})}

    switch = _switch(actor, inference, bucket_nbytes, stays, beside)
    phases = [
        Phase("train", with_actor(frozenset({"param", "grad", "optimizer"}))),
        Phase("forward", with_actor(frozenset({"param"}))),
        switch,
        # what is prefetched comes beside the weights, within the peak of a switch
        Phase("generate", {**with_actor(frozenset()), "vLLM": inference}, switch.peak if stays.prefetches else None),
        Phase("reference", {**with_actor(frozenset()), "reference": actor.params}),
    ]
    if critic is not None:
        phases += [
            Phase("critic train", {**with_actor(frozenset()), "critic": _all_of(critic)}),
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
    # where all of both is there at once, a bucket lies beside it in which vLLM's weights come before it derives its own
    peak = peak + np.where(peak == peaks.switch, np.minimum(bucket_nbytes, inference), 0)
    peak = peak + _of_kinds(actor, stays.kinds - {"param"})
    if stays.inference_nbytes:
        peak = peak + beside.get("vLLM", 0)
    if stays.prefetches:
        peak = np.maximum(peak, peaks.training)
    return Phase("switch", {}, peak + beside.get("critic", 0))


def _of_kinds(memory: TrainingMemory, kinds: frozenset[str]) -> np.ndarray:
    by_kind = {"param": memory.params, "grad": memory.grads, "optimizer": memory.optimizer}
    return np.asarray(sum((nbytes for kind, nbytes in by_kind.items() if kind in kinds), np.zeros_like(memory.params)))


def _all_of(memory: TrainingMemory) -> np.ndarray:
    return memory.params + memory.grads + memory.optimizer


def gib(nbytes: float) -> str:
    """Bytes in a sentence, in GiB, or in MiB where these would be few."""
    size, unit = (nbytes / GIB, "GiB") if abs(nbytes) >= GIB / 10 else (nbytes / 1024**2, "MiB")
    return f"{size:.1f} {unit}" if abs(size) >= 10 else f"{size:.3g} {unit}"
