"""`release_weights: false`: a server keeps its weights while trainers train, with bounded lag.

Two trainers, a publisher and the worker of a server in a separate process are real; the engines on
both sides are fakes. test_requests.py has real servers that generate meanwhile.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, closing
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.training_side import GuardedState
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import LostRankError, ServerError, StateError
from hybrid_engine.memory.offload_items import Kind, Part
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.clients import Server
from hybrid_engine.serving.invitation import NO_VERSION, Invitation, Update
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.serving.receiver import WeightReceiver
from hybrid_engine.switch.states import State
from tests.harness.launch import of_all_ranks, on_ranks
from tests.harness.values import Values
from tests.hybrid_engine.serving.test_sides import NoWorkers
from tests.hybrid_engine.switch.fakes import (
    SHAPES,
    FakeInference,
    FakeTraining,
    Script,
    ScriptedOffloader,
    canonical,
)

NUM_TRAINERS = 2


class MarkedInference(FakeInference):
    """Creates the file `held` while its weights are allocated."""

    keeps_memory = False

    def __init__(self, script: Script, held: Path) -> None:
        super().__init__(script, 0)
        self._held = held

    def release(self, keep: Collection[str] = ()) -> None:
        super().release(keep)
        if not self.live:
            self._held.unlink(missing_ok=True)

    def finish_fill(self) -> None:
        super().finish_fill()
        self._held.touch()

    def take_place(self, rank: int, *, keeps_memory: bool) -> None:
        self.rank = rank
        self.keeps_memory = keeps_memory


class FakeServer:
    """A server of one worker that can pause and reports its version, like vLLM behind the gate.

    Args:

        held: file that exists while the server's weights are allocated.
    """

    describe = NoWorkers.describe

    def __init__(self, held: Path) -> None:
        self.script = Script()
        self.weights = MarkedInference(self.script, held)
        self.receiver = WeightReceiver(self.weights, self.weights, 0, torch.device("cpu"))
        self.is_paused = True
        self.version = NO_VERSION

    def num_workers(self) -> int:
        return 1

    def init_weight_transfer_engine(self, init_info: Values) -> None:
        self.receiver.join(Invitation.read(init_info))

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Values) -> None:
        self.script.reach("update")
        assert self.is_paused
        self.receiver.switch(Update.read(update_info))

    def finish_weight_update(self, weight_version: str) -> None:
        self.version = weight_version

    def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    def pause(self, mode: str, clear_cache: bool) -> None:
        self.script.reach("pause")
        assert clear_cache
        self.is_paused = True

    def resume(self) -> None:
        obstacle = self.receiver.obstacle()
        if obstacle:
            raise StateError(obstacle)
        self.is_paused = False
        self.version = str(self.receiver.version)

    def arm(self, call: str) -> None:
        self.script.arm(call, MemoryError(f"no memory in {call}"))

    def compute_in(self, dtype: str) -> None:
        self.weights.dtype = dtype

    def observe(self) -> Values:
        """Return the server's state: version in use (None while paused) and versions of tensors."""
        versions = {}
        for name, flat in self.weights.live.items():
            tensor = flat.view(SHAPES[name])
            versions[name] = [
                number for number in range(40) if torch.equal(tensor, canonical(name, number))
            ]
        return {
            "version": None if self.is_paused else self.version,
            "holds": self.receiver.holds.name,
            "weights": versions,
            "keeps": self.weights.keeps_memory,
        }


def serve(listener: Listener, path: str) -> None:
    """Execute the caller's calls until it sends null."""
    server = FakeServer(Path(path).with_suffix(".held"))
    with listener, listener.accept() as caller:
        while (call := json.loads(caller.recv_bytes())) is not None:
            name, arguments = call
            try:
                reply = {"result": getattr(server, name)(**arguments)}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            caller.send_bytes(json.dumps(reply).encode())
    server.receiver.leave()


