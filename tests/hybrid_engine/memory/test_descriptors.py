"""Descriptors between processes: where containers forbid the ways that need a permission, to whom, and until when."""

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
from tests.harness.errors import has_code
from tests.harness.namespaces import enter_a_process_namespace

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes user or namespace, which needs root")
STRANGER = 12345


@pytest.fixture
def handle() -> BufferHandle:
    buffer = ElasticBuffer(10, torch.float32)
    buffer.tensor.fill_(3)
    kept.append(buffer)
    return buffer.export()


kept: list[ElasticBuffer] = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Neither descriptors nor threads nor a directory, whatever was asked and refused."""
    gc.collect()
    before = held()
    yield
    addresses = [each.address for each in descriptors._servers]
    kept.clear()
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := max(now - was for now, was in zip(held(), before, strict=True))) > 0:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert [each for each in addresses if os.path.exists(os.path.dirname(each))] == []


def held() -> tuple[int, int]:
    """Numbers of descriptors and of threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def in_a_child(call: Callable[[], None]) -> None:
    """Run in a forked process; a failure there is printed."""
    if not (child := os.fork()):
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def refused(handle: BufferHandle, check: Callable[[BaseException], bool], *names: str) -> Callable[[], None]:
    def ask() -> None:
        with pytest.raises(TransportError, check=check):
            fetch(handle.address, names or [handle.token])

    return ask


def drop_capabilities() -> None:
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # capset(2), version 3
    assert libc().capset(header, data) == 0


@needs_root
def test_another_process_namespace_without_permissions_reads(handle: BufferHandle):
    """Device memory: switch/test_setup.py, since CUDA does not work in a forked child."""
    owner, fd = os.getpid(), kept[0]._memory._open_file().fd

    def read() -> None:
        enter_a_process_namespace()
        in_a_child(read_there)

    def read_there() -> None:
        drop_capabilities()
        assert os.getpid() == 1
        with pytest.raises(PermissionError):
            os.open(f"/proc/{owner}/fd/{fd}", os.O_RDONLY)
        with pytest.raises(ProcessLookupError):
            os.pidfd_open(owner)
        assert map_pages(handle).tolist() == [3] * 10

    in_a_child(read)


@needs_root
def test_a_stranger_is_kept_out_by_the_directory_and_by_its_user(handle: BufferHandle):
    path = Path(handle.address)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def ask(check: Callable[[BaseException], bool]) -> Callable[[], None]:
        def as_a_stranger() -> None:
            os.setuid(STRANGER)
            refused(handle, check)()

        return as_a_stranger

    in_a_child(ask(has_code("owner-unreachable", "Permission denied")))
    path.parent.chmod(0o755)
    path.chmod(0o777)
    in_a_child(ask(has_code("owner-is-gone", f"user {STRANGER}", f"user {os.geteuid()}")))


def test_unknown_names_get_nothing(handle: BufferHandle):
    for names in (["other"], [handle.token, "other"], [handle.token + "\0"], ["\n"]):
        refused(handle, has_code("owner-is-gone", "released"), *names)()
    copies = fetch(handle.address, [handle.token] * descriptors.MOST_AT_ONCE)
    assert len(set(copies)) == descriptors.MOST_AT_ONCE
    assert not any(map(os.get_inheritable, copies))
    for copy in copies:
        os.close(copy)


def test_a_peer_without_descriptors_left_is_told_and_keeps_none(handle: BufferHandle):
    def ask() -> None:
        num_open, lowest = len(os.listdir("/proc/self/fd")), os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 4,) * 2)
        refused(handle, has_code("owner-is-gone", "ulimit -n"), *[handle.token] * 100)()
        assert len(os.listdir("/proc/self/fd")) == num_open

    in_a_child(ask)


