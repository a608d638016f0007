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
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from hybrid_engine.tools.launching import run_started
from tests.harness.no_pickles import refuse_pickles

T = TypeVar("T")
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

ENGINES = ("hybrid_engine.backends.megatron", "hybrid_engine.backends.vllm", "tests.megatron_patches.gpt")
"""A rank that has imported one of them is taken to have built an engine; Megatron and vLLM themselves are preloaded."""

_freeze, _unfreeze = gc.freeze, gc.unfreeze

REPO_ROOT = Path(__file__).resolve().parents[2]
_SERVER = multiprocessing.get_context("forkserver")
# vLLM's worker for CPUs puts others in the place of torch's streams, which a GPU needs.
_OF_THE_DEVICE = (
    ("vllm.v1.worker.gpu_worker", "vllm.v1.attention.backends.triton_attn")
    if "SOFTWARE_GPU_LIBRARIES" in os.environ
    else ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")
)
# Those that are not installed are left out: megatron-core's other versions are tested without vLLM.
_SERVER.set_forkserver_preload(
    [
        *("pytest", "torch.distributed", "transformers", "vllm.entrypoints.llm", *_OF_THE_DEVICE),
        # vLLM imports these with its first engine.
        *("vllm.v1.engine.async_llm", "vllm.v1.core.sched.scheduler"),
        *("vllm.entrypoints.anthropic.protocol", "vllm.entrypoints.launchers.cli_args", "compressed_tensors", "peft"),
        *("vllm.model_executor.layers.quantization.online.base", "vllm.distributed.elastic_ep.elastic_execute"),
        *("transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama"),
        *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer", "megatron.core.distributed"),
        *("hybrid_engine.assembly", "hybrid_engine.serving.publisher", "hybrid_engine.trainer.batches"),
        *("hybrid_engine.rl", "hybrid_engine.backends.huggingface.saving"),
        "tests.harness.frozen",
    ]
)


def start_fork_server() -> None:
    """Start the server from which ranks are forked, where the first launch is not to: it has this thread's network."""
    forkserver.ensure_running()


@dataclass(frozen=True)
class Outcomes:
    """What several calls came to: `outcomes[name]` is what one returned, by rank.

    Attributes:
        results: by name of the call, by rank.
        failures: by name of the call, what its ranks said.
    """

    results: dict[str, list[Any]]
    failures: dict[str, str]

    def __getitem__(self, name: str) -> list[Any]:
        """Raises AssertionError with the ranks' output if this call failed."""
        if name in self.failures:
            raise AssertionError(self.failures[name])
        return self.results[name]


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
        return self.launch_in_turn(num_ranks, {"": (function, args)}, timeout)[""]

    def launch_in_turn(self, num_ranks: int, calls: Mapping[str, Call], timeout: float = 300) -> Outcomes:
        """Run several functions as `launch` does, one after the other, on the same ranks.

        A call that fails ends its ranks, and those after it run on new ones; each set has `timeout` seconds.
        """
        outcomes, waiting = Outcomes({}, {}), list(calls)
        while waiting:
            finished, failure = _launch([calls[name] for name in waiting], num_ranks, timeout, self.with_engines)
            outcomes.results.update(zip(waiting, finished, strict=False))
            waiting = waiting[len(finished) :]
            if failure is not None:
                outcomes.failures[waiting.pop(0)] = failure
        return outcomes

    def run_alone(self, function: Callable[..., T], *args: Any, timeout: float = 300) -> T:
        """Run `function(*args)` in one new interpreter, for what must come before Megatron's or vLLM's import."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result(timeout)


def _launch(
    calls: Sequence[Call], num_ranks: int, timeout: float, with_engines: bool
) -> tuple[list[list[Any]], str | None]:
    """Results of the first calls, by rank, and how the call after them failed; None if all are finished."""
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="launch-") as directory:
        pickled = pickle.dumps((calls, with_engines))

        def start(environment: Mapping[str, str], output: int) -> _Rank:
            ranks.append(_Rank(environment, output, Path(directory), pickled))
            return ranks[-1]

        ended = run_started(start, num_ranks, timeout)
        for rank in ranks:
            rank.close()
        places = [[_result_of(Path(directory), call, rank) for rank in range(num_ranks)] for call in range(len(calls))]
        finished = [
            [pickle.loads(place.read_bytes()) for place in by_rank]
            for by_rank in itertools.takewhile(lambda by_rank: all(place.exists() for place in by_rank), places)
        ]
        if ended.status == 0 and len(finished) == len(calls):
            return finished, None
        finished = finished[: len(calls) - 1]  # ranks that fail once everything is done fail with the last call
        what = f"{calls[len(finished)][0].__qualname__} on {num_ranks} ranks"
        if ended.status is None:
            return finished, f"{what} outlived {timeout} s:\n{ended.output}"
        causes = "\n".join(path.read_text() for path in sorted(Path(directory).glob("error*.txt")))
        return finished, f"{what} failed:\n{ended.output}\n{causes}"


def _result_of(directory: Path, call: int, rank: int) -> Path:
    return directory / f"result{call}-{rank}.pickle"


class _Rank:
    def __init__(self, environment: Mapping[str, str], output: int, directory: Path, calls: bytes) -> None:
        with Connection(os.dup(output), readable=False) as writer:
            self._process = _SERVER.Process(target=_run_rank, args=(environment, writer, directory, calls))
            self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def close(self) -> None:
        """Of one that has ended: its descriptors."""
        self._process.close()


def _run_rank(environment: Mapping[str, str], output: Connection, directory: Path, calls: bytes) -> None:
    """A rank, from its first line to its end; `calls` are pickled, for they are imported only once all is set up."""
    os.setsid()
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True, write_through=True)
    output.close()
    os.environ.update(environment)
    os.chdir(REPO_ROOT)
    rank = int(os.environ["RANK"])
    try:
        # When an engine ends it lets go of all that is frozen, and from then on each of vLLM's collections would go
        # through all modules, which takes half a second. `real_collector` is for tests of what an engine leaves.
        gc.freeze = gc.unfreeze = _do_nothing
        refuse_pickles()
        functions, with_engines = pickle.loads(calls)
        for number, (function, args) in enumerate(functions):
            gc.collect()
            _freeze()  # vLLM collects garbage many times per engine
            result = pickle.dumps(function(*args))
            built = [name for name in ENGINES if name in sys.modules]
            if built and not with_engines:
                raise AssertionError(f"imports {', '.join(built)}: take the fixture `engines` in place of `ranks`")
            place = _result_of(directory, number, rank)
            place.with_suffix(".new").write_bytes(result)
            place.with_suffix(".new").rename(place)  # whole, also if the rank is killed
    except BaseException:
        (directory / f"error{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        atexit._run_exitfuncs()


def _do_nothing() -> None:
    pass


@contextmanager
def real_collector() -> Iterator[None]:
    """The garbage collector of a rank as it is outside of tests, where engines freeze and unfreeze what it looks at."""
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    try:
        yield
    finally:
        gc.freeze = gc.unfreeze = _do_nothing


def _end_with_the_launcher() -> None:
    """The server lives as long as one of its ranks, so nothing else ends a rank that hangs when pytest is killed."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)
