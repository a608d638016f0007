"""The switches after the first where some weights are frozen, with `incremental: auto`."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.planning.planner import tensors_apart
from hybrid_engine.planning.summary import ByteSummary, summarize
from hybrid_engine.records.holdings import Holdings, SideLayout, first_members, rank_classes


@dataclass(frozen=True, eq=False)
class LaterSwitches:
    """What each of them costs.

    Attributes:
        kept: bytes of inference weights that stay on each device while it trains, of which `incremental_mb` must be the
            largest at least; int array by rank.
        bytes: of the rest, which is sent.
    """

    kept: np.ndarray
    bytes: ByteSummary

    @property
    def incremental_mb(self) -> int:
        """The smallest value of the key with which all of it stays."""
        return -(-int(self.kept.max()) // 1024**2)


def later_switches(job: JobPlan, patterns: Sequence[str]) -> LaterSwitches:
    """Of a job whose canonical tensors with these names (`*`, `?`) are frozen.

    A frozen tensor that vLLM commits together with a trained one is sent with it. Raises ConfigError for a pattern that
    matches nothing.
    """
    source, destination = job.source.holdings, job.destination.holdings
    unknown = [pattern for pattern in patterns if not fnmatch.filter(source.owners, pattern)]
    if unknown:
        remedy = "Use names of the checkpoint, as in model.safetensors.index.json"
        raise ConfigError([Violation("--frozen", f"no tensor matches {pattern}", remedy) for pattern in unknown])
    frozen = {name for pattern in patterns for name in fnmatch.filter(source.owners, pattern)}
    apart = tensors_apart(job.source, job.destination, frozen, job.memory.bucket)
    hosts, relaying = job.cluster.hosts(job.world_size), job.cluster.relaying_hosts(job.world_size)
    sent = summarize(_without(source, apart), _without(destination, apart), hosts, relaying)
    return LaterSwitches(_nbytes_by_rank(job.destination, apart), sent)


def _without(holdings: Holdings, names: Collection[str]) -> Holdings:
    return replace(
        holdings,
        dtypes={name: dtype for name, dtype in holdings.dtypes.items() if name not in names},
        owners={name: owners for name, owners in holdings.owners.items() if name not in names},
    )


def _nbytes_by_rank(side: SideLayout, names: Collection[str]) -> np.ndarray:
    """Of the buffers that these tensors lie in, padding included."""
    classes = rank_classes(side.holdings)
    nbytes = []
    for rank in first_members(classes).tolist():
        buffers = {shard.place.buffer: buffer for name in names for shard, buffer in side.shards_of(rank, name)}
        nbytes.append(sum(buffer.nbytes for buffer in buffers.values()))
    return np.array(nbytes, dtype=np.int64)[classes]
