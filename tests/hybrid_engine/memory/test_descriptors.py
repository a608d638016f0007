"""Passing descriptors between processes: containers, access control and lifetime."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from hybrid_engine.errors import MessageError, TransportError
from hybrid_engine.memory import descriptors
from hybrid_engine.memory.descriptors import fetch
from hybrid_engine.memory.elastic import ElasticBuffer, export_tensor
from hybrid_engine.memory.host_pages import PAGE, BufferHandle, libc, map_pages
from hybrid_engine.messages import decode, encode
from tests.harness.errors import has_code, refused
from tests.harness.namespaces import enter_a_process_namespace

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="changes user or namespace, which needs root"
)
STRANGER = 12345  # user id


@pytest.fixture
def handle() -> BufferHandle:
    buffer = ElasticBuffer(10, torch.float32)
    buffer.tensor.fill_(3)
    kept.append(buffer)
    return buffer.export()


kept: list[ElasticBuffer] = []  # keeps the fixture's buffers alive


@pytest.fixture(autouse=True)
def assert_nothing_leaks():
    """Assert that no descriptor, thread or directory is left, even after refusals."""
    gc.collect()
    before = count_resources()
    yield
    addresses = [server.address for server in descriptors._servers]
    kept.clear()
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := max(now - was for now, was in zip(count_resources(), before, strict=True))) > 0:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert [address for address in addresses if os.path.exists(os.path.dirname(address))] == []


def count_resources() -> tuple[int, int]:
    """Return the numbers of open descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def in_a_child(call: Callable[[], None]) -> None:
    """Run in a forked process; prints a failure."""
    if not (child := os.fork()):
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def refused_fetch(
    handle: BufferHandle, check: Callable[[BaseException], bool], *names: str
) -> Callable[[], None]:
    def fetch_refused() -> None:
        with pytest.raises(TransportError, check=check):
            fetch(handle.address, names or [handle.token])

    return fetch_refused


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # capset(2), version 3
    data = (ctypes.c_uint32 * 6)()
    assert libc().capset(header, data) == 0


@needs_root
def test_a_process_in_another_namespace_without_permissions_can_read(handle: BufferHandle):
    """switch/test_setup.py tests device memory, since CUDA does not work in a forked child."""
    owner = os.getpid()
    fd = kept[0].memory._file.fd

    def read() -> None:
        enter_a_process_namespace()  # applies to children only
        in_a_child(read_there)

    def read_there() -> None:
        drop_capabilities()
        assert os.getpid() == 1  # first in the new namespace
        with pytest.raises(PermissionError):
            os.open(f"/proc/{owner}/fd/{fd}", os.O_RDONLY)
        with pytest.raises(ProcessLookupError):
            os.pidfd_open(owner)
        assert map_pages(handle).tolist() == [3] * 10

    in_a_child(read)


@needs_root
def test_another_user_is_refused_by_directory_and_by_user_id(handle: BufferHandle):
    path = Path(handle.address)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def as_stranger(check: Callable[[BaseException], bool]) -> Callable[[], None]:
        def fetch_as_stranger() -> None:
            os.setuid(STRANGER)
            refused_fetch(handle, check)()

        return fetch_as_stranger

    in_a_child(as_stranger(has_code("owner-unreachable", "Permission denied")))
    path.parent.chmod(0o755)
    path.chmod(0o777)
    in_a_child(as_stranger(has_code("owner-is-gone", f"user {STRANGER}", f"user {os.geteuid()}")))


def test_unknown_tokens_are_refused(handle: BufferHandle):
    for names in (["other"], [handle.token, "other"], [handle.token + "\0"], ["\n"]):
        refused_fetch(handle, has_code("owner-is-gone", "released"), *names)()
    copies = fetch(handle.address, [handle.token] * descriptors.MAX_DESCRIPTORS)
    assert len(set(copies)) == descriptors.MAX_DESCRIPTORS
    assert not any(map(os.get_inheritable, copies))
    for copy in copies:
        os.close(copy)


