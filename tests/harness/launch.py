"""Run a function, or the body of a test, on several real ranks, as torchrun would.

    @on_ranks(2)                            # or `on_engines(2)`, for Megatron and vLLM
    def test_a_sum(path: Path) -> None:                       # it creates its own group
        assert sum_over_ranks() == 3        # on every rank; a failure travels back

    @on_ranks({2: ["even", "odd"], 4: ["even"]})              # cases of each number of ranks
    def test_a_case(case: str) -> None: ...

    def test_a_sum(ranks: Ranks) -> None:                     # or `engines`
        assert ranks.launch(sum_over_ranks, 2) == [3, 3]      # a function of this module

All bodies of a module on the same number of ranks run in turn, in one launch. Arguments are
pickled; they are parameters, `tmp_path`, and fixtures that have the scope of a module or of a
session.

Ranks are forked from a server that has already imported torch, transformers, vLLM and Megatron,
because these imports take longer than most tests. If a rank fails or exceeds the timeout, the
launcher kills all of its ranks, so that no test leaves a process behind.

Unlike ranks of torchrun these ranks share a hash seed and import vLLM before Megatron. `verify`
(test_matrix.py) and the example start new interpreters.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.assertion import install_importhook
from _pytest.config import get_config

from hybrid_engine.tools.launching import run_started
from tests.harness.no_pickles import refuse_pickles

T = TypeVar("T")
Body = Callable[..., None]
Cases = Mapping[int, Iterable[object]]
"""Number of ranks -> cases of a test."""
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

ENGINES = (
    "hybrid_engine.backends.megatron",
    "hybrid_engine.backends.vllm",
    "tests.megatron_patches.gpt",
)
"""Modules whose import means that a rank built an engine; Megatron and vLLM are preloaded."""

_freeze, _unfreeze = gc.freeze, gc.unfreeze

REPO_ROOT = Path(__file__).resolve().parents[2]
_SERVER = multiprocessing.get_context("forkserver")
# vLLM's worker for CPUs replaces torch's streams, which a GPU needs.
_DEVICE_MODULES = (
    ("vllm.v1.worker.gpu_worker", "vllm.v1.attention.backends.triton_attn")
    if "SOFTWARE_GPU_LIBRARIES" in os.environ
    else ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")
)
PRELOADED = [
    "pytest",
    "torch.distributed",
    "transformers",
    "vllm.entrypoints.llm",
    *_DEVICE_MODULES,
    # vLLM imports these with its first engine.
    "vllm.v1.engine.async_llm",
    "vllm.v1.core.sched.scheduler",
    "vllm.entrypoints.anthropic.protocol",
    "vllm.entrypoints.launchers.cli_args",
    "compressed_tensors",
    "peft",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "hybrid_engine.assembly",
    "hybrid_engine.serving.publisher",
    "hybrid_engine.trainer.batches",
    "hybrid_engine.rl",
    "hybrid_engine.backends.huggingface.saving",
    "tests.harness.frozen",
]
# The server ignores missing modules: vLLM is absent in tests of other megatron-core versions.
_SERVER.set_forkserver_preload(PRELOADED)


def start_fork_server() -> None:
    """Start the fork server of ranks now, in this thread's network, not at the first launch."""
    forkserver.ensure_running()


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of several calls; `outcomes[name]` holds the results of a call by rank.

    Attributes:
        results: results by name of the call, then by rank.
        failures: output of the ranks of each failed call, by its name.
    """

    results: dict[str, list[Any]]
    failures: dict[str, str]

    def __getitem__(self, name: str) -> list[Any]:
        """Return the results of call `name`; raise AssertionError with its output if it failed."""
        if name in self.failures:
            raise AssertionError(self.failures[name])
        return self.results[name]


@dataclass(frozen=True)
class Ranks:
    """Launcher of ranks, given to tests by the fixtures `ranks` and `engines`.

    Attributes:
        with_engines: whether ranks may import Megatron or our vLLM backend. Otherwise such a rank
            ends with an error, so that a test without the mark `engines` cannot build an engine.
    """

    with_engines: bool

    def launch(
        self, function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 300
    ) -> list[Any]:
        """Run `function(*args)` on `num_ranks` processes; return the results by rank.

        `function` is a top-level function of an importable module under tests/. Its environment
        holds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and it creates its own
        process group. Arguments and results are pickled. Raises AssertionError with the ranks'
        output if a rank fails.
        """
        return self.launch_in_turn(num_ranks, {"": (function, args)}, timeout)[""]

    def launch_in_turn(
        self, num_ranks: int, calls: Mapping[str, Call], timeout: float = 300
    ) -> Outcomes:
        """Run several functions in turn on the same ranks.

        A failed call ends its ranks; later calls run on new ranks. Each set of ranks has `timeout`
        seconds.
        """
        outcomes = Outcomes({}, {})
        pending = list(calls)
        while pending:
            finished, failure = _launch(
                [calls[name] for name in pending], num_ranks, timeout, self.with_engines
            )
            outcomes.results.update(zip(pending, finished, strict=False))
            pending = pending[len(finished) :]
            if failure is not None:
                outcomes.failures[pending.pop(0)] = failure
        return outcomes

    def run_alone(self, function: Callable[..., T], *args: Any, timeout: float = 300) -> T:
        """Run `function(*args)` in a new interpreter, before any import of Megatron or vLLM."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result(timeout)


