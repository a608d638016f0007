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
from collections.abc import Callable, Iterator
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
        options: Values = {"environment": faulty(self.directory), "port": self._port}
        self.now = self._ends.enter_context(serving(model, directory, *FILLED, *PLAIN, *arguments, **options))
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
            trainers = self._ends.enter_context(Trainers(directory, self._model, self._servers.now.url))
            self._pair = Pair(self._servers, trainers)
        return self._pair

    def close(self) -> None:
        pids: list[int] = [] if self._pair is None else self._pair.trainers.pids
        self._pair = None
        with contextlib.suppress(AssertionError):  # The trainers may be broken.
            self._ends.close()
        assert [left for pid in pids for left in processes_of(pid)] == []


def save_served_model(directory: Path) -> Path:
    """Write the model of all trainers; return its directory."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128, "eos_token_id": 9}
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
def pairs(model: str, servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
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
        now = {path.name for path in SHARED_MEMORY.iterdir() if path.name not in before and not is_mapped(path)}
        left = now if left is None else left & now
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.2)


def processes_of(session: int) -> list[int]:
    """Return the live processes of a session."""
    return [pid for pids in Server("", session, Path()).processes().values() for pid in pids]


def status_of(server: Server) -> Values:
    """Return replies of a server before and after a resume, and whether it draws tokens."""
    started = time.monotonic()
    status: Values = {}
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
    status["seconds"] = round(time.monotonic() - started, 1)
    status["draws"] = draws_tokens(server)
    return status


def draws_tokens(server: Server) -> bool | str:
    """Return True for a completion, False if the server does not respond, or else the error."""
    body: Values = {"prompt": [40, 41], "max_tokens": 2, "temperature": 0.0}
    try:
        response = requests.post(f"{server.url}/v1/completions", json=body, timeout=NO_TOKENS)
        return True if response.ok else response.text[:200]
    except requests.Timeout:
        return False
    except requests.RequestException as error:
        return type(error).__name__


def rows_of(results: list[Result | None]) -> list[Any]:
    """Return the results for the record."""
    return [None if result is None else [result.error, result.seconds, result.text[-400:]] for result in results]


def check_well(results: list[Result | None]) -> list[Result]:
    assert all(result is not None and not result.error for result in results), rows_of(results)
    return [result for result in results if result is not None]


def check_published(pair: Pair, results: list[Result | None]) -> None:
    """Check that a publish succeeded and that the server has the weights and runs."""
    well = check_well(results)
    url = pair.servers.now.url
    assert {result.state for result in well} == {"infer"}
    assert well[0].tokens == well[1].tokens
    assert requests.get(f"{url}/weight_info", timeout=30).json()["weight_version"] == str(well[0].version)
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
def test_a_process_of_the_server_fails(
    pair: Pair, record: Callable[..., None], moment: str, who: str, how: str
) -> None:
    fault = Fault(moment, how, pids=pair.servers.pids(who))
    results = publish_twice(pair, record, f"{moment}, {who}, {how}", how, fault)
    check_failed(results, KILLED if how == "kill" and who == "Worker" else STOPPED)


@pytest.mark.parametrize("how", ["raise", "kill", "stop"])
def test_a_worker_fails_in_its_commit(pair: Pair, record: Callable[..., None], how: str) -> None:
    fail_in_commit(pair.servers.directory, how)
    results = publish_twice(pair, record, f"commit, Worker, {how}", how)
    # Trainers that have passed the fence wait in the next agreement for the process that ended.
    check_failed(results, KILLED if how == "raise" else STOPPED)


def publish_twice(
    pair: Pair, record: Callable[..., None], name: str, how: str, fault: Fault | None = None
) -> list[Result | None]:
    """Return the results of a publish in which the server fails.

    Checks that the next publish succeeds, to a new server if the old one is gone.
    """
    servers = pair.servers
    trainers = pair.trainers
    check_well(trainers.do("train"))
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    server = servers.now
    stopped = servers.pids("Worker") if fault is None else fault.pids
    results = trainers.do("publish", fault)
    row: Values = {"fault": name, "trainers": rows_of(results)}
    try:
        if how == "kill":
            time.sleep(5)  # vLLM ends its remaining processes.
            row["processes left"] = sorted(server.processes())
            servers.renew()
            row["left by vLLM"] = left_in_shared_memory(names)
        else:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            row["server"] = status_of(server)
            if not servers.is_up():
                row["renewed"] = True
                servers.renew()
        started = time.monotonic()
        check_well(trainers.do("train"))
        again = trainers.do("publish")
        row["next publish"] = [rows_of(again), round(time.monotonic() - started, 1)]
    finally:
        print(row)
        record(**row)
    if "server" in row and "renewed" not in row:
        check_whole_or_silent(row["server"])
    check_published(pair, again)
    check_well(trainers.do("withdraw"))
    pair.is_well = True
    return results


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_raises(pair: Pair, record: Callable[..., None], rank: int) -> None:
    """Both trainers raise at once and stay connected; the server survives without weights."""
    check_well(pair.trainers.do("train"))
    results = pair.trainers.do("publish", Fault("within", "raise", rank))
    status = status_of(pair.servers.now)
    again = pair.trainers.do("publish")
    row = {
        "fault": f"within, trainer {rank}, raise",
        "trainers": rows_of(results),
        "server": status,
        "next": rows_of(again),
    }
    print(row)
    record(**row)
    check_published(pair, again)
    check_well(pair.trainers.do("withdraw"))
    pair.is_well = True
    check_whole_or_silent(status)
    check_failed(results, KILLED)
    assert all("no memory for 3 GB" in str(result) for result in results)


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
    pairs: Pairs,
    tmp_path: Path,
    record: Callable[..., None],
    rank: int,
    moment: str,
    how: str,
    action: str,
) -> None:
    """The other trainer ends; the server survives and accepts the weights of new trainers."""
    pairs.close()  # Their trainers occupy the server.
    if not servers.is_up():
        servers.renew()
    server = servers.now
    processes = server.processes()
    row: Values = {"fault": f"{moment}, trainer {rank}, {how}, {action}"}
    try:
        with Trainers(tmp_path / "lost", model, server.url) as trainers:
            pair = Pair(servers, trainers)
            if action == "withdraw":
                check_published(pair, trainers.do("publish"))
            results = trainers.do(action, Fault(moment, how, rank))
            row["trainers"] = rows_of(results)
            row["other ends after"] = trainers.seconds_to_end(1 - rank, 2 * STOPPED)
            row["server"] = status_of(server)
        row["server at last"] = status_of(server)
        pids = trainers.pids
        row["same processes"] = server.processes() == processes
        with Trainers(tmp_path / "new", model, server.url) as others:
            Pair(servers, others)
            row["next publish"] = "well"
    finally:
        print(row)
        record(**row)
    assert [left for pid in pids for left in processes_of(pid)] == []
    assert row["same processes"]
    assert row["next publish"] == "well"
    check_whole_or_silent(row["server"])
    check_whole_or_silent(row["server at last"])
    other = results[1 - rank]
    if other is not None:  # Otherwise a thread of it ended it and reported the reason.
        assert other.error, other
        assert other.seconds < (STOPPED if how == "stop" else KILLED)


def test_new_trainers_fail_after_taking_the_weights_of_a_running_server(
    model: str, servers: Servers, pairs: Pairs, tmp_path: Path, record: Callable[..., None]
) -> None:
    """New trainers withdraw the weights of killed trainers from the running server, then fail."""
    pairs.close()  # Their trainers occupy the server.
    if not servers.is_up():
        servers.renew()
    server = servers.now
    row: Values = {"fault": "rollout, all trainers, kill; within, new trainer 1, raise"}
    try:
        with Trainers(tmp_path / "lost", model, server.url) as trainers:
            pair = Pair(servers, trainers)
            check_published(pair, trainers.do("publish"))
            for pid in trainers.pids:
                os.kill(pid, signal.SIGKILL)
            row["left alone"] = status_of(server)
        with Trainers(tmp_path / "new", model, server.url) as others:
            check_well(others.do("train"))
            results = others.do("publish", Fault("within", "raise", 1))
            row["trainers"] = rows_of(results)
            row["draws"] = draws_tokens(server)
            row["server"] = status_of(server)
            again = others.do("publish")
            row["next publish"] = rows_of(again)
            others.do("withdraw")
    finally:
        print(row)
        record(**row)
    assert row["left alone"]["resume"][0] == 200
    check_whole_or_silent(row["left alone"])
    assert row["draws"] is False
    check_whole_or_silent(row["server"])
    check_failed(results, KILLED)
    check_well(again)


def test_one_of_two_workers_raises(model: str, tmp_path: Path, record: Callable[..., None]) -> None:
    """Later replies of the workers belong to later requests of the engine core."""
    servers = Servers(model, tmp_path, "--tensor-parallel-size", "2")
    row: Values = {"fault": "commit, one of two Workers, raise"}
    try:
        with Trainers(tmp_path / "trainers", model, servers.now.url) as trainers:
            Pair(servers, trainers)
            fail_in_commit(tmp_path, "raise")
            results = trainers.do("publish")
            row["trainers"] = rows_of(results)
            row["server"] = status_of(servers.now)
            again = trainers.do("publish")
            row["next publish"] = rows_of(again)
            row["checksums"] = [checksums(servers.now) for _ in range(3)]
            row["withdrawn"] = rows_of(trainers.do("withdraw"))
            row["server then"] = status_of(servers.now)
    finally:
        print(row)
        record(**row)
        servers.close()
    check_failed(results, KILLED)
    check_whole_or_silent(row["server"])
    check_well(again)
    assert len(set(row["checksums"])) == 1
    assert row["server then"]["draws"] is False


def checksums(server: Server) -> str:
    """Return the checksums of all workers' weights."""
    response = requests.post(f"{server.url}/weight_checker", json={"action": "checksum"}, timeout=30)
    return str(sorted(response.json()["checksums"].items())) if response.ok else response.text[:200]
