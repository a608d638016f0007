"""Run one function on several real ranks, as torchrun would, and bring back what each rank returned.

    def test_a_sum(ranks: Ranks) -> None:                     # or `engines`, for Megatron and vLLM
        assert ranks.launch(sum_over_ranks, 2) == [3, 3]      # a function of this module, which makes its own group

Ranks are forked from a server that has imported torch, transformers, vLLM and Megatron, for importing them costs more
than most tests do. A rank that fails or outlives the timeout takes the whole launch down, so no test leaves a process
behind.

Unlike ranks of torchrun these have one hash seed, and vLLM before Megatron; `verify` (test_matrix.py) and the example
start interpreters.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from hybrid_engine.ranks.launching import run_started

T = TypeVar("T")

ENGINES = ("hybrid_engine.backends.megatron", "hybrid_engine.backends.vllm", "tests.megatron_patches.gpt")
"""A rank that has imported one of them is taken to have built an engine; Megatron and vLLM themselves are preloaded."""

REPO_ROOT = Path(__file__).resolve().parents[2]
_SERVER = multiprocessing.get_context("forkserver")
# Those that are not installed are left out: megatron-core's other versions are tested without vLLM.
_SERVER.set_forkserver_preload(
    [
        *("pytest", "torch.distributed", "transformers", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"),
        *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer", "megatron.core.distributed"),
    ]
)


@dataclass(frozen=True)
class Ranks:
    """What a test takes to run something on ranks: the fixtures `ranks` and `engines`.

    Attributes:
        with_engines: whether the ranks may import Megatron or our vLLM backend. One that does without ends in an
            error, so a test that is not marked `engines` builds none.
    """

    with_engines: bool

    def launch(self, function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 300) -> list[Any]:
        """Run `function(*args)` on `num_ranks` processes; return the results by rank.

        `function` is a top-level function of an importable module under tests/; it finds RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment and creates its own process group.
        Arguments and results travel by pickle. Raises AssertionError with the ranks' output when any fails.
        """
        return _launch(function, num_ranks, args, timeout, self.with_engines)

    def launch_in_turn(
        self, num_ranks: int, calls: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], timeout: float = 300
    ) -> dict[str, list[Any]]:
        """Run several functions, one after the other, on the same ranks: name -> results by rank.

        The first failure ends them all.
        """
        by_rank = self.launch(_in_turn, num_ranks, list(calls.values()), timeout=timeout)
        return {name: [results[index] for results in by_rank] for index, name in enumerate(calls)}

    def run_alone(self, function: Callable[..., T], *args: Any, timeout: float = 300) -> T:
        """Run `function(*args)` in one new interpreter, for what must come before Megatron's or vLLM's import."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result(timeout)


def _launch(
    function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout: float, with_engines: bool
) -> list[Any]:
    ranks: list[_Rank] = []
    call = pickle.dumps((function, args, with_engines))
    with tempfile.TemporaryDirectory(prefix="launch-") as directory:

        def start(environment: Mapping[str, str], output: int) -> _Rank:
            ranks.append(_Rank(environment, output, Path(directory), call))
            return ranks[-1]

        ended = run_started(start, num_ranks, timeout)
        for rank in ranks:
            rank.close()
        if ended.status is None:
            raise AssertionError(f"{function.__qualname__} on {num_ranks} ranks outlived {timeout} s:\n{ended.output}")
        if ended.status != 0:
            causes = "\n".join(path.read_text() for path in sorted(Path(directory).glob("error*.txt")))
            raise AssertionError(f"{function.__qualname__} on {num_ranks} ranks failed:\n{ended.output}\n{causes}")
        return [pickle.loads(Path(directory, f"result{rank}.pickle").read_bytes()) for rank in range(num_ranks)]


class _Rank:
    """A forked process, as `launching` takes it; `call` is a pickled function with its arguments."""

    def __init__(self, environment: Mapping[str, str], output: int, directory: Path, call: bytes) -> None:
        with Connection(os.dup(output), readable=False) as writer:
            self._process = _SERVER.Process(target=_run_rank, args=(environment, writer, directory, call))
            self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def close(self) -> None:
        """Of one that has ended: its descriptors."""
        self._process.close()


def _in_turn(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Rank function of several: what each returned. Starting ranks and importing costs more than most of them do."""
    results = []
    for function, args in calls:
        gc.collect()
        gc.freeze()  # vLLM collects garbage many times per engine, and would go through all modules each time
        results.append(function(*args))
    return results


def remembered(launched: Callable[[int], Any]) -> Callable[[int], Any]:
    """A function of the number of ranks that is called once for each; also a failure is not tried again."""
    outcomes: dict[int, tuple[Any, BaseException | None]] = {}

    def recall(num_ranks: int) -> Any:
        if num_ranks not in outcomes:
            try:
                outcomes[num_ranks] = launched(num_ranks), None
            except Exception as error:
                outcomes[num_ranks] = None, error
        result, error = outcomes[num_ranks]
        if error is not None:
            raise error
        return result

    return recall


def _run_rank(environment: Mapping[str, str], output: Connection, directory: Path, call: bytes) -> None:
    """A rank, from its first line to its end."""
    os.setsid()
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True, write_through=True)
    output.close()
    os.environ.update(environment)
    os.chdir(REPO_ROOT)
    rank = os.environ["RANK"]
    try:
        function, args, with_engines = pickle.loads(call)
        result = function(*args)
        built = [name for name in ENGINES if name in sys.modules]
        if built and not with_engines:
            raise AssertionError(f"imports {', '.join(built)}: take the fixture `engines` in place of `ranks`")
        (directory / f"result{rank}.pickle").write_bytes(pickle.dumps(result))
    except BaseException:
        (directory / f"error{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        atexit._run_exitfuncs()


def _end_with_the_launcher() -> None:
    """The server lives as long as one of its ranks, so nothing else ends a rank that hangs when pytest is killed."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)
