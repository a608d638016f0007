"""Faults of NCCL and deaths of ranks during a switch: two ranks, and the fault on the first.

python -m tests.software_gpu.faults_on_ranks DIRECTORY NAME   on each rank: writes a file if all was
right

Every fault has a separate launch, because most faults end the job.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine
from hybrid_engine.errors import (
    LostRankError,
    RemoteError,
    ReshardError,
    StateError,
    TransportError,
)
from hybrid_engine.memory import device_pages
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.switch.states import State
from hybrid_engine.tools.launching import run_ranks
from hybrid_engine.transports.collective import CollectiveTransport
from tests.software_gpu import small_switch
from tests.software_gpu.conftest import open_files
from tests.software_gpu.device import failing, virtual_memory
from tests.zoo import workers

SECONDS = 90.0
"""Maximum time of a launch; a longer one counts as a hang."""
TIMEOUT_SECONDS = 8.0
"""`generate_config.timeout_seconds` of the jobs."""
LATE_SECONDS = 2.0
SLACK_SECONDS = 10.0
_SECONDS_TO_END = 10.0
_FILES_OF_TORCH = ("/memfd:software_gpu.device", "socket:", "pipe:", "anon_inode:")
_INTERNAL_ERROR, _REMOTE_ERROR = 3, 6  # ncclInternalError, ncclRemoteError


@dataclass(frozen=True)
class Fault:
    """A fault of the first rank.

    Attributes:
        begin: context in which the fault happens, on the first rank.
        error: pattern of the first rank's error; "": it dies.
        at_start: whether it happens while the engine is built; otherwise in the third switch.
        generate: keys of `generate_config`.
    """

    begin: Callable[[], AbstractContextManager[object]]
    error: str = ""
    at_start: bool = False
    generate: Mapping[str, Any] = field(default_factory=lambda: {"transport": "collective"})


@contextmanager
def aborting_its_communicator() -> Iterator[None]:
    """Abort before the messages of a bucket, for which the other rank waits."""
    post = CollectiveTransport._post

    def abort_and_post(self: CollectiveTransport, *arguments: Any) -> Any:
        assert isinstance(self._group, dist.ProcessGroup)
        self._group.abort()
        return post(self, *arguments)

    with mock.patch.object(CollectiveTransport, "_post", abort_and_post):
        yield


@contextmanager
def late_in_a_bucket() -> Iterator[None]:
    """Begin to wait for messages when the other rank has failed, and waits for this one."""
    post = CollectiveTransport._post

    def post_late(self: CollectiveTransport, *arguments: Any) -> Any:
        time.sleep(LATE_SECONDS)
        return post(self, *arguments)

    with mock.patch.object(CollectiveTransport, "_post", post_late):
        yield


@contextmanager
def failing_while_gpus_connect(name: str) -> Iterator[None]:
    new_group = Job.new_nccl_group

    def new_failing_group(self: Job, *arguments: Any) -> dist.ProcessGroup:
        with failing(name, error=_INTERNAL_ERROR):
            return new_group(self, *arguments)

    with mock.patch.object(Job, "new_nccl_group", new_failing_group):
        yield


def dying(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def dying_in_a_bucket() -> Iterator[None]:
    with mock.patch.object(CollectiveTransport, "run", side_effect=dying):
        yield


@contextmanager
def dying_once_its_descriptors_are_fetched() -> Iterator[None]:
    """Die after the other rank has fetched the descriptors and before it imports them."""
    path = Path(os.environ["FETCHED"])
    with mock.patch.object(
        device_pages.DevicePeer, "_map", side_effect=partial(_die_when_exists, path)
    ):
        yield


def _die_when_exists(path: Path, *_: object) -> None:
    while not path.exists():
        time.sleep(0.01)
    dying()


@contextmanager
def importing_from_the_dead() -> Iterator[None]:
    """Fetch descriptors from a living rank, and import them after it has died."""
    fetch = device_pages.fetch
    pid = int(Path(os.environ["PID"]).read_text())

    def fetch_and_wait(*arguments: Any) -> list[int]:
        descriptors = fetch(*arguments)
        Path(os.environ["FETCHED"]).touch()
        while (
            Path(f"/proc/{pid}/status").exists()
            and "zombie" not in Path(f"/proc/{pid}/status").read_text()
        ):
            time.sleep(0.01)
        return descriptors

    with mock.patch.object(device_pages, "fetch", fetch_and_wait):
        yield


FAULTS: Mapping[str, Fault] = {
    "a send fails": Fault(
        partial(failing, "ncclSend", error=_INTERNAL_ERROR), "ncclSend fails as a test asked"
    ),
    "a send fails, the other rank is late": Fault(
        partial(failing, "ncclSend", error=_INTERNAL_ERROR), "ncclSend fails as a test asked"
    ),
    "a later receive fails": Fault(
        partial(failing, "ncclRecv", first=2, error=_INTERNAL_ERROR),
        "ncclRecv fails as a test asked",
    ),
    "messages fail as they begin": Fault(
        partial(failing, "ncclGroupEnd", first=2, error=_INTERNAL_ERROR),
        "ncclGroupEnd fails as a test asked",
    ),
    "messages fail on their way": Fault(
        partial(failing, "ncclSend on its way", first=2, error=_REMOTE_ERROR), "ncclRemoteError"
    ),
    "a communicator is aborted": Fault(aborting_its_communicator, "communicator was aborted"),
    "the first collective fails": Fault(
        partial(failing_while_gpus_connect, "ncclAllReduce"),
        "ncclAllReduce fails as a test asked",
        at_start=True,
    ),
    "a rank dies in a bucket": Fault(dying_in_a_bucket),
    "a rank dies before an import": Fault(dying_once_its_descriptors_are_fetched, generate={}),
}
SECOND_RANK: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "a rank dies before an import": importing_from_the_dead,
    "a send fails, the other rank is late": late_in_a_bucket,
}
"""Contexts of the second rank at the same time."""


def run_fault(directory: Path, name: str) -> tuple[list[int], str]:
    """Return the ranks on which all was right, and the output of both."""
    environment = {
        "SMALL_MODEL": str(small_switch.write_model(directory / "model")),
        "PYTHONWARNINGS": "ignore",
        "PID": str(directory / "pid"),
        "FETCHED": str(directory / "fetched"),
        # If torch's watchdog sees a failure first, the end of a group waits for its report: 60 s by
        # default.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
    }
    arguments = ["-m", "tests.software_gpu.faults_on_ranks", str(directory), name]
    ended = run_ranks(arguments, 2, SECONDS, environment=environment)
    assert ended.status is not None, f"a hang:\n{ended.output}"
    return [rank for rank in range(2) if (directory / str(rank)).is_file()], ended.output


def left_of(before: Counter[str]) -> Counter[str]:
    """Return additional resources of the process, a few seconds after the end of the job."""
    deadline = time.monotonic() + _SECONDS_TO_END
    while (left := held() - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def held() -> Counter[str]:
    """Count device memory and open files, without those of torch and process groups."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    files = (name for name in open_files() if not name.startswith(_FILES_OF_TORCH))
    return Counter({**asdict(virtual_memory()), **Counter(files)})


