"""Trainers that publish to a server on command, and survive faults of either side.

    with Trainers(directory, model, url) as trainers:
        trainers.do("publish")                                          # a `Result` by rank
        trainers.do("publish", Fault("within", "kill", rank=1))         # None for a rank that died

Both ranks are forked as in tests/harness/launch.py, but the failure of a rank does not end the
other. Commands and results are files in a directory.
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

import torch

from hybrid_engine import ActorHybridWorker, Sampling, load_config
from hybrid_engine.backends.vllm import Completion
from hybrid_engine.config import HybridConfig
from hybrid_engine.files.durable import write_text
from hybrid_engine.switch.states import State
from hybrid_engine.tools.launching import Ended, run_started
from tests.harness.launch import REPO_ROOT, end_with_launcher
from tests.hybrid_engine.serving.test_deltas import do_at
from tests.hybrid_engine.serving.test_servers import train_step

NUM_RANKS = 2
TIMEOUT = 20.0
PROMPTS = [[40, 41, 42, 43], [50, 51]]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_FORKING = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Fault:
    """A fault in one switch.

    Attributes:
        moment: "before" the servers are called, "within" the switch, or "after" it, before they are
            notified.
        how: "raise" a MemoryError, "kill" by SIGKILL, or "stop" by SIGSTOP.
        rank: rank that executes the fault.
        pids: processes to kill or stop; empty: the rank itself.
    """

    moment: str
    how: str
    rank: int = 0
    pids: Sequence[int] = ()

    @property
    def ends_trainer(self) -> bool:
        """True if the fault kills or stops a trainer."""
        return not self.pids and self.how != "raise"


@dataclass(frozen=True)
class Result:
    """Result of a command on one rank.

    Attributes:
        error: class name of the exception; "" if there was none.
        text: message of the exception.
        seconds: time from the fault, or else from the start of the command, to its end.
        state: state of the switch.
        is_same: whether the state is TRAIN and the training state is bitwise unchanged.
        version: version of the trainer's weights.
        tokens: completions after a successful publish.
    """

    error: str
    text: str
    seconds: float
    state: str
    is_same: bool
    version: int
    tokens: str


class Trainers:
    """Two ranks. As a context manager it ends all of their processes at the end of the block."""

    def __init__(self, directory: Path, model: str, url: str) -> None:
        directory.mkdir()
        self._directory = directory
        self._numbers = itertools.count()
        self._arguments = (str(directory), model, url)
        self._ranks: list[_Rank] = []
        self._ends = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._ended: Future[Ended] | None = None
        self._has_lost = False

    def __enter__(self) -> Trainers:
        self._ended = self._pool.submit(run_started, self._start, NUM_RANKS, 3000)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if (
                error is None
                and not self._has_lost
                and all(rank.is_alive() for rank in self._ranks)
            ):
                self.do("end", seconds=60)
        finally:
            self._ends.set()
            for rank in self._ranks:
                rank.end(1 if self._has_lost else 10)
            (self._directory / "output.txt").write_text(self._ended.result().output)
            self._pool.shutdown()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def do(
        self, action: str, fault: Fault | None = None, *, seconds: float = 200
    ) -> list[Result | None]:
        """Run a command on all ranks and return the results by rank; None for a rank without a
        result.

        Waits until every rank has finished or ended, except a rank that `fault` stops.
        """
        number = next(self._numbers)
        command = self._directory / f"command{number}.json"
        write_text(command, json.dumps([action, None if fault is None else asdict(fault)]))
        paths = [self._directory / f"result{number}-{rank}.json" for rank in range(NUM_RANKS)]
        self._has_lost |= fault is not None and fault.ends_trainer
        stopped = (
            fault.rank if fault is not None and fault.ends_trainer and fault.how == "stop" else None
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            waiting = [
                rank
                for rank, path in enumerate(paths)
                if not path.exists() and self._is_alive(rank) and rank != stopped
            ]
            if not waiting:
                break
            time.sleep(0.02)
        else:
            raise AssertionError(f"ranks {waiting} did not {action} within {seconds} s")
        return [Result(**json.loads(path.read_text())) if path.exists() else None for path in paths]

    def wait_for_end(self, rank: int, seconds: float) -> None:
        """Wait until a rank has ended, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._is_alive(rank) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _is_alive(self, rank: int) -> bool:
        if self._ended is not None and self._ended.done():
            raise AssertionError(self._ended.result().output)
        return len(self._ranks) <= rank or self._ranks[rank].is_alive()

    def _start(self, environment: Mapping[str, str], output: int) -> _Rank:
        self._ranks.append(_Rank(environment, output, self._arguments, self._ends))
        return self._ranks[-1]


