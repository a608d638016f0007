"""Messages from trainers to a server, as JSON, and the rendezvous store where both join a job.

On one host the store is a file in a directory that only this user can open. Across hosts it listens
at an address that the user names. torch's store has no authentication, so both sides then need a
shared token in their environment.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import msgspec
import torch.distributed as dist
from msgspec.structs import replace

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, MessageError, clipped, shortened
from hybrid_engine.layouts.parallelism import LARGEST_SIZE
from hybrid_engine.ranks.background import in_background
from hybrid_engine.ranks.world import World, store_at

logger = logging.getLogger("hybrid_engine")

TOKEN = "HYBRID_ENGINE_TOKEN"
"""Environment variable with the secret that trainers and servers share; required across hosts."""

LOOPBACK = "127.0.0.1"

NO_VERSION = "none"
"""Weight version that a server reports while it has no weights."""

JOB, VERSION = "hybrid_engine_job", "hybrid_engine_version"
"""Keys of a request's `vllm_xargs`.

A server without weights of this job and version refuses the request.
"""

T = TypeVar("T", bound="ServerMessage")

SWITCH_KEYS = (
    "transport",
    "bucket_mb",
    "incremental",
    "incremental_mb",
    "check_nan",
    "verify",
    "release_weights",
    "compress_reshard",
    "server_ports",
    "suspend_communicators",
    "offload_train_param",
    "offload_train_grad",
    "offload_train_optimizer",
    "timeout_seconds",
)
"""Keys of `generate_config` that must be equal on both sides of a switch."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# -- messages --------------------------------------------------------------------------------------


@contextmanager
def _readable(kind: type[ServerMessage]) -> Iterator[None]:
    """Raise MessageError for values that are not of a message.

    msgspec's and pydantic's errors are ValueErrors, as those of texts without UTF-8. torch's errors
    about a store that does not respond, or a port that cannot exist, are RuntimeErrors or one of
    the others.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        text = clipped(str(error), 500)
        raise MessageError(f"invalid {kind.__name__}: {text}", code="malformed-message") from None


class ServerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of messages to a server."""

    @classmethod
    def read(cls: type[T], values: Mapping[str, Any]) -> T:
        """Convert received values.

        Raises MessageError for other fields or types, and for text that is not UTF-8.
        """
        with _readable(cls):
            message = msgspec.convert(dict(values), cls)
            msgspec.json.encode(message)  # rejects text that has no UTF-8
            return message

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