def test_a_peer_out_of_descriptors_gets_an_error_and_keeps_none(handle: BufferHandle):
    def fetch_without_room() -> None:
        num_open = len(os.listdir("/proc/self/fd"))
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 4,) * 2)  # room for a few of 100
        refused_fetch(handle, has_code("owner-is-gone", "ulimit -n"), *[handle.token] * 100)()
        assert len(os.listdir("/proc/self/fd")) == num_open

    in_a_child(fetch_without_room)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, "owner-is-gone"), (signal.SIGSTOP, "owner-unreachable")],
)
def test_a_killed_or_stopped_owner_is_an_error(
    number: int, code: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(descriptors, "_REPLY_TIMEOUT", 0.5)
    reader, writer = os.pipe()
    if not (owner := os.fork()):
        buffer = ElasticBuffer(10, torch.float32)
        exported = buffer.export()
        os.write(writer, f"{exported.address} {exported.token}".encode())
        time.sleep(1000)  # until it is killed
    address, token = os.read(reader, 1000).decode().split()
    os.close(fetch(address, [token])[0])  # works while the owner runs
    os.kill(owner, number)
    os.waitid(os.P_PID, owner, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    with refused(TransportError, code, address):
        fetch(address, [token])
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.unlink(address)
    os.rmdir(os.path.dirname(address))
    os.close(reader)
    os.close(writer)


def test_a_forked_child_has_its_own_server(handle: BufferHandle):
    def use() -> None:
        tensor = ElasticBuffer(10, torch.float32).tensor.fill_(4)
        exported = export_handle(tensor)
        assert os.path.dirname(exported.address) != os.path.dirname(handle.address)
        assert map_pages(exported).tolist() == [4] * 10
        assert map_pages(kept[0].export()).tolist() == [3] * 10, (
            "an inherited buffer, exported by the child"
        )
        kept.clear()
        del tensor
        gc.collect()

    in_a_child(use)
    assert map_pages(handle).tolist() == [3] * 10


def export_handle(tensor: torch.Tensor) -> BufferHandle:
    handle = export_tensor(tensor)
    assert isinstance(handle, BufferHandle)
    return handle


def test_a_buffer_closed_while_it_is_sent_is_still_the_right_file(
    handle: BufferHandle, monkeypatch: pytest.MonkeyPatch
):
    """The buffer is closed while its descriptor is sent, and a new file gets the same number."""
    send = socket.send_fds
    reused = []

    def close_and_send(connection: socket.socket, *arguments: object) -> int:
        kept.clear()
        reused.append(os.open("/dev/null", os.O_RDONLY))
        return send(connection, *arguments)

    monkeypatch.setattr(socket, "send_fds", close_and_send)
    assert map_pages(handle).tolist() == [3] * 10
    os.close(reused.pop())


@pytest.mark.parametrize(
    "values",
    [
        *({"offset": value} for value in (-4096, -4, 2, 4060, PAGE, 2**63)),
        *({"numel": value} for value in (-1, 0, PAGE // 4 + 1, 2**62)),
        *({"file_nbytes": value} for value in (-PAGE, 0, 39)),
        *({"dtype": value} for value in ("float31", "nn", "Tensor", "", "__name__", "float64x")),
    ],
    ids=str,
)
def test_a_handle_outside_its_file_is_refused(
    handle: BufferHandle, values: dict[str, object]
) -> None:
    with refused(MessageError, "malformed-handle"):
        replace(handle, **values)
    fields = [values.get(name, getattr(handle, name)) for name in BufferHandle.__struct_fields__]
    with pytest.raises(MessageError):
        decode(encode(["BufferHandle", *fields]), BufferHandle)


def test_a_file_with_another_size_is_not_mapped(handle: BufferHandle) -> None:
    for nbytes in (40, 2 * PAGE, 2**40):
        with refused(TransportError, "wrong-file-size", str(PAGE), str(nbytes)):
            map_pages(replace(handle, file_nbytes=nbytes))


def test_silent_or_closed_peers_delay_no_other_peer(
    handle: BufferHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent connections are closed after a timeout."""
    timeout = 3.0
    monkeypatch.setattr(descriptors, "_REQUEST_TIMEOUT", timeout)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(6)]
    for connection in silent:
        connection.connect(handle.address)
    started = time.monotonic()
    for _ in range(4):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
            gone.connect(handle.address)
            gone.send(handle.token.encode())
        assert map_pages(handle).tolist() == [3] * 10
    assert time.monotonic() - started < timeout, "it waited for a silent peer"
    for connection in silent:
        connection.settimeout(20 * timeout)
        assert connection.recv(1) == b""
        connection.close()