def contents(engine: HybridEngine) -> TensorDict:
    return {name: flat.cpu() for name, flat in engine.sharding.training.buffers().items()}


@contextmanager
def raising(kind: type[Exception], pattern: str, seconds: float) -> Iterator[None]:
    """Expect an error in the block, in time."""
    started = time.monotonic()
    with pytest.raises(kind, match=pattern) as caught:
        yield
    assert type(caught.value) is kind
    assert time.monotonic() - started < seconds, "a rank waited for messages"


def run(fault: Fault, name: str) -> None:
    """Both ranks raise in time, return to training, and refuse later switches at once."""
    is_first = dist.get_rank() == 0
    at_fault = fault.begin if is_first else SECOND_RANK.get(name, nullcontext)
    settings = {"timeout_seconds": TIMEOUT_SECONDS, **fault.generate}
    engine_of = partial(small_switch.engine_of, Path(os.environ["SMALL_MODEL"]), {}, settings)
    if fault.at_start:
        kind = ReshardError if is_first else RemoteError
        with (
            at_fault(),
            raising(kind, f"connecting GPUs(.|\n)*{fault.error}", SECONDS),
            engine_of(),
        ):
            pass
        return
    with engine_of() as (engine, trainer):
        small_switch.switch(engine, trainer, 1)
        before = contents(engine)
        if not fault.error:
            # Even between the export of its memory and the import by the other rank.
            with at_fault(), raising(LostRankError, "rank 0 has ended", SECONDS):
                engine.sharding.enter(State.INFER)
            with raising(StateError, "the ranks have parted", SECONDS):
                engine.sharding.enter(State.INFER)
            return
        reason = fault.error if is_first else "nothing for|the connection failed"
        pattern = f"^collective transport, bucket(.|\n)*({reason})"
        with at_fault(), raising(TransportError, pattern, TIMEOUT_SECONDS + SLACK_SECONDS):
            engine.sharding.enter(State.INFER)
        assert engine.sharding.state is State.TRAIN
        after = contents(engine)
        assert all(torch.equal(after[key], flat) for key, flat in before.items())
        trainer.train_step(workers.batch(0), workers.cross_entropy)
        with raising(
            TransportError, "cannot be exchanged after an earlier failure", TIMEOUT_SECONDS
        ):
            engine.sharding.enter(State.INFER)


def main(directory: Path, name: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    if rank == 0:
        (directory / "pid").write_text(str(os.getpid()))
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    del ones
    before = held()
    try:
        run(FAULTS[name], name)
        left = left_of(before)
        assert not left, left
        (directory / str(rank)).touch()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)  # The ranks may have lost each other, so that neither waits for the other's end.


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
