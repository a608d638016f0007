"""Failures of trainers and of a vLLM server in a publish, by moment, process and kind.

After any failure, the training state is bitwise unchanged and the next publish succeeds: to the
same server if it lives, otherwise to a new server on its port. A server survives its trainers,
generates nothing without whole weights, and accepts weights of other trainers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import SHARED_MEMORY, is_mapped
from tests.faults.faulty_server import fail_in_commit, faulty
from tests.faults.publishing import TIMEOUT, Fault, Result, Trainers
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, Server, serving
from tests.zoo.tiny_models import save_model
from tests.zoo.tokenizers import save_numbers

pytestmark = [pytest.mark.faults, pytest.mark.engines]

MOMENTS = ("before", "within", "after")
# Maximum seconds until every trainer has raised. A server whose engine core was killed does not
# respond; neither do forks of a killed API server, which keep its port.
KILLED = 15.0
STOPPED = TIMEOUT + 25
PROCESSES = ("Worker", "EngineCor", "APIServer")
SHARED_BY_VLLM = ("psm_", "vllm_dist_")
"""Prefixes of shared memory that killed processes of Python and vLLM leave behind."""
NO_TOKENS = 3.0
"""Seconds without a completion after which a server counts as paused."""


class Servers:
    """The current server, and its replacements on the same port."""

    def __init__(self, model: str, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self._arguments = (model, *arguments)
        self._number = 0
        self._port = 0
        self._ends = ExitStack()
        self.now = self._start()

    def _start(self) -> Server:
        model, *arguments = self._arguments
        directory = self.directory / f"server{self._number}"
        self._number += 1
        options = {"environment": faulty(self.directory), "port": self._port}
        self.now = self._ends.enter_context(
            serving(model, directory, *FILLED, *PLAIN, *arguments, **options)
        )
        self._port = int(self.now.url.rpartition(":")[2])
        return self.now

    def pids(self, who: str) -> list[int]:
        return [self.now.pid] if who == "APIServer" else self.now.processes()[who]

    def is_up(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.now.url}/health", timeout=5).ok
        return False

    def renew(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        pid = self.now.pid
        self._ends.close()
        assert processes_of(pid) == []


class Pair:
    """Trainers and a server that have published once.

    Attributes:
        is_well: whether the last case succeeded; otherwise the next one gets a new pair.
    """

    def __init__(self, servers: Servers, trainers: Trainers) -> None:
        self.servers = servers
        self.trainers = trainers
        self.is_well = True
        check_well(trainers.do("train"))
        check_published(self, trainers.do("publish"))
        check_well(trainers.do("withdraw"))


class Pairs:
    """Pool that gives each case the pair of the previous case, unless that failed."""

    def __init__(self, model: str, servers: Servers, directory: Path) -> None:
        self._model = model
        self._servers = servers
        self._directory = directory
        self._number = 0
        self._ends = ExitStack()
        self._pair: Pair | None = None

    def get(self) -> Pair:
        if self._pair is None or not self._pair.is_well:
            self.close()
            if not self._servers.is_up():
                self._servers.renew()
            directory = self._directory / f"trainers{self._number}"
            self._number += 1
            trainers = self._ends.enter_context(
                Trainers(directory, self._model, self._servers.now.url)
            )
            self._pair = Pair(self._servers, trainers)
        return self._pair

    def close(self) -> None:
        pids = [] if self._pair is None else self._pair.trainers.pids
        self._pair = None
        with contextlib.suppress(AssertionError):  # The trainers may be broken.
            self._ends.close()
        assert [left for pid in pids for left in processes_of(pid)] == []


def save_served_model(directory: Path) -> Path:
    """Write the model of all trainers; return its directory."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 128,
        "eos_token_id": 9,
    }
    path = save_model(directory, "qwen2", **sizes)
    save_numbers(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_served_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def servers(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(model, tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def pairs(
    model: str, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pairs]:
    pairs = Pairs(model, servers, tmp_path_factory.mktemp("pairs"))
    yield pairs
    pairs.close()


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    pair = pairs.get()
    pair.is_well = False
    return pair


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Check that a test leaves nothing in /dev/shm except leftovers of killed vLLM processes."""
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    yield
    left = [name for name in left_in_shared_memory(before) if not name.startswith(SHARED_BY_VLLM)]
    assert left == []


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Return new names that no process maps during 5 s. Names of other tests come and go."""
    deadline = time.monotonic() + 5
    left = None
    while True:
        now = {
            path.name
            for path in SHARED_MEMORY.iterdir()
            if path.name not in before and not is_mapped(path)
        }
        left = now if left is None else left & now
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.2)


def processes_of(session: int) -> list[int]:
    """Return the live processes of a session."""
    return [pid for pids in Server("", session, Path()).processes().values() for pid in pids]


def status_of(server: Server) -> Values:
    """Return replies of a server before and after a resume, and whether it draws tokens."""
    status = {}
    queries = (("GET", "weight_info"), ("GET", "is_paused"))
    for method, route in (*queries, ("POST", "resume"), *queries):
        try:
            response = requests.request(method, f"{server.url}/{route}", timeout=STOPPED)
            key = f"{route}_then" if route in status else route
            if route == "resume":
                status[key] = [response.status_code, response.text[:300]]
            else:
                status[key] = next(iter(response.json().values()))
        except requests.RequestException as error:
            status[route] = type(error).__name__
    status["draws"] = draws_tokens(server)
    return status


def draws_tokens(server: Server) -> bool | str:
    """Return True for a completion, False if the server does not respond, or else the error."""
    body = {"prompt": [40, 41], "max_tokens": 2, "temperature": 0.0}
    try:
        response = requests.post(f"{server.url}/v1/completions", json=body, timeout=NO_TOKENS)
        return True if response.ok else response.text[:200]
    except requests.Timeout:
        return False
    except requests.RequestException as error:
        return type(error).__name__


def rows_of(results: list[Result | None]) -> list[Any]:
    """Return the results in short."""
    return [
        None if result is None else [result.error, result.seconds, result.text[-400:]]
        for result in results
    ]


def check_well(results: list[Result | None]) -> list[Result]:
    assert all(result is not None and not result.error for result in results), rows_of(results)
    return [result for result in results if result is not None]


def check_published(pair: Pair, results: list[Result | None]) -> None:
    """Check that a publish succeeded and that the server has the weights and runs."""
    well = check_well(results)
    url = pair.servers.now.url
    assert {result.state for result in well} == {"infer"}
    assert well[0].tokens == well[1].tokens
    assert requests.get(f"{url}/weight_info", timeout=30).json()["weight_version"] == str(
        well[0].version
    )
    assert requests.get(f"{url}/is_paused", timeout=30).json()["is_paused"] is False


def check_failed(results: list[Result | None], most_seconds: float) -> None:
    """Check that every trainer raised in time and has its training state."""
    for result in results:
        assert result is not None, rows_of(results)
        assert result.error, rows_of(results)
        assert result.is_same, (result.state, rows_of(results))
        assert result.state == "train"
        assert result.seconds < most_seconds, rows_of(results)


def check_whole_or_silent(status: Values) -> None:
    """Check that a server has whole weights, or stays paused and gives the reason."""
    code, reason = status["resume"]
    if code == 200:
        assert status["weight_info_then"] != "none", status
        assert status["draws"] is True, status
        return
    assert status["weight_info"] == "none", status
    assert "weights" in reason, status
    assert status["is_paused"] is True, status
    assert status["is_paused_then"] is True, status
    assert status["draws"] is False, status


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("who", PROCESSES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_of_the_server_fails(pair: Pair, moment: str, who: str, how: str) -> None:
    results = publish_twice(pair, how, Fault(moment, how, pids=pair.servers.pids(who)))
    check_failed(results, KILLED if how == "kill" and who == "Worker" else STOPPED)


@pytest.mark.parametrize("how", ["raise", "kill", "stop"])
def test_a_worker_fails_in_its_commit(pair: Pair, how: str) -> None:
    fail_in_commit(pair.servers.directory, how)
    # Trainers that have passed the fence wait in the next agreement for the process that ended.
    check_failed(publish_twice(pair, how), KILLED if how == "raise" else STOPPED)


def publish_twice(pair: Pair, how: str, fault: Fault | None = None) -> list[Result | None]:
    """Return the results of a publish in which the server fails.

    Checks that the next publish succeeds, to a new server if the old one is gone.
    """
    servers = pair.servers
    trainers = pair.trainers
    check_well(trainers.do("train"))
    stopped = servers.pids("Worker") if fault is None else fault.pids
    results = trainers.do("publish", fault)
    status = None
    if how == "kill":
        time.sleep(5)  # vLLM ends its remaining processes.
        servers.renew()
    else:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        status = status_of(servers.now)
        if not servers.is_up():
            status = None
            servers.renew()
    check_well(trainers.do("train"))
    again = trainers.do("publish")
    if status is not None:
        check_whole_or_silent(status)
    check_published(pair, again)
    check_well(trainers.do("withdraw"))
    pair.is_well = True
    return results


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_raises(pair: Pair, rank: int) -> None:
    """Both trainers raise at once and stay connected; the server survives without weights."""
    check_well(pair.trainers.do("train"))
    results = pair.trainers.do("publish", Fault("within", "raise", rank))
    status = status_of(pair.servers.now)
    check_published(pair, pair.trainers.do("publish"))
    check_well(pair.trainers.do("withdraw"))
    pair.is_well = True
    check_whole_or_silent(status)
    check_failed(results, KILLED)
    assert all("no memory for 3 GB" in str(result) for result in results)


@pytest.fixture
def free_server(servers: Servers, pairs: Pairs) -> Server:
    """The running server, without trainers that occupy it."""
    pairs.close()
    if not servers.is_up():
        servers.renew()
    return servers.now


LOST = [
    *(("publish", moment, how, 1) for moment in MOMENTS for how in ("kill", "stop")),
    *(("withdraw", moment, "kill", 1) for moment in ("before", "after")),
    *(("publish", moment, "kill", 0) for moment in MOMENTS),
]
"""Action, moment and kind of the fault, and its rank; rank 0 calls the server."""


@pytest.mark.parametrize(("action", "moment", "how", "rank"), LOST)
def test_a_trainer_is_lost(
    model: str,
    servers: Servers,
    free_server: Server,
    tmp_path: Path,
    rank: int,
    moment: str,
    how: str,
    action: str,
) -> None:
    """The other trainer ends; the server survives and accepts the weights of new trainers."""
    processes = free_server.processes()
    with Trainers(tmp_path / "lost", model, free_server.url) as trainers:
        pair = Pair(servers, trainers)
        if action == "withdraw":
            check_published(pair, trainers.do("publish"))
        results = trainers.do(action, Fault(moment, how, rank))
        trainers.wait_for_end(1 - rank, 2 * STOPPED)
        beside_the_lost = status_of(free_server)
    at_last = status_of(free_server)
    assert [left for pid in trainers.pids for left in processes_of(pid)] == []
    assert free_server.processes() == processes
    with Trainers(tmp_path / "new", model, free_server.url) as others:
        Pair(servers, others)
    check_whole_or_silent(beside_the_lost)
    check_whole_or_silent(at_last)
    other = results[1 - rank]
    if other is not None:  # Otherwise a thread of it ended it and reported the reason.
        assert other.error, other
        assert other.seconds < (STOPPED if how == "stop" else KILLED)


def test_new_trainers_fail_after_taking_the_weights_of_a_running_server(
    model: str, servers: Servers, free_server: Server, tmp_path: Path
) -> None:
    """New trainers withdraw the weights of killed trainers from the running server, then fail."""
    with Trainers(tmp_path / "lost", model, free_server.url) as trainers:
        check_published(Pair(servers, trainers), trainers.do("publish"))
        for pid in trainers.pids:
            os.kill(pid, signal.SIGKILL)
        left_alone = status_of(free_server)
    assert left_alone["resume"][0] == 200
    check_whole_or_silent(left_alone)
    with Trainers(tmp_path / "new", model, free_server.url) as others:
        check_well(others.do("train"))
        results = others.do("publish", Fault("within", "raise", 1))
        assert draws_tokens(free_server) is False
        check_whole_or_silent(status_of(free_server))
        check_failed(results, KILLED)
        check_well(others.do("publish"))
        others.do("withdraw")


def test_one_of_two_workers_raises(model: str, tmp_path: Path) -> None:
    """Later replies of the workers belong to later requests of the engine core."""
    servers = Servers(model, tmp_path, "--tensor-parallel-size", "2")
    with (
        contextlib.closing(servers),
        Trainers(tmp_path / "trainers", model, servers.now.url) as trainers,
    ):
        Pair(servers, trainers)
        fail_in_commit(tmp_path, "raise")
        check_failed(trainers.do("publish"), KILLED)
        check_whole_or_silent(status_of(servers.now))
        check_well(trainers.do("publish"))
        assert len({checksums(servers.now) for _ in range(3)}) == 1
        trainers.do("withdraw")
        assert status_of(servers.now)["draws"] is False


def checksums(server: Server) -> str:
    """Return the checksums of all workers' weights."""
    response = requests.post(
        f"{server.url}/weight_checker", json={"action": "checksum"}, timeout=30
    )
    return str(sorted(response.json()["checksums"].items())) if response.ok else response.text[:200]
