"""How processes of a host get at each other's memory: as descriptors, over Unix sockets.

    owner   Descriptor(fd).offer(name) -> address      answered by a thread, for as long as anything is offered
    peer    fetch(address, names) -> [fd, ...]         copies, which the peer closes

Passing a descriptor (SCM_RIGHTS) needs no permission over the other process. Opening /proc/<pid>/fd or pidfd_getfd(2)
does, which containers refuse by process namespaces, Yama and seccomp. What it needs is a directory that both see. The
socket lies in one of `MEETING_DIRECTORY` that this user alone can open, and the owner asks the kernel for the peer's
user (SO_PEERCRED). Names are random: one that is gone never comes to stand for something else.

What is offered is closed with the last reference to it, so never while the thread is sending it. Whoever drops that
reference while it holds `sending` has closed it then: the memory has gone. A process that is killed leaves its socket.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from array import array
from collections.abc import Sequence

from hybrid_engine.errors import TransportError
from hybrid_engine.ranks.groups import MEETING_DIRECTORY

logger = logging.getLogger("hybrid_engine")

MOST_AT_ONCE = 253  # SCM_MAX_FD of Linux
_LIMIT = 2**16  # bytes of a question or an answer
_MOST_SILENT = 64  # connections that have not asked yet; the oldest goes for the next
_SECONDS_TO_ASK, _SECONDS_TO_ANSWER = 10.0, 20.0
_GRANTED = b"\0"

sending = threading.RLock()
"""Held while descriptors are sent, which waits for nobody. No process is forked meanwhile: it would keep them open."""
os.register_at_fork(before=sending.acquire, after_in_parent=sending.release, after_in_child=sending.release)


class Descriptor:
    """A descriptor of this process, closed with the last reference to this object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._server: _Server | None = None
        weakref.finalize(self, os.close, fd)

    def offer(self, name: str) -> str:
        """Let processes of this user `fetch` it by this name; returns the address at which they ask.

        Raises TransportError where there can be no socket.
        """
        self._server = next(iter(_servers), None) or _Server()
        _offered[name] = self
        return self._server.address


_offered: weakref.WeakValueDictionary[str, Descriptor] = weakref.WeakValueDictionary()
_servers: weakref.WeakSet[_Server] = weakref.WeakSet()  # of this process: one, while anything is offered


class _Server:
    """A socket and its thread; ends with the last descriptor that refers to it."""

    def __init__(self) -> None:
        try:
            directory = tempfile.mkdtemp(prefix="hybrid-engine-", dir=MEETING_DIRECTORY)  # mode 0700
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.address = f"{directory}/descriptors"
            self.listener.bind(self.address)
            self.listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise TransportError(f"no socket in {MEETING_DIRECTORY}: {error.strerror}") from error
        self.end = weakref.finalize(self, _end, self.listener, directory)
        _servers.add(self)
        threading.Thread(target=_serve, args=(self.listener,), name="descriptors", daemon=True).start()


def _end(listener: socket.socket, directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
    listener.close()


def _disown() -> None:
    """In a forked child: the server is the parent's, and with it ends what is asked of it."""
    for server in _servers:
        server.end.detach()
        server.listener.close()
    _servers.clear()


os.register_at_fork(after_in_child=_disown)


def _serve(listener: socket.socket) -> None:
    """Answer each peer when it has asked, whoever else has connected and is silent."""
    silent: dict[int, tuple[socket.socket, float]] = {}  # by descriptor: a peer that has not asked, and until when
    while (listening := listener.fileno()) >= 0:
        waiting = select.poll()  # unlike epoll it has no descriptor, which a forked child would keep open
        for descriptor in (listening, *silent):
            waiting.register(descriptor, select.POLLIN)
        deadline = min((each for _, each in silent.values()), default=time.monotonic() + _SECONDS_TO_ASK)
        asking = {descriptor for descriptor, _ in waiting.poll(max(deadline - time.monotonic(), 0) * 1000)}
        for descriptor in [number for number in silent if number in asking]:
            connection, _ = silent.pop(descriptor)
            with connection:
                _hear(connection)
        now = time.monotonic()
        late = [number for number, (_, until) in silent.items() if until <= now]
        for descriptor in late or list(silent)[:-_MOST_SILENT]:
            silent.pop(descriptor)[0].close()
        if listening in asking:
            try:
                connection, _ = listener.accept()
                connection.setblocking(False)  # a question is one packet, and so is its answer
                silent[connection.fileno()] = connection, now + _SECONDS_TO_ASK
            except OSError as error:  # the end, or no descriptor left
                logger.debug("a peer's connection for descriptors: %s", error)
                time.sleep(0.01)
    for connection, _ in silent.values():
        connection.close()


def _hear(connection: socket.socket) -> None:
    try:
        names = connection.recv(_LIMIT).decode(errors="replace").split("\n")
        with sending:
            _answer(connection, names)
    except OSError as error:  # a peer that went away
        logger.debug("a peer's question for descriptors: %s", error)


def _answer(connection: socket.socket, names: Sequence[str]) -> None:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    found = [_offered.get(name) for name in names]
    offered = [each.fd for each in found if each is not None]
    if user != os.geteuid():
        connection.send(f"user {user} asks user {os.geteuid()}; run all ranks of a host as one user".encode())
    elif len(offered) < len(found):
        connection.send(b"the owner has released it since the handles were exchanged; exchange them again")
    else:
        socket.send_fds(connection, [_GRANTED], offered)


def fetch(address: str, names: Sequence[str]) -> list[int]:
    """Return copies of what another process offers, at most `MOST_AT_ONCE`; the caller closes them.

    Raises TransportError where the owner has ended, is another user's, does not answer, or offers one of them no more.
    """
    copies = array("i")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_SECONDS_TO_ANSWER)
            connection.connect(address)
            connection.send("\n".join(names).encode())
            room = socket.CMSG_LEN(len(names) * copies.itemsize)
            said, passed, *_ = connection.recvmsg(_LIMIT, room, socket.MSG_CMSG_CLOEXEC)  # recv_fds ignores flags
            copies.frombytes(b"".join(data for _, _, data in passed))
    except (FileNotFoundError, ConnectionError) as error:
        raise TransportError(f"{address}: {error.strerror}: its process ended, or closed all its buffers") from error
    except OSError as error:
        raise TransportError(f"{address}: {error.strerror or error}") from error
    if said == _GRANTED and len(copies) == len(names):
        return copies.tolist()
    for copy in copies:
        os.close(copy)
    why = said.decode(errors="replace") if said != _GRANTED else "too many open files here; raise `ulimit -n`"
    raise TransportError(f"{address}: {why or 'its process ended, or cannot answer'}")