def test_peers_that_ask_nothing_or_go_away_do_not_stop_others(handle: BufferHandle, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(descriptors, "_REQUEST_TIMEOUT", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(handle.address)
        for _ in range(3):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
                gone.connect(handle.address)
                gone.send(handle.token.encode())
        assert map_pages(handle).tolist() == [3] * 10


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, "owner-is-gone"), (signal.SIGSTOP, "owner-unreachable")],
)
def test_an_owner_that_was_killed_or_stopped(number: int, code: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(descriptors, "_REPLY_TIMEOUT", 0.5)
    reader, writer = os.pipe()
    if not (owner := os.fork()):
        buffer = ElasticBuffer(10, torch.float32)
        told = buffer.export()
        os.write(writer, f"{told.address} {told.token}".encode())
        time.sleep(1000)
    address, token = os.read(reader, 1000).decode().split()
    os.close(fetch(address, [token])[0])
    os.kill(owner, number)
    os.waitid(os.P_PID, owner, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(TransportError, check=has_code(code, address)):
        fetch(address, [token])
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.unlink(address)
    os.rmdir(os.path.dirname(address))
    os.close(reader)
    os.close(writer)


def test_a_forked_child_ends_nothing_of_its_parents_and_has_a_server_of_its_own(handle: BufferHandle):
    def use() -> None:
        own = ElasticBuffer(10, torch.float32).tensor.fill_(4)
        told = descriptors_of(own)
        assert os.path.dirname(told.address) != os.path.dirname(handle.address)
        assert map_pages(told).tolist() == [4] * 10
        assert map_pages(kept[0].export()).tolist() == [3] * 10, "what it inherited, from itself"
        kept.clear()
        del own
        gc.collect()

    in_a_child(use)
    assert map_pages(handle).tolist() == [3] * 10


def descriptors_of(tensor: torch.Tensor) -> BufferHandle:
    told = export_tensor(tensor)
    assert isinstance(told, BufferHandle)
    return told


def test_what_was_closed_while_it_is_sent_is_not_another_file(handle: BufferHandle, monkeypatch: pytest.MonkeyPatch):
    """The owner closes a buffer between the thread's look and its answer, and opens a file, which takes the number."""
    send, others = socket.send_fds, []

    def late(connection: socket.socket, *arguments: object) -> int:
        kept.clear()
        others.append(os.open("/dev/null", os.O_RDONLY))
        return send(connection, *arguments)

    monkeypatch.setattr(socket, "send_fds", late)
    assert map_pages(handle).tolist() == [3] * 10
    os.close(others.pop())


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
def test_a_handle_of_what_is_not_in_its_file_is_no_message(handle: BufferHandle, values: dict[str, object]) -> None:
    with pytest.raises(MessageError, check=has_code("malformed-handle")):
        replace(handle, **values)
    fields = [values.get(name, getattr(handle, name)) for name in BufferHandle.__struct_fields__]
    with pytest.raises(MessageError):
        decode(encode(fields), BufferHandle)


def test_a_file_of_another_size_than_its_handle_says_is_not_mapped(handle: BufferHandle) -> None:
    for nbytes in (40, 2 * PAGE, 2**40):
        with pytest.raises(TransportError, check=has_code("wrong-file-size", str(PAGE), str(nbytes))):
            map_pages(replace(handle, file_nbytes=nbytes))


def test_peers_that_say_nothing_keep_nobody_waiting(handle: BufferHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are closed after a while, the oldest before that where there are many."""
    monkeypatch.setattr(descriptors, "_REQUEST_TIMEOUT", 1.0)
    monkeypatch.setattr(descriptors, "_MOST_SILENT", 3)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(6)]
    for connection in silent:
        connection.connect(handle.address)
    started = time.monotonic()
    for _ in range(4):
        assert map_pages(handle).tolist() == [3] * 10
    assert time.monotonic() - started < 0.5
    for connection in silent:
        connection.settimeout(5)
        assert connection.recv(1) == b""
        connection.close()
    assert time.monotonic() - started < 5