class Caller(Server):
    """Client of a `FakeServer` in another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # an abandoned update may still be running

    def num_workers(self) -> int:
        return int(self._call("num_workers"))

    def _call(self, name: str, has_timeout: bool = True, **fields: Any) -> Any:
        with self._lock:
            self._connection.send_bytes(json.dumps([name, fields]).encode())
            reply = json.loads(self._connection.recv_bytes())
        if "error" in reply:
            raise ServerError(reply["error"])
        return reply["result"]

    observe = functools.partialmethod(_call, "observe")
    arm = functools.partialmethod(_call, "arm")
    compute_in = functools.partialmethod(_call, "compute_in")


class PartsOffloader(ScriptedOffloader):
    """Can also fail while it offloads parts behind a bucket."""

    def offload_parts(self, kind: Kind, parts: Iterable[Part]) -> int:
        self.script.reach("offload part")
        return super().offload_parts(kind, parts)


class Trainers:
    """A trainer with the parts of its publisher."""

    def __init__(self, caller: Caller | None, job: Job, path: str) -> None:
        self.path = path
        self.caller = caller
        self.job = job
        self.script = Script()
        self.training = FakeTraining(self.script, job.rank, NUM_TRAINERS, elastic=True)
        self.offloader = PartsOffloader(self.script, self.training)

    def publisher(self, **settings: Any) -> WeightPublisher:
        config = GenerateConfig(
            bucket_mb=1, timeout_seconds=60, **{"release_weights": False, **settings}
        )
        servers = [self.caller or object()]
        return WeightPublisher(
            self.training, servers, config=config, job=self.job, offloader=self.offloader
        )

    def step(self, publisher: WeightPublisher) -> str:
        """Train one step; return the error if it is refused, "" otherwise."""
        with publisher.train_context():
            try:
                self.training.before_step()
            except StateError as error:
                return str(error)
            self.training.step()
        return ""

    def publish(self, publisher: WeightPublisher) -> str:
        """Publish the weights; return the error if it fails, "" otherwise."""
        try:
            publisher.publish()
        except Exception as error:
            assert publisher.state is State.TRAIN
            self.training.assert_unchanged()
            return f"{type(error).__name__}: {error}"
        return ""

    def observe(self) -> Values:
        """Return the server's state, on all trainers."""
        self.job.agreement.conclude("looking")
        return of_all_ranks(self.caller and self.caller.observe())[0]

    def arm(self, who: str, call: str) -> None:
        if who == "server" and self.caller is not None:
            self.caller.arm(call=call)
        elif who == f"trainer {self.job.rank}":
            self.script.arm(call, MemoryError(f"no memory in {call}"))
        self.job.agreement.conclude("arming")


def on_trainers(body: Callable[..., None]) -> Callable[..., None]:
    """Run the decorated test on each trainer, beside a server; its first argument: `Trainers`."""

    def on_rank(tmp_path: Path, **arguments: Any) -> None:
        run_with_server(str(tmp_path / "server"), functools.partial(body, **arguments))

    parameters = dict(inspect.signature(body).parameters)
    parameters["trainers"] = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    on_rank.__signature__ = inspect.Signature([*parameters.values()])
    on_rank.__name__ = on_rank.__qualname__ = body.__name__
    on_rank.__module__ = body.__module__
    return on_ranks(NUM_TRAINERS + 1, timeout=400)(on_rank)


def run_with_server(path: str, act: Callable[[Trainers], None]) -> None:
    store, rank, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(path, store)
    if rank == NUM_TRAINERS:
        listener = Listener(path, "AF_UNIX")
        store.set("listening", "")  # rank 0 may connect
        serve(listener, path)
        return
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_TRAINERS)
    with ExitStack() as ends:
        ends.callback(dist.destroy_process_group)
        caller = None
        if rank == 0:
            store.wait(["listening"])
            connection = ends.enter_context(Client(path, "AF_UNIX"))
            caller = Caller(connection)
            ends.callback(lambda: connection.send_bytes(b"null"))  # ends `serve`
        job = ends.enter_context(closing(Job.join(60)))
        act(Trainers(caller, job, path))


BEFORE = "before the first byte"
WITHIN = "after the first byte"
FAULTS = {
    ("trainer 1", "prepare"): BEFORE,
    ("trainer 0", "check"): BEFORE,
    ("trainer 1", "offload optimizer"): BEFORE,
    ("trainer 0", "offload part"): WITHIN,
    ("server", "allocate second"): WITHIN,
    ("server", "commit second"): WITHIN,
    ("server", "wake"): WITHIN,
}
"""(participant, call that fails) -> moment of the failure."""


@on_trainers
def test_a_failure_leaves_the_previous_version_or_none(trainers: Trainers) -> None:
    """The next publish fills the server; until then no step exceeds the bound."""
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""
        for (who, call), moment in FAULTS.items():
            assert trainers.step(publisher) == ""
            version = trainers.training.version
            before = trainers.observe()
            assert before == state_with(version - 1)
            trainers.arm(who, call)
            assert f"no memory in {call}" in trainers.publish(publisher)
            after = trainers.observe()
            if moment is BEFORE:
                assert after == before, call
            else:
                assert (after["version"], after["holds"], after["weights"]) == (
                    None,
                    "EMPTY",
                    {},
                ), call
            refused = trainers.step(publisher)
            assert f"version {version + 1} " in refused
            assert f"version {version - 1}: " in refused
            assert trainers.training.version == version
            assert trainers.publish(publisher) == ""
            assert trainers.observe() == state_with(version), call


