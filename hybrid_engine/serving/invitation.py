"""What trainers tell a server, as JSON: where all of them meet, who it is there, and how a switch goes.

On one host they meet in a file of a directory that nobody else may open. Across hosts they meet at an address that the
user names, by a token that both sides have in their environment: torch's store authenticates nobody.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import msgspec
import torch.distributed as dist
from msgspec.structs import replace

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, MessageError, Violation, shortened
from hybrid_engine.ranks.background import in_background
from hybrid_engine.ranks.world import World, store_at
from hybrid_engine.serving.addresses import addresses_of, public_ones

logger = logging.getLogger("hybrid_engine")

TOKEN = "HYBRID_ENGINE_TOKEN"
"""Environment variable with the secret that trainers and servers share; needed where they meet at an address."""

LOOPBACK = "127.0.0.1"

NO_VERSION = "none"
"""What a server says of its weights while it has none."""

JOB, VERSION = "hybrid_engine_job", "hybrid_engine_version"
"""Keys of a request's `vllm_xargs`: a server answers it with weights of this job and version, or refuses it."""

T = TypeVar("T", bound="Told")

SWITCH_KEYS = (
    *("transport", "bucket_mb", "incremental", "incremental_mb", "check_nan", "verify", "release_weights"),
    *("compress_reshard", "server_ports"),
    *("offload_train_param", "offload_train_grad", "offload_train_optimizer", "prefetch", "timeout_seconds"),
)
"""Keys of `generate_config` by which both sides of a switch must go alike."""


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what a server is told."""

    @classmethod
    def read(cls: type[T], values: Mapping[str, Any]) -> T:
        """Raises MessageError for anything but these fields, of these types, and for texts that have no UTF-8."""
        try:
            told = msgspec.convert(dict(values), cls)
            msgspec.json.encode(told)
            return told
        except (msgspec.ValidationError, TypeError, UnicodeEncodeError) as error:
            raise MessageError(f"not what a server is told ({cls.__name__}): {error}") from None

    def said(self) -> dict[str, Any]:
        """As JSON has it."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


class Invitation(Told, frozen=True, kw_only=True):
    """To a job of trainers and servers.

    Attributes:
        place: `file:PATH` or `tcp:ADDRESS:PORT`, of the store.
        name: of the job: what is in the store is below it. Nobody guesses it.
        proof: HMAC-SHA256 of all the rest, by the token; empty without one.
        first_rank: of this server's workers.
        num_workers: of this server.
        size: of the job.
        settings: see `SWITCH_KEYS`.
        address: of the interface on which the job's groups listen; None: each rank's own towards the store.
        job: of the trainers, in whichever invitation of theirs; empty: a job of its own.
        takes_over: the server is to leave the job of other trainers though they live.
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

    def signed(self) -> Invitation:
        """With the proof, where this process has the token. Raises ConfigError where it needs one and has none."""
        if self.place.startswith("tcp:") or TOKEN in os.environ:
            return replace(self, proof=self._proof())
        return self

    def _proof(self) -> str:
        said = msgspec.json.encode(replace(self, proof=""), order="deterministic")
        return hmac.new(require_token().encode(), said, "sha256").hexdigest()

    def config(self) -> GenerateConfig:
        """The keys of a switch, and of what a server leaves to trainers the values that do nothing."""
        if unknown := sorted(self.settings.keys() - set(SWITCH_KEYS)):
            raise MessageError(f"keys that no switch has: {shortened(unknown)}")
        return GenerateConfig(check_compute="off", **self.settings)

    def store(self) -> dist.Store:
        """The store. Raises MessageError where this process is not to go there, ConfigError where it cannot."""
        kind, _, where = self.place.partition(":")
        if not _NAME.fullmatch(self.name):
            raise MessageError(f"no name of a job: {shortened(self.name)}")
        needs_proof = kind == "tcp" or TOKEN in os.environ
        if needs_proof and not hmac.compare_digest(self.proof.encode(), self._proof().encode()):
            raise MessageError(f"{self.place}: who invites does not have this server's {TOKEN}")
        if kind == "file":
            _require_own(Path(where))
            store = dist.FileStore(where, -1)
            store.set_timeout(_SECONDS_FOR_A_FILE)
            return dist.PrefixStore(self.name, store)
        if kind != "tcp":
            raise MessageError(f"no place to meet: {shortened(self.place)}")
        host, _, port = where.rpartition(":")
        seconds = timedelta(seconds=self.config().timeout_seconds)
        return dist.PrefixStore(self.name, dist.TCPStore(host, int(port), is_master=False, timeout=seconds))

    def has_ended(self) -> bool:
        """Whether the trainers that made the place are gone, or have closed it.

        On one host their first process holds a lock; across hosts the store in it answers. One that does not counts as
        gone, for its trainers cannot fill a server either. That somebody listens there is not enough: children of a
        process that ended may have inherited the socket.
        """
        kind, _, where = self.place.partition(":")
        if kind == "file":
            return _is_unlocked(Path(where).with_name(_ALIVE))
        host, _, port = where.rpartition(":")
        seconds = _SECONDS_FOR_AN_ANSWER.total_seconds()

        def is_answered() -> bool:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=_SECONDS_FOR_AN_ANSWER)
            return store.check([f"{self.name}/{_ALIVE}"])  # others may have taken the port of trainers that ended

        try:
            socket.create_connection((host, int(port)), seconds).close()  # which a store would try until its timeout
            return not in_background(is_answered, "looking for trainers").result(seconds)
        except (OSError, RuntimeError, NotDone):
            return True

    def world(self, rank: int, *, may_end: bool = True) -> World:
        """The job's, for one of its ranks; raises as `store`."""
        store = self.store()
        address = self.address or _address_towards(self.place)
        return World(store, rank, self.size, may_end=may_end, address=address)


