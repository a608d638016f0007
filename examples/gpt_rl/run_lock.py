"""One job at a time writes a run's directory.

Rank 0 holds OUT/lock from before it writes anything there until its process ends: the kernel releases the lock however
it ends. The other ranks wait for the lock before they write, through the store of torchrun's rendezvous; so a second
job leaves the logs of the first alone.

The lock is that of flock(2), which belongs to the open file. One of fcntl(2) would be lost as soon as anything in the
process opens and closes the file again. On NFS Linux turns flock into such a lock, so hosts see each other's. A file
system without locks (Lustre mounted without `flock`) is refused: nothing would keep a second job out.
"""

from __future__ import annotations

import datetime
import fcntl
import functools
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hybrid_engine.errors import ConfigError, FileError, RemoteError, Violation
from hybrid_engine.files.durable import naming

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "examples/gpt_rl/holds_the_lock"
_SECONDS_TO_WAIT = 300  # ranks import for very different times on a busy machine


def take_lock(path: Path) -> TextIO:
    """Lock and describe the holder in the file; the caller keeps what is returned until its end.

    Raises ConfigError naming the holder when another process has it, FileError when the file cannot be written.
    """
    with naming("locking", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):  # it is emptied below
            raise FileError(f"{path} is not a file of a run. Remove it, or use another --out")
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "a job that has just started"
            file.close()
            problem = f"another job is writing {path.parent}: {holder}"
            remedy = "Wait until it has ended, stop it (SIGTERM: with a checkpoint), or use another --out"
            raise ConfigError([Violation("--out", problem, remedy)]) from None
        file.truncate(0)
        started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}\n")
        file.flush()
        return file


def tell_others(world_size: int) -> None:
    """On rank 0, with the lock: the other ranks may go on."""
    if world_size > 1:
        _store().set(_KEY, "")


def wait_for_lock() -> None:
    """On the other ranks: return when rank 0 has the lock. When it cannot have it, it ends, and torchrun all others."""
    try:
        _store().get(_KEY)
    except RuntimeError as error:  # what the store raises, about time and about connections
        problem = f"rank 0 did not lock the run's directory within {_SECONDS_TO_WAIT} s"
        raise RemoteError(f"{problem} ({error}); see what it says") from error


@functools.cache  # without torchrun it is in rank 0, and must outlive this
def _store() -> Store:
    """By which ranks meet. Imported late: what rank 0 refuses is said seconds before torch is there."""
    from torch.distributed import rendezvous

    return next(rendezvous("env://", timeout=datetime.timedelta(seconds=_SECONDS_TO_WAIT)))[0]