class _Rank:
    """A forked rank, whose end is hidden from the launcher until all ranks are to end."""

    def __init__(
        self,
        environment: Mapping[str, str],
        output: int,
        arguments: tuple[str, ...],
        ends: threading.Event,
    ) -> None:
        with Connection(os.dup(output), readable=False) as writer:
            self._process = _FORKING.Process(
                target=_run_rank, args=(dict(environment), writer, arguments)
            )
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


def _run_rank(
    environment: Mapping[str, str], output: Connection, arguments: tuple[str, ...]
) -> None:
    os.setsid()
    threading.Thread(target=end_with_launcher, daemon=True).start()
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    os.environ.update(environment)
    os.chdir(REPO_ROOT)
    try:
        run_commands(*arguments)
    except BaseException:
        traceback.print_exc()
        raise


def config_of(model: str, url: str) -> HybridConfig:
    """Return the configuration of two ranks that publish to the server at `url`."""
    generate = {"servers": [url], "verify": "full", "bucket_mb": 1, "timeout_seconds": TIMEOUT}
    actor = {
        "params_dtype": "float32",
        "seq_length": 32,
        "optimizer": {"lr": 1e-2},
        "tensor_model_parallel_size": 2,
    }
    return load_config({"model": model, "actor_config": actor, "generate_config": generate})


def draw(worker: ActorHybridWorker) -> list[list[Completion]]:
    """Return the most likely completions of two prompts."""
    return worker.generate_sequences(PROMPTS, Sampling(max_tokens=8, temperature=0.0))


def run_commands(directory: str, model: str, url: str) -> None:
    """Run commands on a rank until "end", or until a switch fails because a trainer was lost."""
    with ActorHybridWorker(config_of(model, url)) as worker:
        trained = ""
        for number in itertools.count():
            command = Path(directory, f"command{number}.json")
            while not command.exists():
                time.sleep(0.02)
            action, fields = json.loads(command.read_text())
            fault = None if fields is None else Fault(**fields)
            trained = trained or digest(worker)
            result, error = _do(worker, action, fault, trained)
            trained = digest(worker) if action == "train" else trained
            path = command.with_name(f"result{number}-{worker.rank}.json")
            write_text(path, json.dumps(asdict(result)))
            if action == "end":
                return
            if error is not None and fault is not None and fault.ends_trainer:
                raise error


def _do(
    worker: ActorHybridWorker, action: str, fault: Fault | None, trained: str
) -> tuple[Result, Exception | None]:
    """Run a command; `trained` is the digest of the training state before it."""
    error = None
    tokens = ""
    times = [time.monotonic()]

    def act() -> None:
        assert fault is not None
        times.append(time.monotonic())
        _act(fault, worker.rank)

    try:
        if fault is not None:
            do_at(worker.sharding, fault.moment, act)
        if action == "publish":
            worker.sharding.enter(State.INFER)
            tokens = str([(answer[0].token_ids, answer[0].logprobs) for answer in draw(worker)])
        elif action == "withdraw":
            worker.sharding.enter(State.TRAIN)
        elif action == "train":
            train_step(worker, worker.train.version)
    except Exception as caught:
        error = caught
    seconds = round(time.monotonic() - times[-1], 1)
    state = worker.sharding.state
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
    """Return a digest of parameters and optimizer state, which must be on the device."""
    summed = hashlib.sha256()
    for item in worker.train.offload_items():
        if item.action == "copy":
            summed.update(
                item.tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
            )
    return summed.hexdigest()