class Invitation(ServerMessage, frozen=True, kw_only=True):
    """Invitation of a server to a job of trainers and servers.

    Attributes:
        place: address of the rendezvous store, `file:PATH` or `tcp:ADDRESS:PORT`.
        name: random 128-bit job name; prefix of all keys in the store.
        proof: HMAC-SHA256 of all other fields with the token; empty without a token.
        first_rank: rank of the server's first worker.
        num_workers: number of the server's workers, over all replicas.
        size: number of ranks in the job.
        settings: values of `SWITCH_KEYS`.
        address: address at which the job's groups listen; None: each rank's address on the route to
            the store.
        job: name of the trainers' job, equal in all their invitations; empty: a separate job.
        takes_over: the server must leave the job of other trainers even if these are alive.
    """

    place: str
    name: str
    first_rank: int
    num_workers: int
    size: int
    settings: dict[str, Any]
    address: str | None = None
    proof: str = ""
    job: str = ""
    takes_over: bool = False

    def __post_init__(self) -> None:
        stop = self.first_rank + self.num_workers
        if not 0 <= self.first_rank <= stop <= self.size <= LARGEST_SIZE:
            raise ValueError(f"ranks {self.first_rank} to {stop} of a job of {self.size}")

    def signed(self) -> Invitation:
        """Return a copy with the proof, if there is a token.

        Raises ConfigError if a token is required but missing.
        """
        if self.place.startswith("tcp:") or TOKEN in os.environ:
            return replace(self, proof=self._proof())
        return self

    def _proof(self) -> str:
        # Both ends must sign the same bytes, whatever the order of the settings.
        signed = msgspec.json.encode(replace(self, proof=""), order="deterministic")
        return hmac.new(require_token().encode(), signed, "sha256").hexdigest()

    def config(self) -> GenerateConfig:
        """Return the configuration of the switch.

        Raises MessageError for keys that are not in `SWITCH_KEYS`.
        """
        unknown = sorted(self.settings.keys() - set(SWITCH_KEYS))
        if unknown:
            raise MessageError(
                f"unknown keys of a switch: {shortened(unknown)}", code="unknown-key"
            )
        with _readable(type(self)):
            return GenerateConfig(**self.settings)

    def store(self) -> dist.Store:
        """Connect to the store.

        Raises MessageError for an invalid invitation, ConfigError for a missing token.
        """
        kind, _, where = self.place.partition(":")
        if not _NAME.fullmatch(self.name):
            raise MessageError(f"invalid job name: {shortened(self.name)}", code="invalid-job-name")
        needs_proof = kind == "tcp" or TOKEN in os.environ
        if needs_proof and not hmac.compare_digest(self.proof.encode(), self._proof().encode()):
            raise MessageError(
                f"{self.place}: the invitation was not signed with this server's {TOKEN}",
                code="wrong-token",
            )
        with _readable(type(self)):
            if kind == "file":
                _require_private(Path(where))
                store: dist.Store = dist.FileStore(where, -1)
                store.set_timeout(_FILE_TIMEOUT)
            elif kind == "tcp":
                seconds = timedelta(seconds=self.config().timeout_seconds)
                store = dist.TCPStore(*_host_and_port(where), is_master=False, timeout=seconds)
            else:
                raise MessageError(
                    f"invalid rendezvous: {shortened(self.place)}; "
                    "expected file:PATH or tcp:ADDRESS:PORT",
                    code="invalid-place",
                )
            return dist.PrefixStore(self.name, store)

    def has_ended(self) -> bool:
        """Return True if the trainers that created the store have ended, or have closed it.

        On one host, their first process holds a file lock. Across hosts, that process runs the
        store; if the store does not respond, the trainers count as ended, because they could not
        fill a server either. A listening socket alone proves nothing: children of an ended process
        may have inherited it.
        """
        kind, _, where = self.place.partition(":")
        if kind == "file":
            return _is_unlocked(Path(where).with_name(_ALIVE))
        address = _host_and_port(where)
        seconds = _ANSWER_TIMEOUT.total_seconds()

        def is_answered() -> bool:
            store = dist.TCPStore(*address, is_master=False, timeout=_ANSWER_TIMEOUT)
            # Another store may have taken the port of trainers that ended.
            return store.check([f"{self.name}/{_ALIVE}"])

        try:
            # A TCPStore would retry a refused connection until its timeout.
            socket.create_connection(address, seconds).close()
            return not in_background(is_answered, "looking for trainers").result(seconds)
        except (OSError, RuntimeError, NotDone):
            return True

    def world(self, rank: int, *, may_end: bool = True) -> World:
        """Return the job's world for one of its ranks. Raises as `store` does."""
        store = self.store()
        address = self.address or _address_towards(self.place)
        return World(store, rank, self.size, may_end=may_end, address=address)


_NAME = re.compile(r"hybrid_engine/[0-9a-f]{32}")
_DIRECTORY = "hybrid-engine-"
_FILE = "store"
_ALIVE = "alive"

_ANSWER_TIMEOUT = timedelta(seconds=10)
"""Timeout of the test whether a store's trainers are alive."""

_FILE_TIMEOUT = timedelta(seconds=10)
"""Timeout to open the store's file; short, because a file that was removed never returns."""


def _host_and_port(where: str) -> tuple[str, int]:
    """Return the parts of `ADDRESS:PORT`. Raises ValueError for a port that is not a number."""
    host, _, port = where.rpartition(":")
    return host, int(port)


def _address_towards(place: str) -> str | None:
    """Return this process's address on the route to a TCP store; None for a file.

    By default gloo listens at the address of the host's name, which is often the loopback address.
    """
    kind, _, where = place.partition(":")
    if kind != "tcp":
        return None
    ((family, _, _, _, store_address), *_) = socket.getaddrinfo(
        *_host_and_port(where), type=socket.SOCK_DGRAM
    )
    # Connecting a datagram socket selects the route, and sends nothing.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(store_address)
        return str(probe.getsockname()[0])


PROOF_HEADER = "X-Hybrid-Engine-Proof"
"""HTTP header with the proof of a request to a protected route.

It is required if the server has a token.
"""


