"""Trainers and a vLLM server that fail in a publish, by moment, process and kind: who hears of it, and what follows.

Whatever happens, trainers keep their training state to the bit and the next publish goes well: to the same server where
it lives, else to one that was started anew on its port. A server outlives the trainers, draws no token without whole
weights, and takes those of others.
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
from tests.harness.vllm_server import FILLED, PLAIN, Server, serving
from tests.zoo.tiny_models import save_model
from tests.zoo.tokenizers import save_numbers

pytestmark = [pytest.mark.faults, pytest.mark.engines]

MOMENTS = ("before", "within", "after")
KILLED, STOPPED = 15.0, TIMEOUT + 25
"""Most seconds until every trainer has raised. A server whose engine core was killed answers nothing; nor do those that
were forked from an API server that was killed, and keep its port."""
PROCESSES = ("Worker", "EngineCor", "APIServer")
SHARED_BY_VLLM = ("psm_", "vllm_dist_")
"""Of Python's shared memory and of workers' collectives, which nobody removes who was killed."""
NO_TOKENS = 3.0
"""Seconds in which a server that is paused answers nothing."""


class Servers:
    """One server on one port: the present one, or one started anew."""

    def __init__(self, model: str, directory: Path, *arguments: str) -> None:
        self.directory, self._arguments = directory, (model, *arguments)
        self._number, self._port = 0, 0
        self._ends = ExitStack()
        self.now = self._start()

    def _start(self) -> Server:
        model, *arguments = self._arguments
        place, environment = self.directory / f"server{self._number}", faulty(self.directory)
        self._number += 1
        starting = serving(model, place, *FILLED, *PLAIN, *arguments, environment=environment, port=self._port)
        self.now = self._ends.enter_context(starting)
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
        is_well: the last case ended as it should; else the next one has others.
    """

    def __init__(self, servers: Servers, trainers: Trainers) -> None:
        self.servers, self.trainers, self.is_well = servers, trainers, True
        check_well(trainers.do("train"))
        check_published(self, trainers.do("publish"))
        check_well(trainers.do("withdraw"))


class Pairs:
    """Gives each case the pair of the one before it, unless that was spoiled."""

    def __init__(self, model: str, servers: Servers, directory: Path) -> None:
        self._model, self._servers, self._directory, self._number = model, servers, directory, 0
        self._ends = ExitStack()
        self._pair: Pair | None = None

    def get(self) -> Pair:
        if self._pair is None or not self._pair.is_well:
            self.close()
            if not self._servers.is_up():
                self._servers.renew()
            place = self._directory / f"trainers{self._number}"
            self._number += 1
            trainers = self._ends.enter_context(Trainers(place, self._model, self._servers.now.url))
            self._pair = Pair(self._servers, trainers)
        return self._pair

    def close(self) -> None:
        pids: list[int] = [] if self._pair is None else self._pair.trainers.pids
        self._pair = None
        with contextlib.suppress(AssertionError):  # of trainers that cannot go on
            self._ends.close()
        assert [left for pid in pids for left in processes_of(pid)] == []


def save_served_model(directory: Path) -> Path:
    """Write the model that all publish; returns the directory."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 128, "eos_token_id": 9}
    path = save_model(directory, "qwen2", **sizes)
    save_numbers(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_served_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def servers(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    found = Servers(model, tmp_path_factory.mktemp("servers"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def pairs(model: str, servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    found = Pairs(model, servers, tmp_path_factory.mktemp("pairs"))
    yield found
    found.close()


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    found = pairs.get()
    found.is_well = False
    return found


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Nothing new is in /dev/shm but what vLLM's own processes leave there when they are killed."""
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    yield
    left = [name for name in left_in_shared_memory(before) if not name.startswith(SHARED_BY_VLLM)]
    assert left == []


def left_in_shared_memory(before: set[str]) -> list[str]:
    """New names that no process has mapped, for as long as one looks: those of other tests come and go."""
    deadline, left = time.monotonic() + 5, None
    while True:
        now = {path.name for path in SHARED_MEMORY.iterdir() if path.name not in before and not is_mapped(path)}
        left = now if left is None else left & now
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.2)


def processes_of(session: int) -> list[int]:
    """Those of a session that live."""
    return [pid for pids in Server("", session, Path()).processes().values() for pid in pids]


