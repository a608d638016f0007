"""Set-up with fakes of both engines: refused jobs, chosen transports and reported seconds."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, ReshardError, TransportError
from hybrid_engine.memory import descriptors, device_pages
from hybrid_engine.ranks import groups
from hybrid_engine.ranks.job import Job
from hybrid_engine.records import sides
from hybrid_engine.switch import setup
from hybrid_engine.switch.setup import hosts_without_access
from hybrid_engine.transports.collective import CollectiveTransport
from tests.harness.errors import violations_of
from tests.harness.launch import Ranks, on_ranks
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
        "Job.device: meta, but training weights of rank 0 are on cpu. Pass their "
        "device: Job.join(..., device=...)"
    )


@pytest.mark.parametrize(
    ("device", "refused"), [("cuda", False), ("cuda:1", False), ("cuda:0", True)]
)
def test_a_device_without_an_index_matches_any_of_its_type(
    job: None, device: str, refused: bool
) -> None:
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


SENT = "[Reshard] the ranks of this host send their weights instead of sharing memory: "
READ = "[Reshard] ranks that read each other's memory: "


def test_memory_of_another_rank_under_a_rank_s_name_is_an_obstacle(job: None) -> None:
    with closing(Job.join(60)) as alone:
        probe = setup._probe(alone)
        handles = setup.export_handles(1, {"probe": probe})
        assert setup._obstacle(alone, handles) == "rank 0 reads 0 where rank 1 wrote 1"


@contextmanager
def grouped() -> Iterator[int]:
    """Yield the rank in a default group that ends with the block."""
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def check_switches(transport: str, logged: str, host: str | None = None) -> None:
    """Switch twice with "auto" and one transport; `logged` is logged about memory, "" for nothing.

    Without `host` the host id is the one that the system reports.
    """
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    setup.logger.addHandler(handler)
    setup.logger.setLevel(logging.INFO)
    rig = Rig(elastic=True, host=host or groups.host_id())
    setup.logger.removeHandler(handler)
    for _ in range(2):
        assert set(rig.manager.enter(INFER).bytes_by_transport) == {transport}
        rig.assert_is(INFER)
        rig.train()
    rig.close()
    assert [line for line in lines if "memory" in line] == [logged] * bool(logged)


@contextmanager
def device_memory(ends: ExitStack, host: str | None = None) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns the hosts without access to device memory, over the tests'
    model of the driver.
    """
    with pytest.MonkeyPatch.context() as patch:
        DeviceRig(patch)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        with closing(Job.join(60, host=host, device=torch.device("cuda", 0))) as job:
            group = job.new_host_group(ends)
            yield lambda: list(hosts_without_access(job, GenerateConfig(), group))


@on_ranks(2)
def test_all_ranks_of_a_host_without_access_send_messages() -> None:
    reason = "rank 1 cannot read the memory of rank 0: not permitted"
    with grouped() as rank, ExitStack() as ends:
        error = TransportError("not permitted")
        with mock.patch.object(setup, "reading", side_effect=error) if rank else nullcontext():
            check_switches("collective", "" if rank else f"{SENT}{reason}", host="here")
            refused = rf"generate_config\.transport: shared_memory, but {reason}\. Choose auto or"
            with pytest.raises(ConfigError, match=refused):
                Rig(elastic=True, transport="shared_memory")
        with device_memory(ends, host="here") as hosts:
            assert hosts() == []
            with (
                mock.patch.object(device_pages, "fetch", side_effect=error)
                if rank
                else nullcontext()
            ):
                assert hosts() == ["here"]


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="a process namespace of its own needs root"
)


def in_two_containers(check: Callable[[int], None]) -> None:
    """Run a check on rank 0, and on rank 1 as the first process of a new namespace."""
    if os.environ["RANK"] == "0":
        with grouped() as rank:
            check(rank)
        return
    enter_a_process_namespace()
    if not (child := os.fork()):
        try:
            assert os.getpid() == 1
            with grouped() as rank:
                check(rank)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_root
def test_containers_of_one_meeting_directory_share_memory(ranks: Ranks) -> None:
    for check in (switch_between_containers, read_device_memory_between_containers):
        ranks.launch(in_two_containers, 2, check)


def switch_between_containers(rank: int) -> None:
    check_switches("shared_memory", "" if rank else f"{READ}0, 1")


def read_device_memory_between_containers(rank: int) -> None:
    with ExitStack() as ends, device_memory(ends) as hosts:
        assert hosts() == []


def test_containers_with_different_meeting_directories_send_messages(ranks: Ranks) -> None:
    # Not tmp_path: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as other:
        ranks.launch(switch_with_another_directory, 2, other)


def switch_with_another_directory(other: str) -> None:
    with pytest.MonkeyPatch.context() as patch, grouped() as rank:
        for module in (groups, descriptors, setup) if rank else ():
            patch.setattr(module, "MEETING_DIRECTORY", other)
        directory = other if rank else groups.MEETING_DIRECTORY
        others = (
            "by messages with 1 others (on another machine, or in a container with "
            f"another {directory})"
        )
        real = CollectiveTransport.meet
        with (
            mock.patch.object(CollectiveTransport, "meet", autospec=True, side_effect=real) as met,
            # No entry is made for each buffer of each rank.
            mock.patch.object(sides._BuffersOfSide, "__iter__", side_effect=AssertionError),
        ):
            check_switches("collective", f"{READ}{rank}; {others}")
        assert met.call_args.args[1] == {1 - rank}


def test_without_a_socket_all_ranks_send_messages(ranks: Ranks) -> None:
    ranks.launch(switch_without_sockets, 2)


def switch_without_sockets() -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS)) if os.environ["RANK"] == "1" else None
    why = "rank 1 cannot offer its memory: no socket in /tmp: Read-only file system"
    with (
        mock.patch.object(tempfile, "mkdtemp", side_effect=error, wraps=tempfile.mkdtemp),
        grouped() as rank,
    ):
        check_switches("collective", "" if rank else f"{SENT}{why}")