_NAME = re.compile(r"hybrid_engine/[0-9a-f]{32}")
_DIRECTORY, _FILE, _ALIVE = "hybrid-engine-", "store", "alive"
_SECONDS_FOR_AN_ANSWER = timedelta(seconds=10)
"""Of a store that is asked whether its trainers live."""
_SECONDS_FOR_A_FILE = timedelta(seconds=10)
"""To open the store's file: one that is gone, with those who invited, does not come back."""


def _address_towards(place: str) -> str | None:
    """This process's address on the way to a store; None where that is a file.

    By itself, gloo listens at the address of the host's name, often the loopback's, where no other host reaches it.
    """
    kind, _, where = place.partition(":")
    if kind != "tcp":
        return None
    host, _, port = where.rpartition(":")
    ((family, _, _, _, there), *_) = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(there)
        return str(probe.getsockname()[0])


PROOF_HEADER = "X-Hybrid-Engine-Proof"
"""Of a request to a route that is not open to all, where the server has the token."""


def proof_of_request(method: str, target: str, body: bytes) -> str:
    """HMAC-SHA256, by the token, of a request to a server; `target`: its path, and its query after a `?`."""
    said = b"\n".join([method.encode(), target.encode(), body])
    return hmac.new(require_token().encode(), said, "sha256").hexdigest()


class DrawnWith(Told, frozen=True, kw_only=True):
    """Weights that a request asks for.

    Attributes:
        job: see `Invitation`.
        version: see `Update`.
    """

    job: str
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of job {self.job}"

    def arguments(self) -> dict[str, str]:
        """Return the `vllm_xargs` of such a request."""
        return {JOB: self.job, VERSION: str(self.version)}


class Update(Told, frozen=True, kw_only=True):
    """A switch in which a server takes part.

    Attributes:
        name: of the job that the server was invited to.
        to: the state of the devices after it.
        version: of the weights that are filled: optimizer steps that the trainer has taken.
        is_compared: no token is drawn before trainers finish the update, once they have compared what is computed.
    """

    name: str
    to: Literal["train", "forward", "infer", "idle"]
    version: int
    is_compared: bool = False