def seen(server: Server) -> dict[str, Any]:
    """What a server says of itself, how long it takes to say it, and whether it draws tokens."""
    started, said = time.monotonic(), dict[str, Any]()
    asked = (("GET", "weight_info"), ("GET", "is_paused"))
    for method, route in (*asked, ("POST", "resume"), *asked):
        try:
            response = requests.request(method, f"{server.url}/{route}", timeout=STOPPED)
            key = f"{route}_then" if route in said else route
            said[key] = (
                [response.status_code, response.text[:300]]
                if route == "resume"
                else next(iter(response.json().values()))
            )
        except requests.RequestException as error:
            said[route] = type(error).__name__
    said["seconds"] = round(time.monotonic() - started, 1)
    said["draws"] = draws_tokens(server)
    return said


def draws_tokens(server: Server) -> bool | str:
    """Whether a completion comes; else what is wrong, or False where it waits."""
    body: dict[str, Any] = {"prompt": [40, 41], "max_tokens": 2, "temperature": 0.0}
    try:
        response = requests.post(f"{server.url}/v1/completions", json=body, timeout=NO_TOKENS)
        return True if response.ok else response.text[:200]
    except requests.Timeout:
        return False
    except requests.RequestException as error:
        return type(error).__name__


def told(results: list[Result | None]) -> list[Any]:
    """For the record."""
    return [None if each is None else [each.error, each.seconds, each.text[-400:]] for each in results]


def check_well(results: list[Result | None]) -> list[Result]:
    assert all(each is not None and not each.error for each in results), told(results)
    return [each for each in results if each is not None]


def check_published(pair: Pair, results: list[Result | None]) -> None:
    """It went well, and the server says so and draws tokens."""
    well, url = check_well(results), pair.servers.now.url
    assert {each.state for each in well} == {"infer"}
    assert well[0].tokens == well[1].tokens
    assert requests.get(f"{url}/weight_info", timeout=30).json()["weight_version"] == str(well[0].version)
    assert requests.get(f"{url}/is_paused", timeout=30).json()["is_paused"] is False


def check_failed(results: list[Result | None], most_seconds: float) -> None:
    """Every trainer raised in time, and is as it was."""
    for each in results:
        assert each is not None, told(results)
        assert each.error, told(results)
        assert each.is_same, (each.state, told(results))
        assert each.state == "train"
    assert all(each is not None and each.seconds < most_seconds for each in results), told(results)