def proof_of_request(method: str, target: str, body: bytes) -> str:
    """Return the HMAC-SHA256 of an HTTP request with the token.

    `target`: path, and `?` with the query if any.
    """
    signed = b"\n".join([method.encode(), target.encode(), body])
    return hmac.new(require_token().encode(), signed, "sha256").hexdigest()


class DrawnWith(ServerMessage, frozen=True, kw_only=True):
    """Weights with which a request must be answered.

    Attributes:
        job: see `Invitation`.
        version: see `Update`. None: any versions of the job; a request in flight continues after a
            publish.
    """

    job: str
    version: int | None

    def __str__(self) -> str:
        version = "any version" if self.version is None else f"version {self.version}"
        return f"{version} of job {self.job}"

    def arguments(self) -> dict[str, str]:
        """Return the `vllm_xargs` of the request."""
        if self.version is None:
            return {JOB: self.job}
        return {JOB: self.job, VERSION: str(self.version)}


class Update(ServerMessage, frozen=True, kw_only=True):
    """Switch in which a server takes part.

    Attributes:
        name: name of the job to which the server was invited.
        to: state of the devices after the switch.
        version: version of the weights: number of optimizer steps that the trainer has taken.
        is_compared: the server must not generate until the trainers have compared its
            log-probabilities and finished the update.
    """

    name: str
    to: Literal["train", "forward", "infer", "idle"]
    version: int
    is_compared: bool = False


# -- rendezvous ------------------------------------------------------------------------------------


class Rendezvous:
    """Store that one trainer creates for its job; `close` removes it.

    Args:
        address: address at which other hosts reach this process; None if all processes are on this
            host.

    Attributes:
        name, place: see `Invitation`.
    """

    def __init__(self, address: str | None) -> None:
        self.name = f"hybrid_engine/{secrets.token_hex(16)}"
        self._directory = ""
        self._lock: TextIO | None = None
        if address is None:
            self._directory = tempfile.mkdtemp(prefix=_DIRECTORY, dir=_users_directory())
            path = Path(self._directory, _FILE)
            path.touch(0o600)  # servers open only a file that exists
            _require_private(path)
            # Locked until the file is closed or this process ends. The lock belongs to the process,
            # not to the open file, so forked children do not inherit it.
            alive = path.with_name(_ALIVE)
            self._lock = alive.open("x")
            fcntl.lockf(self._lock, fcntl.LOCK_EX)
            _locked_by[alive] = os.getpid()
            self.place = f"file:{path}"
            self._store: dist.Store | None = dist.FileStore(str(path), -1)
            return
        require_token()
        resolved = resolved_addresses(address)[0]
        family = socket.AF_INET6 if resolved.version == 6 else socket.AF_INET
        store = store_at(str(resolved), family)
        self._store = store
        store.set(f"{self.name}/{_ALIVE}", "")
        self.place = f"tcp:{resolved}:{store.port}"

    def close(self) -> None:
        """Remove the file, or close the address.

        Processes that have the file open keep it. Idempotent.
        """
        self._store = None
        if self._lock is not None:
            self._lock.close()
            _locked_by.pop(Path(self._lock.name), None)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def _users_directory() -> Path:
    """Return this user's private directory in the temporary directory, for all of the user's jobs.

    It is never removed: servers open paths in it by name, and another user could otherwise create
    the directory again. If another user has taken its name, a directory with a random name is
    created instead.
    """
    usual = Path(tempfile.gettempdir(), f"{_DIRECTORY}{os.getuid()}")
    with suppress(FileExistsError):
        usual.mkdir(0o700)
    if _is_private_directory(usual.lstat()):
        return usual
    instead = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}{os.getuid()}-"))
    logger.warning(
        "%s is not a directory that only this user can open. Trainers and servers use %s instead, "
        "which is not removed. Remove the first, or set TMPDIR to a directory of this user",
        usual,
        instead,
    )
    return instead


def _is_private_directory(status: os.stat_result) -> bool:
    """Return True for a directory that belongs to this user and is closed to others."""
    is_open_to_others = stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not is_open_to_others


_locked_by: dict[Path, int] = {}
"""Locked file -> id of the process that locked it.

A process cannot see its own lock, and a test would release it.
"""