@on_trainers
def test_a_server_lost_by_one_trainer_is_lost_by_all(trainers: Trainers) -> None:
    """Lose a server on one trainer while the other has completed the switch."""
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""
        assert trainers.step(publisher) == ""
        manager = publisher._manager
        enter = manager.enter

        def enter_and_lose(target: State) -> None:
            enter(target)
            raise LostRankError("rank 2 has ended")

        if trainers.job.rank == 1:
            manager.enter = enter_and_lose  # type: ignore[method-assign]
        failure = trainers.publish(publisher)
        if trainers.job.rank == 1:
            assert failure.startswith(
                "ServerError: a server was lost in a switch; training state is on the device"
            )
        else:
            of_the_other = "rank 1: LostRankError: rank 2 has ended"
            assert (
                failure
                == f"RemoteError: the switch with the servers failed on 1 rank(s):\n{of_the_other}"
            )
        assert trainers.publish(publisher) == ""
        assert trainers.observe() == state_with(1)


def state_with(version: int) -> Values:
    """Return the state of a server that generates with the weights of `version`."""
    weights = {name: [version] for name in SHAPES}
    return {"version": str(version), "holds": "FILLED", "weights": weights, "keeps": True}


@pytest.mark.parametrize("most", [1, 3])
@on_trainers
def test_the_lag_never_exceeds_its_bound(trainers: Trainers, most: int) -> None:
    """Train until a step is refused, after each of three publishes."""
    with closing(trainers.publisher(server_max_lag=most)) as publisher:
        trainers.step(publisher)  # no server generates yet
        for _ in range(3):
            assert trainers.publish(publisher) == ""
            assert publisher.publish() is None
            lags = []
            for _ in range(2 * most):
                if trainers.step(publisher):
                    break
                publisher.require_drawing()
                lags.append(trainers.training.version - int(trainers.observe()["version"]))
            assert lags == [*range(1, most + 1)]
    trainers.training.before_step()  # without a publisher there is no bound


@on_trainers
def test_a_server_generates_until_other_trainers_write(trainers: Trainers) -> None:
    """Publish by a second publisher, which fails first."""
    with closing(trainers.publisher()) as publisher:
        trainers.publish(publisher)
    assert trainers.observe() == state_with(0)
    with closing(trainers.publisher()) as publisher:
        trainers.step(publisher)
        trainers.arm("trainer 1", "prepare")
        assert "no memory" in trainers.publish(publisher)
        assert trainers.observe() == state_with(0)
        assert trainers.publish(publisher) == ""
        assert trainers.observe() == state_with(1)


@on_trainers
def test_weights_are_rounded_only_with_compress_reshard(trainers: Trainers) -> None:
    if trainers.caller is not None:
        trainers.caller.compute_in(dtype="bfloat16")
    with closing(trainers.publisher()) as publisher:
        refused = trainers.publish(publisher)
    assert (
        "are float32 in training and bfloat16 in the servers: start the servers "
        "with --dtype float32" in refused
    )
    with closing(trainers.publisher(compress_reshard=True)) as publisher:
        assert trainers.publish(publisher) == ""
    if trainers.caller is not None:
        trainers.caller.compute_in(dtype="float32")
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""


class Stepped(GuardedState):
    """State of as many optimizers as parameters; a step runs all of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(number)]
        self.optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]
        self.watch([], self.optimizers)
        for parameter in parameters:
            parameter.grad = torch.ones(2)


@pytest.mark.parametrize("number", [1, 3])
def test_a_step_of_several_optimizers_is_checked_once(number: int) -> None:
    """No optimizer is refused after another has stepped."""
    state = Stepped(number)
    checks = []
    state.before_step = lambda: checks.append(0)
    for step in range(1, 4):
        for optimizer in state.optimizers:
            optimizer.step()
            assert len(checks) == step

    def refuse() -> None:
        raise StateError("too far ahead")

    state.before_step = refuse
    with pytest.raises(StateError, match="too far ahead"):
        state.optimizers[0].step()
    for optimizer in state.optimizers:
        assert all((group["params"][0] == -3).all() for group in optimizer.param_groups)


def test_a_replaced_optimizer_is_checked_too() -> None:
    state = Stepped(1)
    checks = []
    state.before_step = lambda: checks.append(0)
    state.optimizers[0].step()
    later = torch.optim.SGD(state.optimizers[0].param_groups[0]["params"], lr=1.0)
    state.watch([], [later])
    later.step()
    assert len(checks) == 2