def _launch(
    calls: Sequence[Call], num_ranks: int, timeout: float, with_engines: bool
) -> tuple[list[list[Any]], str | None]:
    """Run `calls` in turn; return results of the finished ones by rank, and the failure or None."""
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="launch-") as directory:
        pickled = pickle.dumps((calls, with_engines))

        def start(environment: Mapping[str, str], output: int) -> _Rank:
            ranks.append(_Rank(environment, output, Path(directory), pickled))
            return ranks[-1]

        ended = run_started(start, num_ranks, timeout)
        for rank in ranks:
            rank.close()
        paths = [
            [_result_of(Path(directory), call, rank) for rank in range(num_ranks)]
            for call in range(len(calls))
        ]
        finished = [
            [pickle.loads(path.read_bytes()) for path in by_rank]
            for by_rank in itertools.takewhile(
                lambda by_rank: all(path.exists() for path in by_rank), paths
            )
        ]
        if ended.status == 0 and len(finished) == len(calls):
            return finished, None
        # A failure after all calls have returned counts as a failure of the last call.
        finished = finished[: len(calls) - 1]
        failed = f"{calls[len(finished)][0].__qualname__} on {num_ranks} ranks"
        if ended.status is None:
            return finished, f"{failed} exceeded {timeout} s:\n{ended.output}"
        causes = "\n".join(path.read_text() for path in sorted(Path(directory).glob("error*.txt")))
        return finished, f"{failed} failed:\n{ended.output}\n{causes}"


def _result_of(directory: Path, call: int, rank: int) -> Path:
    return directory / f"result{call}-{rank}.pickle"


class _Rank:
    def __init__(
        self, environment: Mapping[str, str], output: int, directory: Path, calls: bytes
    ) -> None:
        with Connection(os.dup(output), readable=False) as writer:
            self._process = _SERVER.Process(
                target=_run_rank, args=(environment, writer, directory, calls)
            )
            self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def close(self) -> None:
        """Close the descriptors of a rank that has ended."""
        self._process.close()


