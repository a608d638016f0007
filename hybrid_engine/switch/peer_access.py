"""Whether the ranks of a host can read each other's memory, tried at set-up.

A container's seccomp profile, the host's ptrace rules, or GPUs that do not reach each other forbid it. Found in the
middle of a switch that would be an error; found here, the ranks of that host send messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

import torch

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, TransportError, Violation
from hybrid_engine.memory.elastic import ElasticBuffer, Handle, is_elastic, open_peer
from hybrid_engine.ranks.job import Job
from hybrid_engine.transports.registry import CONFIG_KEY
from hybrid_engine.transports.shared_memory import SharedMemoryTransport

logger = logging.getLogger("hybrid_engine")

_PHASE = "peer access"


def hosts_without_access(job: Job, config: GenerateConfig) -> frozenset[str]:
    """Hosts on which a rank cannot read another's memory; each is logged with the first reason. Collective.

    Raises ConfigError, on all ranks, where `config.transport` allows nothing else.
    """
    reasons = _reasons_by_host(job)
    if reasons and config.transport == SharedMemoryTransport.name:
        remedy = "Choose auto or collective, or give the permission"
        raise ConfigError([Violation(CONFIG_KEY, f"{config.transport}, but {why}", remedy) for why in reasons.values()])
    for host, why in reasons.items():
        if job.rank == job.hosts.index(host) and config.transport == "auto":
            logger.warning("[Reshard] the ranks of this host send their weights instead of sharing memory: %s", why)
    return frozenset(reasons)


def _reasons_by_host(job: Job) -> Mapping[str, str]:
    """The same on all ranks."""
    with ExitStack() as ends:
        with job.agreement.phase(_PHASE):
            handle = _probe(job, ends) if is_elastic(job.device) else None
        handles: Sequence[Handle | None] = job.agreement.gather(handle, _PHASE)
        with job.agreement.phase(_PHASE):
            why = _obstacle(job, handles)
        found: Sequence[str] = job.agreement.gather(why, _PHASE)
    reasons: dict[str, str] = {}
    for host, why in zip(job.hosts, found, strict=True):
        if why:
            reasons.setdefault(host, why)
    return reasons


def _probe(job: Job, ends: ExitStack) -> Handle:
    """A buffer that holds this rank's number, until `ends` is closed."""
    probe = ElasticBuffer(1, torch.int64, "probe", job.device)
    ends.callback(probe.close)
    probe.tensor.fill_(job.rank)
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return probe.export()


def _obstacle(job: Job, handles: Sequence[Handle | None]) -> str:
    """Why this rank cannot read the probe of another of its host; "" if it can read all."""
    for peer, handle in enumerate(handles):
        if handle is None or peer == job.rank or job.hosts[peer] != job.hosts[job.rank]:
            continue
        try:
            with closing(open_peer(handle, job.device)) as opened, opened.mapped() as flat:
                number = int(flat[0])
        except TransportError as error:
            return f"rank {job.rank} cannot read the memory of rank {peer}: {error}"
        if number != peer:
            return f"rank {job.rank} reads {number} where rank {peer} wrote {peer}"
    return ""