class MeetingPlace:
    """A store that one trainer makes for its job; `close` ends it.

    Args:
        address: of the interface at which other hosts reach this process; None where all are on this host.
    """

    def __init__(self, address: str | None) -> None:
        self.name = f"hybrid_engine/{secrets.token_hex(16)}"
        self._directory = ""
        self._lock: TextIO | None = None
        if address is None:
            self._directory = tempfile.mkdtemp(prefix=_DIRECTORY, dir=_users_directory())
            path = Path(self._directory, _FILE)
            path.touch(0o600)  # servers open what is there alone
            _require_own(path)
            self._lock = _locked(path.with_name(_ALIVE))
            self.place = f"file:{path}"
            self._store: dist.Store | None = dist.FileStore(str(path), -1)
            return
        require_token()
        found = addresses_of(address)[0]
        store = self._store = store_at(str(found), socket.AF_INET6 if found.version == 6 else socket.AF_INET)
        store.set(f"{self.name}/{_ALIVE}", "")
        self.place = f"tcp:{found}:{store.port}"

    def close(self) -> None:
        """Remove what was made. Those who have the file open keep it; an address is closed. Idempotent."""
        self._store = None
        if self._lock is not None:
            self._lock.close()
            _locked_by.pop(Path(self._lock.name), None)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def _users_directory() -> Path:
    """A directory that only this user can open, below the temporary one, for all jobs of this user.

    It stays: servers still open a path in it by name, and somebody else could make what is no longer there. Where its
    name is taken, by whatever another user has put there, it is one of a random name.
    """
    usual = Path(tempfile.gettempdir(), f"{_DIRECTORY}{os.getuid()}")
    with suppress(FileExistsError):
        usual.mkdir(0o700)
    if _is_own_directory(usual.lstat()):
        return usual
    instead = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}{os.getuid()}-"))
    logger.warning(
        "%s is not a directory that only this user can open. Trainers and servers meet in %s, which stays. Remove the "
        "first, or set TMPDIR to a directory of this user",
        usual,
        instead,
    )
    return instead


def _is_own_directory(status: os.stat_result) -> bool:
    """Whether it is a directory of this user that is closed to others."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def _locked(path: Path) -> TextIO:
    """Return a new file with a lock that ends with this process, or when the file is closed.

    The lock is a process's, not an open file's: children that are forked from it do not inherit it.
    """
    file = path.open("x")
    fcntl.lockf(file, fcntl.LOCK_EX)
    _locked_by[path] = os.getpid()
    return file


_locked_by: dict[Path, int] = {}
"""Process that has locked a file: it would not find its own lock, and lose it."""


def _is_unlocked(path: Path) -> bool:
    """Whether no process holds the lock of a file, or the file is gone."""
    if _locked_by.get(path) == os.getpid():
        return False
    try:
        with path.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may ask at the same time
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _require_own(path: Path) -> None:
    """Raise MessageError unless `path` is a meeting place's file, in two directories of this user that are closed to
    others.

    Whoever reaches a server can invite it; a file of another kind would be written to.
    """
    try:
        file, *directories = map(os.lstat, (path, *path.parents[:2]))
    except OSError as error:
        raise MessageError(f"{path}: {error.strerror}; trainers and servers on one host share its files") from None
    if path.name != _FILE or not path.parent.name.startswith(_DIRECTORY) or not stat.S_ISREG(file.st_mode):
        raise MessageError(f"{path} is no place where trainers and servers meet")
    for directory, found in zip(path.parents, directories, strict=False):
        if not _is_own_directory(found):
            raise MessageError(f"{directory} is not a directory that only this user can open")


def require_address(address: str, *, allow_public: bool) -> None:
    """Raise ConfigError unless trainers can listen at `address`, and it is closed to strangers: torch's store
    authenticates nobody; or where this process has no token."""
    require_token()
    remedy = "Give that of an interface of the first trainer"
    try:
        addresses = addresses_of(address)
    except (ValueError, OSError) as error:
        raise ConfigError([Violation("server_address", f"{shortened(address)}: {error}", remedy)]) from None
    if any(each.is_unspecified for each in addresses):
        raise ConfigError([Violation("server_address", f"{address} is no address for others to connect to", remedy)])
    if not allow_public and (public := public_ones(addresses)):
        problem = f"{', '.join(public)} is public, and the store at which ranks meet authenticates nobody"
        remedy = "Give a private address, or server_allow_public where a firewall guards it"
        raise ConfigError([Violation("server_address", problem, remedy)])


def require_token() -> str:
    """The secret of this process's environment. Raises ConfigError where there is none."""
    if token := os.environ.get(TOKEN, ""):
        return token
    problem = "not set: trainers and servers that meet at an address must know each other"
    remedy = "Set it to the same secret in the environment of trainers and servers (openssl rand -hex 32)"
    raise ConfigError([Violation(TOKEN, problem, remedy)])