def check_whole_or_silent(said: dict[str, Any]) -> None:
    """A server without whole weights is paused and stays so, and says why; one with them has their version."""
    status, why = said["resume"]
    if status == 200:
        assert said["weight_info_then"] != "none", said
        assert said["draws"] is True, said
        return
    assert said["weight_info"] == "none", said
    assert "weights" in why, said
    assert said["is_paused"] is True, said
    assert said["is_paused_then"] is True, said
    assert said["draws"] is False, said


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("who", PROCESSES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_of_the_server(pair: Pair, record: Callable[..., None], moment: str, who: str, how: str) -> None:
    fault = Fault(moment, how, pids=pair.servers.pids(who))
    results = publish_twice(pair, record, f"{moment}, {who}, {how}", how, fault)
    check_failed(results, KILLED if how == "kill" and who == "Worker" else STOPPED)


@pytest.mark.parametrize("how", ["raise", "kill", "stop"])
def test_a_worker_in_its_commit(pair: Pair, record: Callable[..., None], how: str) -> None:
    fail_in_commit(pair.servers.directory, how)
    results = publish_twice(pair, record, f"commit, Worker, {how}", how)
    # trainers that have left the fence wait for the process that ended in the agreement after it
    check_failed(results, KILLED if how == "raise" else STOPPED)


def publish_twice(
    pair: Pair, record: Callable[..., None], name: str, how: str, fault: Fault | None = None
) -> list[Result | None]:
    """What came of a publish in which the server fails; the next one goes well, to a new server where it is gone."""
    servers, trainers = pair.servers, pair.trainers
    check_well(trainers.do("train"))
    names, server = {path.name for path in SHARED_MEMORY.iterdir()}, servers.now
    stopped = servers.pids("Worker") if fault is None else fault.pids
    results = trainers.do("publish", fault)
    row: dict[str, Any] = {"fault": name, "trainers": told(results)}
    try:
        if how == "kill":
            time.sleep(5)  # for vLLM to end what is left of itself
            row["processes left"] = sorted(server.processes())
            servers.renew()
            row["left by vLLM"] = left_in_shared_memory(names)
        else:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            row["server"] = seen(server)
            if not servers.is_up():
                row["renewed"] = True
                servers.renew()
        started = time.monotonic()
        check_well(trainers.do("train"))
        again = trainers.do("publish")
        row["next publish"] = [told(again), round(time.monotonic() - started, 1)]
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
    """All raise at once, the server lives on without weights, and both are still in one job."""
    check_well(pair.trainers.do("train"))
    results = pair.trainers.do("publish", Fault("within", "raise", rank))
    said = seen(pair.servers.now)
    again = pair.trainers.do("publish")
    row = {"fault": f"within, trainer {rank}, raise", "trainers": told(results), "server": said, "next": told(again)}
    print(row)
    record(**row)
    check_published(pair, again)
    check_well(pair.trainers.do("withdraw"))
    pair.is_well = True
    check_whole_or_silent(said)
    check_failed(results, KILLED)
    assert all("no memory for 3 GB" in str(each) for each in results)


LOST = [
    *(("publish", moment, how, 1) for moment in MOMENTS for how in ("kill", "stop")),
    *(("withdraw", moment, "kill", 1) for moment in ("before", "after")),
    *(("publish", moment, "kill", 0) for moment in MOMENTS),
]
"""What is done, when it happens, what happens, and to which trainer; the first one calls the server."""


@pytest.mark.parametrize(("what", "moment", "how", "rank"), LOST)
def test_a_trainer_is_lost(
    model: str,
    servers: Servers,
    pairs: Pairs,
    tmp_path: Path,
    record: Callable[..., None],
    rank: int,
    moment: str,
    how: str,
    what: str,
) -> None:
    """The other one ends, the server lives on, and takes the weights of new trainers."""
    pairs.close()  # whose trainers have the server
    if not servers.is_up():
        servers.renew()
    server, pid = servers.now, servers.now.processes()
    row: dict[str, Any] = {"fault": f"{moment}, trainer {rank}, {how}, {what}"}
    try:
        with Trainers(tmp_path / "lost", model, server.url) as trainers:
            pair = Pair(servers, trainers)
            if what == "withdraw":
                check_published(pair, trainers.do("publish"))
            results = trainers.do(what, Fault(moment, how, rank))
            row["trainers"] = told(results)
            row["other ends after"] = trainers.seconds_to_end(1 - rank, 2 * STOPPED)
            row["server"] = seen(server)
        row["server at last"] = seen(server)
        pids = trainers.pids
        row["same processes"] = server.processes() == pid
        with Trainers(tmp_path / "new", model, server.url) as others:
            Pair(servers, others)
            row["next publish"] = "well"
    finally:
        print(row)
        record(**row)
    assert [left for each in pids for left in processes_of(each)] == []
    assert row["same processes"]
    assert row["next publish"] == "well"
    check_whole_or_silent(row["server"])
    check_whole_or_silent(row["server at last"])
    other = results[1 - rank]
    if other is not None:  # else it was ended: a thread of it says why
        assert other.error, other
        assert other.seconds < (STOPPED if how == "stop" else KILLED)


def test_trainers_of_a_server_that_draws_tokens_fail(
    model: str, servers: Servers, pairs: Pairs, tmp_path: Path, record: Callable[..., None]
) -> None:
    """It went on with the weights of trainers that are gone; then new ones took them away, and could give it none."""
    pairs.close()  # whose trainers have the server
    if not servers.is_up():
        servers.renew()
    server, row = servers.now, dict[str, Any](fault="rollout, all trainers, kill; within, new trainer 1, raise")
    try:
        with Trainers(tmp_path / "lost", model, server.url) as trainers:
            pair = Pair(servers, trainers)
            check_published(pair, trainers.do("publish"))
            for pid in trainers.pids:
                os.kill(pid, signal.SIGKILL)
            row["left alone"] = seen(server)
        with Trainers(tmp_path / "new", model, server.url) as others:
            check_well(others.do("train"))
            results = others.do("publish", Fault("within", "raise", 1))
            row["trainers"], row["draws"], row["server"] = told(results), draws_tokens(server), seen(server)
            again = others.do("publish")
            row["next publish"] = told(again)
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
    """What the engine core hears of its workers afterwards is what they answer then."""
    servers = Servers(model, tmp_path, "--tensor-parallel-size", "2")
    row: dict[str, Any] = {"fault": "commit, one of two Workers, raise"}
    try:
        with Trainers(tmp_path / "trainers", model, servers.now.url) as trainers:
            Pair(servers, trainers)
            fail_in_commit(tmp_path, "raise")
            results = trainers.do("publish")
            row["trainers"], row["server"] = told(results), seen(servers.now)
            again = trainers.do("publish")
            row["next publish"] = told(again)
            row["checksums"] = [checksums(servers.now) for _ in range(3)]
            row["withdrawn"] = told(trainers.do("withdraw"))
            row["server then"] = seen(servers.now)
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
    """What all workers say of their weights."""
    response = requests.post(f"{server.url}/weight_checker", json={"action": "checksum"}, timeout=30)
    return str(sorted(response.json()["checksums"].items())) if response.ok else response.text[:200]
