"""Set-up with fakes of both engines: refused jobs, chosen transports and reported seconds."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, ReshardError, TransportError
from hybrid_engine.memory import descriptors, device_pages
from hybrid_engine.ranks import groups
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import BufferId
from hybrid_engine.switch import setup
from hybrid_engine.switch.setup import hosts_without_access
from tests.harness.errors import violations_of
from tests.harness.launch import Ranks
from tests.harness.namespaces import enter_a_process_namespace
from tests.hybrid_engine.memory.device_rig import Rig as DeviceRig
from tests.hybrid_engine.switch.fakes import INFER, Rig


def refusal_of(rig: Rig) -> str:
    """Build a job that is refused before more than the host's group exists; returns the message."""
    with mock.patch.object(Job, "new_group") as new_group, pytest.raises(ConfigError) as caught:
        rig.build()
    assert new_group.call_count <= 1
    assert not rig.offloader.is_offloaded("param")
    return str(caught.value)


def test_a_job_on_another_device_than_the_training_weights_is_refused(job: None) -> None:
    assert refusal_of(Rig(build=False, device="meta")).endswith(
        "Job.device: meta, but training weights of rank 0 are on cpu. Pass their device: Job.join(..., device=...)"
    )


@pytest.mark.parametrize(("device", "refused"), [("cuda", False), ("cuda:1", False), ("cuda:0", True)])
def test_a_device_without_an_index_matches_any_of_its_type(job: None, device: str, refused: bool) -> None:
    rig = Rig(build=False, device=device)
    # Fails after the device check, because it has no memory to export.
    rig.training.param = mock.Mock(device=torch.device("cuda", 1))
    with pytest.raises(ConfigError if refused else ReshardError) as caught:
        rig.build()
    assert refused == (("Job.device", "wrong-device") in violations_of(caught.value))


def test_a_job_with_another_timeout_is_refused(job: None) -> None:
    rig = Rig(build=False)
    rig.config = rig.config.model_copy(update={"timeout_seconds": 61.0})
    assert "generate_config.timeout_seconds: 61, but the job was joined with 60" in refusal_of(rig)


REASON = "rank 1 cannot read the memory of rank 0: not permitted"


@pytest.fixture(scope="module")
def denied_access(ranks: Ranks) -> list[dict[str, object]]:
    return ranks.launch(run_scenarios, 2)


def test_memory_of_another_rank_under_a_rank_s_name_is_an_obstacle(job: None) -> None:
    with closing(Job.join(60)) as alone, ExitStack() as ends:
        handle = setup._probe(alone, ends)
        assert setup._obstacle(alone, {BufferId(1, "probe"): handle}) == "rank 0 reads 0 where rank 1 wrote 1"


def run_scenarios() -> dict[str, object]:
    return in_a_group(
        lambda _: {
            "switches": with_rank_1_denied(switches),
            "refusal": with_rank_1_denied(refusal),
            "devices": devices(),
        }
    )


def with_rank_1_denied(scenario: Callable[[], object]) -> object:
    if dist.get_rank() == 0:
        return scenario()
    with mock.patch.object(setup, "reading", side_effect=TransportError("not permitted")):
        return scenario()


def switches(host: str | None = "here") -> dict[str, object]:
    """Switch twice with "auto"; returns the transports of each switch, and the lines logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    setup.logger.addHandler(handler)
    setup.logger.setLevel(logging.INFO)
    rig = Rig(elastic=True, host=host or groups.host_id())
    setup.logger.removeHandler(handler)
    by_transport = []
    for _ in range(2):
        by_transport.append(set(rig.manager.enter(INFER).bytes_by_transport))
        rig.assert_is(INFER)
        rig.train()
    rig.close()
    return {"transports": by_transport, "log": [line for line in lines if "memory" in line]}


def refusal() -> str:
    try:
        Rig(elastic=True, transport="shared_memory")
    except ConfigError as error:
        return str(error)
    return ""


def devices(host: str | None = "here") -> list[list[str]]:
    """Return hosts without access to device memory: first with access, then denied on rank 1.

    The driver is the tests' model.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ends:
        DeviceRig(patch)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        job = Job.join(60, host=host, device=torch.device("cuda", 0))
        group = job.new_host_group(ends)
        results = [list(hosts_without_access(job, GenerateConfig(), group))]
        if job.rank == 1:
            patch.setattr(device_pages, "fetch", mock.Mock(side_effect=TransportError("not permitted")))
        results.append(list(hosts_without_access(job, GenerateConfig(), group)))
        job.close()
    return results


def test_all_ranks_of_a_host_without_access_send_messages(denied_access: list[dict[str, object]]) -> None:
    logged = f"[Reshard] the ranks of this host send their weights instead of sharing memory: {REASON}"
    for rank, results in enumerate(denied_access):
        assert results["switches"] == {"transports": [{"collective"}] * 2, "log": [logged] * (rank == 0)}
        assert f"generate_config.transport: shared_memory, but {REASON}. Choose auto or" in str(results["refusal"])
        assert results["devices"] == [[], ["here"]]


READ = "[Reshard] ranks that read each other's memory: "


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace of its own needs root")
def test_containers_of_one_meeting_directory_share_memory(ranks: Ranks) -> None:
    outcomes = [ranks.launch(in_two_containers, 2, scenario) for scenario in (switches, devices)]
    for rank, (switched, on_devices) in enumerate(zip(*outcomes, strict=True)):
        assert switched == {"transports": [{"shared_memory"}] * 2, "log": [f"{READ}0, 1"] * (rank == 0)}
        assert on_devices[0] == []


def in_two_containers(scenario: Callable[[None], object]) -> object:
    if os.environ["RANK"] == "0":
        return in_a_group(scenario)
    enter_a_process_namespace()
    reader, writer = multiprocessing.Pipe(duplex=False)
    if not os.fork():  # the first process of the new namespace
        assert os.getpid() == 1
        writer.send(in_a_group(scenario))
        os._exit(0)
    writer.close()
    return reader.recv()


def in_a_group(scenario: Callable[[None], Any]) -> Any:
    """Run a scenario with the host id that the system reports."""
    dist.init_process_group("gloo")
    try:
        return scenario(None)
    finally:
        dist.destroy_process_group()


def test_containers_with_different_meeting_directories_send_messages(ranks: Ranks) -> None:
    # Not tmp_path: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as other:
        results_of_ranks = ranks.launch(with_another_directory, 2, other)
    for rank, results in enumerate(results_of_ranks):
        directory = other if rank else groups.MEETING_DIRECTORY
        others = f"by messages with 1 others (on another machine, or in a container with another {directory})"
        assert results == {"transports": [{"collective"}] * 2, "log": [f"{READ}{rank}; {others}"]}


def with_another_directory(other: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        for module in (groups, descriptors, setup) if os.environ["RANK"] == "1" else ():
            patch.setattr(module, "MEETING_DIRECTORY", other)
        return in_a_group(switches)


def test_without_a_socket_all_ranks_send_messages(ranks: Ranks) -> None:
    why = "rank 1 cannot offer its memory: no socket in /tmp: Read-only file system"
    logged = f"[Reshard] the ranks of this host send their weights instead of sharing memory: {why}"
    for rank, results in enumerate(ranks.launch(without_sockets, 2)):
        assert results == {"transports": [{"collective"}] * 2, "log": [logged] * (rank == 0)}


def without_sockets() -> object:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS)) if os.environ["RANK"] == "1" else None
    with mock.patch.object(tempfile, "mkdtemp", side_effect=error, wraps=tempfile.mkdtemp):
        return in_a_group(switches)