def _is_unlocked(path: Path) -> bool:
    """Return True if no process holds the lock of the file, or the file is gone."""
    if _locked_by.get(path) == os.getpid():
        return False
    try:
        with path.open() as file:
            # Shared: several processes may test at once.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _require_private(path: Path) -> None:
    """Raise MessageError unless `path` is a rendezvous file in two nested private directories.

    Only this user can open a private directory.

    Any client that can reach the server can send an invitation, and opening the store writes to the
    file.
    """
    try:
        file, *directories = map(os.lstat, (path, *path.parents[:2]))
    except OSError as error:
        raise MessageError(
            f"{path}: {error.strerror}; trainers and servers on one host share its files",
            code="unreadable-rendezvous-file",
        ) from None
    if (
        path.name != _FILE
        or not path.parent.name.startswith(_DIRECTORY)
        or not stat.S_ISREG(file.st_mode)
    ):
        raise MessageError(f"{path} is not a rendezvous file", code="not-a-rendezvous-file")
    # `parents` goes on to the root.
    for directory, status in zip(path.parents, directories, strict=False):
        if not _is_private_directory(status):
            raise MessageError(
                f"{directory} is not a directory that only this user can open",
                code="directory-not-private",
            )


# -- addresses and the token -----------------------------------------------------------------------


def require_address(address: str, *, allow_public: bool) -> None:
    """Raise ConfigError unless trainers can listen at `address` and have a token.

    Public addresses are refused without `allow_public`, because torch's store has no
    authentication.
    """
    require_token()
    key = "server_address"
    remedy = "Give the address of a network interface of the first trainer"
    try:
        addresses = resolved_addresses(address)
    except (ValueError, OSError) as error:
        problem = f"{shortened(address)}: {error}"
        raise ConfigError.of(key, problem, remedy, code="unresolved-address") from None
    if any(resolved.is_unspecified for resolved in addresses):
        problem = f"other hosts cannot connect to {address}"
        raise ConfigError.of(key, problem, remedy, code="unspecified-address")
    public = public_addresses(addresses)
    if public and not allow_public:
        problem = f"{', '.join(public)} is public, and the rendezvous store has no authentication"
        remedy = "Give a private address, or set server_allow_public if a firewall protects it"
        raise ConfigError.of(key, problem, remedy, code="public-address")


def require_token() -> str:
    """Return the token from this process's environment. Raises ConfigError if it is not set."""
    token = os.environ.get(TOKEN, "")
    if token:
        return token
    raise ConfigError.of(
        TOKEN,
        "not set, but trainers and servers on several hosts authenticate each other with it",
        "Set it to the same secret in the environment of trainers "
        "and servers (openssl rand -hex 32)",
        code="missing-token",
    )


def resolved_addresses(host: str) -> list[Address]:
    """Resolve a host name or an address, sorted by text.

    Raises OSError, and ValueError for an invalid name.
    """
    # A scoped IPv6 address ends with "%" and the interface.
    resolved = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    return sorted(map(_as_sent, resolved), key=str)


def public_addresses(addresses: Iterable[Address]) -> list[str]:
    """Return the addresses that are reachable from outside this host and its private networks."""
    return [str(address) for address in addresses if address.is_global]


def require_ports(ports: str | None) -> None:
    """Raise ConfigError unless this host's kernel takes ephemeral ports from `ports`, "FIRST-LAST".

    torch's store could be given a port, but gloo, which carries the weights, always binds to an
    ephemeral one.
    """
    if ports is None:
        return
    first, last = map(int, ports.split("-"))
    lowest, highest = map(int, _EPHEMERAL_PORTS.read_text().split())
    if not first <= lowest <= highest <= last:
        raise ConfigError.of(
            "generate_config.server_ports",
            f"{ports}, but the kernel of {socket.gethostname()} chooses ports of "
            f"{lowest}-{highest}",
            f'sysctl -w net.ipv4.ip_local_port_range="{first} {last}" there '
            "(in a pod, securityContext.sysctls)",
            code="port-range-of-kernel",
        )


_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Range of ephemeral ports of this process's network namespace, for IPv4 and IPv6."""


def _as_sent(address: str) -> Address:
    """Parse an address as packets use it: an IPv4 address mapped into IPv6 becomes IPv4.

    `ipaddress` counts every mapped address as private.
    """
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed
