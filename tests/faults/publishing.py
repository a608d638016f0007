"""Trainers that publish to a server and outlive what is done to either: told what to do one command after the other.

    with Trainers(directory, model, url) as trainers:
        trainers.do("publish")                                          # by rank: a `Result`
        trainers.do("publish", Fault("within", "kill", rank=1))         # None of a rank that died

Both ranks are forked as those of tests/harness/launch.py are; no failure of one takes the others down. Commands and
results are files of a directory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch

from hybrid_engine import ActorHybridWorker, Sampling, load_config
from hybrid_engine.backends.vllm import Completion
from hybrid_engine.config import HybridConfig
from hybrid_engine.switch.states import State
from hybrid_engine.tools.launching import Ended, run_started
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.serving.test_deltas import do_at
from tests.hybrid_engine.serving.test_servers import train_step

NUM_RANKS = 2
TIMEOUT = 20.0
PROMPTS = [[40, 41, 42, 43], [50, 51]]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_FORKING = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one switch.

    Attributes:
        moment: "before" the servers are called, "within" the switch, or "after": before they are told that it ended.
        how: "raise" a MemoryError, "kill" by SIGKILL, or "stop" by SIGSTOP.
        rank: which does it.
        pids: to whom; empty: the rank itself.
    """

    moment: str
    how: str
    rank: int = 0
    pids: Sequence[int] = ()

    @property
    def is_own_end(self) -> bool:
        """Whether it ends or stops a trainer."""
        return not self.pids and self.how != "raise"


@dataclass(frozen=True)
class Result:
    """What a rank says of a command.

    Attributes:
        error: name of the exception's class; "" where there was none.
        text: of it.
        seconds: from the fault, or else from the beginning of the command, to its end.
        state: of the switch.
        is_same: it is TRAIN, and training state is bitwise what it was.
        version: of the trainer's weights.
        tokens: completions, after a publish that went well.
    """

    error: str
    text: str
    seconds: float
    state: str
    is_same: bool
    version: int
    tokens: str


class Trainers:
    """Two ranks. A context manager: at the end of the block none of their processes is left."""

    def __init__(self, directory: Path, model: str, url: str) -> None:
        directory.mkdir()
        self._directory, self._numbers = directory, itertools.count()
        self._arguments = (str(directory), model, url)
        self._ranks: list[_Rank] = []
        self._ends = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._ended: Future[Ended] | None = None
        self._has_lost = False

    def __enter__(self) -> Trainers:
        self._ended = self._pool.submit(run_started, self._start, NUM_RANKS, 3000)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._has_lost and all(rank.is_alive() for rank in self._ranks):
                self.do("end", seconds=60)
        finally:
            self._ends.set()
            for rank in self._ranks:
                rank.end(1 if self._has_lost else 10)
            assert self._ended is not None
            (self._directory / "output.txt").write_text(self._ended.result().output)
            self._pool.shutdown()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def do(self, what: str, fault: Fault | None = None, *, seconds: float = 200) -> list[Result | None]:
        """Have all ranks do it, and wait until each has or has ended; None of a rank that says nothing.

        Those that are stopped are not waited for once the others have answered.
        """
        number = next(self._numbers)
        command = self._directory / f"command{number}.json"
        command.with_suffix(".new").write_text(json.dumps([what, None if fault is None else asdict(fault)]))
        command.with_suffix(".new").rename(command)
        places = [self._directory / f"result{number}-{rank}.json" for rank in range(NUM_RANKS)]
        self._has_lost |= fault is not None and fault.is_own_end
        stopped = fault.rank if fault is not None and fault.is_own_end and fault.how == "stop" else None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            waiting = [
                rank
                for rank, place in enumerate(places)
                if not place.exists() and self._is_alive(rank) and rank != stopped
            ]
            if not waiting:
                break
            time.sleep(0.02)
        else:
            raise AssertionError(f"ranks {waiting} did not {what} within {seconds} s")
        return [Result(**json.loads(place.read_text())) if place.exists() else None for place in places]

    def seconds_to_end(self, rank: int, seconds: float) -> float | None:
        """Wait for the end of a rank; None where it does not come."""
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            if not self._is_alive(rank):
                return time.monotonic() - started
            time.sleep(0.02)
        return None

    def _is_alive(self, rank: int) -> bool:
        if self._ended is not None and self._ended.done():
            raise AssertionError(self._ended.result().output)
        return len(self._ranks) <= rank or self._ranks[rank].is_alive()

    def _start(self, environment: Mapping[str, str], output: int) -> _Rank:
        self._ranks.append(_Rank(environment, output, self._arguments, self._ends))
        return self._ranks[-1]


class _Rank:
    """A forked rank, of which nobody hears that it has ended until all are to end."""

    def __init__(
        self, environment: Mapping[str, str], output: int, arguments: tuple[str, ...], ends: threading.Event
    ) -> None:
        with Connection(os.dup(output), readable=False) as writer:
            self._process = _FORKING.Process(target=_run_rank, args=(dict(environment), writer, arguments))
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._ends = ends

    def is_alive(self) -> bool:
        return self._process.exitcode is None

    def poll(self) -> int | None:
        return self._process.exitcode if self._ends.is_set() else None

    def wait(self) -> None:
        self._process.join()

    def end(self, seconds: float) -> None:
        self._process.join(seconds)
        self._process.kill()


def _run_rank(environment: Mapping[str, str], output: Connection, arguments: tuple[str, ...]) -> None:
    os.setsid()
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    os.environ.update(environment)
    os.chdir(REPO_ROOT)
    try:
        obey(*arguments)
    except BaseException:
        traceback.print_exc()
        raise


def _end_with_the_launcher() -> None:
    """The server of forks lives as long as a rank does, so nothing else ends one when pytest is killed."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)


def config_of(model: str, url: str) -> HybridConfig:
    """Of two ranks that publish to the server at this URL."""
    generate = {"servers": [url], "verify": "full", "bucket_mb": 1, "timeout_seconds": TIMEOUT}
    actor = {"params_dtype": "float32", "seq_length": 32, "optimizer": {"lr": 1e-2}, "tensor_model_parallel_size": 2}
    return load_config({"model": model, "actor_config": actor, "generate_config": generate})


def draw(worker: ActorHybridWorker) -> list[list[Completion]]:
    """The likeliest completions of some prompts."""
    return worker.generate_sequences(PROMPTS, Sampling(max_tokens=8, temperature=0.0))


def obey(directory: str, model: str, url: str) -> None:
    """A rank: what the commands say, until "end". What a switch raised where a trainer was lost ends it."""
    with ActorHybridWorker(config_of(model, url)) as worker:
        trained = ""
        for number in itertools.count():
            command = Path(directory, f"command{number}.json")
            while not command.exists():
                time.sleep(0.02)
            what, told = json.loads(command.read_text())
            fault = None if told is None else Fault(**told)
            trained = trained or digest(worker)
            result, error = _do(worker, what, fault, trained)
            trained = digest(worker) if what == "train" else trained
            place = command.with_name(f"result{number}-{worker.rank}.json")
            place.with_suffix(".new").write_text(json.dumps(asdict(result)))
            place.with_suffix(".new").rename(place)
            if what == "end":
                return
            if error is not None and fault is not None and fault.is_own_end:
                raise error


def _do(worker: ActorHybridWorker, what: str, fault: Fault | None, trained: str) -> tuple[Result, Exception | None]:
    """Do it; `trained`: digest of the training state before."""
    error, tokens, times = None, "", [time.monotonic()]

    def act() -> None:
        assert fault is not None
        times.append(time.monotonic())
        _act(fault, worker.rank)

    try:
        if fault is not None:
            do_at(worker.sharding, fault.moment, act)
        if what == "publish":
            worker.sharding.enter(State.INFER)
            tokens = str([(each[0].token_ids, each[0].logprobs) for each in draw(worker)])
        elif what == "withdraw":
            worker.sharding.enter(State.TRAIN)
        elif what == "train":
            train_step(worker, worker.train.version)
    except Exception as caught:
        error = caught
    seconds, state = round(time.monotonic() - times[-1], 1), worker.sharding.state
    is_same = state is State.TRAIN and digest(worker) == trained
    name, text = ("", "") if error is None else (type(error).__name__, str(error))
    return Result(name, text, seconds, str(state), is_same, worker.train.version, tokens), error


def _act(fault: Fault, rank: int) -> None:
    if rank != fault.rank:
        return
    if fault.how == "raise":
        raise MemoryError("no memory for 3 GB")
    for pid in fault.pids or [os.getpid()]:
        os.kill(pid, SIGNALS[fault.how])


def digest(worker: ActorHybridWorker) -> str:
    """Of the bytes of parameters and optimizer state, which are on the device."""
    summed = hashlib.sha256()
    for item in worker.train.offload_items():
        if item.action == "copy":
            summed.update(item.tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return summed.hexdigest()
