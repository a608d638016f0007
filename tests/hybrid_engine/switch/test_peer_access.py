"""Ranks of a host that may not read each other's memory send messages instead, from the first switch on."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, TransportError
from hybrid_engine.memory import device_peers
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch import peer_access
from hybrid_engine.switch.peer_access import hosts_without_access
from tests.harness.launch import Ranks
from tests.hybrid_engine.memory.device_rig import Rig as DeviceRig
from tests.hybrid_engine.switch.fakes import INFER, TRAIN, Rig

REASON = "rank 1 cannot read the memory of rank 0: not permitted"


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> list[dict[str, object]]:
    return ranks.launch(everything, 2)


def everything() -> dict[str, object]:
    dist.init_process_group("gloo")
    results = {"switches": on_rank_1_denied(switches), "refusal": on_rank_1_denied(refusal), "devices": devices()}
    dist.destroy_process_group()
    return results


def on_rank_1_denied(scenario: Callable[[], object]) -> object:
    if dist.get_rank() == 0:
        return scenario()
    with mock.patch.object(peer_access, "open_peer", side_effect=TransportError("not permitted")):
        return scenario()


def switches() -> dict[str, object]:
    """What a rank reads by messages in two switches with "auto", and what it logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    peer_access.logger.addHandler(handler)
    rig = Rig(elastic=True)
    peer_access.logger.removeHandler(handler)
    by_transport = []
    for _ in range(2):
        by_transport.append(set(rig.manager.enter(INFER).bytes_by_transport))
        rig.assert_is(INFER)
        rig.manager.enter(TRAIN)
        rig.training.step()
    rig.close()
    return {"transports": by_transport, "log": [line for line in lines if "sharing memory" in line]}


def refusal() -> str:
    try:
        Rig(elastic=True, transport="shared_memory")
    except ConfigError as error:
        return str(error)
    return ""


def devices() -> list[frozenset[str]]:
    """With device memory, whose driver is the tests' model: where descriptors may be copied, and not on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        DeviceRig(patch)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        job = Job.join(60, host="here", device=torch.device("cuda", 0))
        results = [hosts_without_access(job, GenerateConfig())]
        if job.rank == 1:
            patch.setattr(device_peers, "_pidfd_getfd", lambda pidfd, descriptor: (-1, errno.EPERM))
        results.append(hosts_without_access(job, GenerateConfig()))
        job.close()
    return results


def test_all_ranks_of_the_host_send_messages(found: list[dict[str, object]]) -> None:
    logged = f"[Reshard] the ranks of this host send their weights instead of sharing memory: {REASON}"
    for rank, results in enumerate(found):
        assert results["switches"] == {"transports": [{"collective"}] * 2, "log": [logged] * (rank == 0)}


def test_shared_memory_alone_is_refused_with_the_reason(found: list[dict[str, object]]) -> None:
    for results in found:
        assert f"generate_config.transport: shared_memory, but {REASON}. Choose auto or" in str(results["refusal"])


def test_device_memory_is_tried_with_the_driver(found: list[dict[str, object]]) -> None:
    assert [results["devices"] for results in found] == [[frozenset(), frozenset({"here"})]] * 2