def _run_rank(
    environment: Mapping[str, str], output: Connection, directory: Path, calls: bytes
) -> None:
    """Main function of a rank. `calls` are pickled, so their modules are imported after set-up."""
    os.setsid()
    threading.Thread(target=end_with_launcher, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True, write_through=True)
    output.close()
    os.environ.update(environment)
    os.chdir(REPO_ROOT)
    rank = int(os.environ["RANK"])
    try:
        # An engine unfreezes all objects when it ends. From then on every collection of vLLM would
        # traverse all modules, which takes half a second. Tests of an engine's leftovers use
        # `real_collector`.
        gc.freeze = gc.unfreeze = _do_nothing
        refuse_pickles()
        install_importhook(get_config())  # a failed assert shows its values, as in pytest
        functions, with_engines = pickle.loads(calls)
        for number, (function, args) in enumerate(functions):
            gc.collect()
            _freeze()  # vLLM collects garbage many times per engine.
            result = pickle.dumps(function(*args))
            built = [name for name in ENGINES if name in sys.modules]
            if built and not with_engines:
                raise AssertionError(
                    f"imports {', '.join(built)}: take the fixture `engines` in place of `ranks`"
                )
            path = _result_of(directory, number, rank)
            path.with_suffix(".new").write_bytes(result)
            path.with_suffix(".new").rename(path)  # A killed rank leaves no partial file.
    except BaseException:
        (directory / f"error{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        atexit._run_exitfuncs()


def _do_nothing() -> None:
    pass


@contextmanager
def real_collector() -> Iterator[None]:
    """Let engines freeze and unfreeze objects in this rank, as they do outside tests."""
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    try:
        yield
    finally:
        gc.freeze = gc.unfreeze = _do_nothing


def end_with_launcher() -> None:
    """Kill this rank when pytest ends. The fork server itself stays as long as any rank does."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)


# -- tests whose bodies run on ranks ---------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A launch that bodies of a module share.

    Attributes:
        launcher: fixture that launches, `ranks` or `engines`.
        num_ranks: number of ranks.
        timeout: seconds for all bodies together.
    """

    launcher: str
    num_ranks: int
    timeout: float


def on_ranks(num_ranks: int | Cases, timeout: float = 300) -> Callable[[Body], Body]:
    """Run the decorated test on ranks without engines.

    Args:
        num_ranks: number of ranks, or the cases of each number; the body takes `case`.
    """
    return functools.partial(_test_of, "ranks", num_ranks, timeout)


def on_engines(num_ranks: int | Cases, timeout: float = 300) -> Callable[[Body], Body]:
    """Run the decorated test on ranks that may build engines."""
    return functools.partial(_test_of, "engines", num_ranks, timeout)


def _test_of(launcher: str, num_ranks: int | Cases, timeout: float, body: Body) -> Body:
    @functools.wraps(body)
    def test(
        request: pytest.FixtureRequest, bodies: Callable[[Launch], Outcomes], **_: object
    ) -> None:
        assert bodies(_launch_of(request.node))[request.node.name]

    names = dict.fromkeys(
        ("request", "bodies", "launch", launcher, *inspect.signature(body).parameters)
    )
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    if isinstance(num_ranks, int):
        hidden = pytest.param(Launch(launcher, num_ranks, timeout), id=pytest.HIDDEN_PARAM)
        return pytest.mark.parametrize("launch", [hidden])(test)
    launches = {Launch(launcher, number, timeout): cases for number, cases in num_ranks.items()}
    by_case = [
        pytest.param(launch, case, id=str(case))
        for launch, cases in launches.items()
        for case in cases
    ]
    return pytest.mark.parametrize(("launch", "case"), by_case)(test)


def _launch_of(item: pytest.Item) -> Launch | None:
    return item.callspec.params.get("launch") if hasattr(item, "callspec") else None


def of_all_ranks(value: T) -> list[T]:
    """Return `value` of every rank, by rank. Collective over the default group."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def launched_bodies(request: pytest.FixtureRequest) -> Callable[[Launch], Outcomes]:
    """Return a function that runs the bodies of a launch once; `request` is that of the module."""

    def arguments_of(item: pytest.Function) -> Mapping[str, Any]:
        values = {
            "tmp_path": request.getfixturevalue("tmp_path_factory").mktemp("body"),
            **item.callspec.params,
        }
        names = inspect.signature(inspect.unwrap(item.function)).parameters
        return {
            name: values[name] if name in values else request.getfixturevalue(name)
            for name in names
        }

    @functools.cache
    def launched(launch: Launch) -> Outcomes:
        calls: dict[str, Call] = {
            item.name: (_run_body, (item.module.__name__, item.originalname, arguments_of(item)))
            for item in request.session.items
            if item.getparent(pytest.Module) is request.node and _launch_of(item) == launch
        }
        launcher = request.getfixturevalue(launch.launcher)
        return launcher.launch_in_turn(launch.num_ranks, calls, launch.timeout)

    return launched


def _run_body(module: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Run a body on this rank."""
    inspect.unwrap(getattr(importlib.import_module(module), name))(**arguments)
    return True
