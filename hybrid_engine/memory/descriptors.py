"""Exchange of memory between processes of a host: file descriptors over Unix sockets.

    owner   Descriptor(fd).offer(name) -> address      threads answer while any name is offered
    peer    fetch(address, names) -> [fd, ...]         duplicates, which the peer closes

Passing a descriptor (SCM_RIGHTS) needs no permission over the other process; /proc/<pid>/fd and
pidfd_getfd(2) do, and containers refuse it. Instead both processes need a common directory: the
socket lies in a subdirectory of `MEETING_DIRECTORY` that only this user can open, and the owner
reads the peer's user from the kernel (SO_PEERCRED). Names are random and never used again.

A descriptor is closed with the last reference to its `Descriptor`. A thread holds references
while it sends, under the lock `sending`: a caller that drops the last other reference under the
same lock has closed the descriptor, and the memory is free. A killed process leaves its socket.
"""

from __future__ import annotations

import logging
import os
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

MAX_DESCRIPTORS = 253
"""Maximum number of descriptors in a message: SCM_MAX_FD of Linux."""

# Bytes of a request or a reply.
# Up to 253 names of at most about 100 bytes are 25 KB (`HostMemory.token` and a serial number).
_LIMIT = 2**16
# Seconds that the owner waits for a request, and that the peer waits for a reply.
_REQUEST_TIMEOUT = 10.0
_REPLY_TIMEOUT = 20.0
_GRANTED = b"\0"

sending = threading.RLock()
"""Held while descriptors are sent, which does not block.

No process is forked meanwhile: the child would keep the descriptors open.
"""
os.register_at_fork(
    before=sending.acquire, after_in_parent=sending.release, after_in_child=sending.release
)


class Descriptor:
    """A file descriptor of this process, closed with the last reference to this object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._server: _DescriptorServer | None = None
        weakref.finalize(self, os.close, fd)

    def offer(self, name: str) -> str:
        """Let processes of this user `fetch` the descriptor by this name; return the address.

        Raises TransportError if no socket can be created.
        """
        self._server = next(iter(_servers), None) or _DescriptorServer()
        _offered[name] = self
        return self._server.address


_offered: weakref.WeakValueDictionary[str, Descriptor] = weakref.WeakValueDictionary()

# The server of this process: one while any descriptor is offered, else none.
_servers: weakref.WeakSet[_DescriptorServer] = weakref.WeakSet()


class _DescriptorServer:
    """A socket and its thread; ends with the last descriptor that refers to it."""

    def __init__(self) -> None:
        try:
            # mkdtemp sets mode 0700.
            directory = tempfile.mkdtemp(prefix="hybrid-engine-", dir=MEETING_DIRECTORY)
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.address = f"{directory}/descriptors"
            self.listener.bind(self.address)
            self.listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise TransportError(
                f"no socket in {MEETING_DIRECTORY}: {error.strerror}",
                code="no-socket",
            ) from error
        self.end = weakref.finalize(self, _end, self.listener, directory)
        _servers.add(self)
        # Neither thread nor finalizer refers to the server, which would then never end.
        thread = threading.Thread(
            target=_serve, args=(self.listener,), name="descriptors", daemon=True
        )
        thread.start()


def _end(listener: socket.socket, directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    # Wakes the thread from `accept`.
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _disown() -> None:
    """Close the inherited sockets in a forked child; the server is the parent's."""
    for server in _servers:
        server.end.detach()
        server.listener.close()
    _servers.clear()


os.register_at_fork(after_in_child=_disown)


def _serve(listener: socket.socket) -> None:
    """Answer requests until the listener is closed, each in a thread: silent peers delay none."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()
        except (OSError, RuntimeError) as error:
            # The listener was closed, or this process has no descriptor or thread left.
            logger.debug("a peer's connection for descriptors: %s", error)
            time.sleep(0.01)


def _answer(connection: socket.socket) -> None:
    """Read a request, and send the descriptors or the reason of a refusal."""
    try:
        with connection:
            connection.settimeout(_REQUEST_TIMEOUT)
            names = connection.recv(_LIMIT).decode(errors="replace").split("\n")
            # The reply is one packet, so it does not need to block.
            connection.setblocking(False)
            with sending:
                _send(connection, names)
    except OSError as error:
        # The peer is silent or gone.
        logger.debug("a peer's request for descriptors: %s", error)


def _send(connection: socket.socket, names: Sequence[str]) -> None:
    # struct ucred: pid, uid, gid.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    # Referenced until they are sent, or they might be closed meanwhile.
    descriptors = [_offered.get(name) for name in names]
    fds = [descriptor.fd for descriptor in descriptors if descriptor is not None]
    if user != os.geteuid():
        refusal = (
            f"the peer is user {user}, the owner user {os.geteuid()}; "
            "run all ranks of a host as one user"
        )
        connection.send(refusal.encode())
    elif len(fds) < len(descriptors):
        # Refused as a whole: the peer could not tell which of its names a shorter list belongs to.
        connection.send(
            b"the owner has released it since the handles were exchanged; exchange them again"
        )
    else:
        socket.send_fds(connection, [_GRANTED], fds)


def fetch(address: str, names: Sequence[str]) -> list[int]:
    """Return duplicates of the descriptors that another process offers under these names.

    At most `MAX_DESCRIPTORS` names; the caller closes the descriptors. Raises TransportError if the
    owner has ended, is another user's, does not answer, or no longer offers one of the names.
    """
    fds = array("i")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_REPLY_TIMEOUT)
            connection.connect(address)
            connection.send("\n".join(names).encode())
            room = socket.CMSG_LEN(len(names) * fds.itemsize)
            # Not socket's recv_fds, which ignores flags such as MSG_CMSG_CLOEXEC.
            reply, passed, *_ = connection.recvmsg(_LIMIT, room, socket.MSG_CMSG_CLOEXEC)
            fds.frombytes(b"".join(data for _, _, data in passed))
    except (FileNotFoundError, ConnectionError) as error:
        raise TransportError(
            f"{address}: {error.strerror}: its process ended, or closed all its buffers",
            code="owner-is-gone",
        ) from error
    except OSError as error:
        raise TransportError(
            f"{address}: {error.strerror or error}", code="owner-unreachable"
        ) from error
    if reply == _GRANTED and len(fds) == len(names):
        return fds.tolist()
    for fd in fds:
        os.close(fd)
    if reply == _GRANTED:
        # The kernel drops descriptors for which the receiver has no room.
        reason = "too many open files in this process; raise `ulimit -n`"
    else:
        reason = reply.decode(errors="replace") or "its process ended, or cannot answer"
    raise TransportError(f"{address}: {reason}", code="owner-is-gone")
