"""`release_weights: false`: a server that keeps its weights while trainers train, and the bound on its lag.

Two trainers, a publisher, and a worker of a server in a process of its own are real; the engines on both sides are
fakes. Real servers that draw tokens meanwhile: test_requests.py.
"""

from __future__ import annotations

import functools
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
from tests.harness.launch import Ranks
from tests.hybrid_engine.switch.fakes import SHAPES, FakeInference, FakeTraining, Script, ScriptedOffloader, canonical

NUM_TRAINERS = 2


class Placed(FakeInference):
    """Leaves a file while its weights are there: `held`."""

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
        self.rank, self.keeps_memory = rank, keeps_memory


class FakeServer:
    """A server of one worker: pauses, and says its version, as vLLM does behind the gate."""

    def __init__(self, held: Path) -> None:
        """`held`: a file that is there while its weights are."""
        self.script = Script()
        self.weights = Placed(self.script, held)
        self.receiver = WeightReceiver(self.weights, self.weights, 0, torch.device("cpu"))
        self.is_paused, self.version = True, NO_VERSION

    def num_workers(self) -> int:
        return 1

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.receiver.join(Invitation.read(init_info))

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
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
        if why := self.receiver.obstacle():
            raise StateError(why)
        self.is_paused, self.version = False, str(self.receiver.version)

    def arm(self, call: str) -> None:
        self.script.arm(call, MemoryError(f"no memory in {call}"))

    def compute_in(self, dtype: str) -> None:
        self.weights.dtype = dtype

    def look(self) -> dict[str, Any]:
        """The version that it draws with, None where it does not; and the versions that its weights are of."""
        drawn, live = None if self.is_paused else self.version, self.weights.live
        found = {
            name: [number for number in range(40) if torch.equal(flat.view(SHAPES[name]), canonical(name, number))]
            for name, flat in live.items()
        }
        return {"draws": drawn, "holds": self.receiver.holds.name, "found": found, "keeps": self.weights.keeps_memory}


def serve(listener: Listener, path: str) -> None:
    """Answer calls until there are no more."""
    server = FakeServer(Path(path).with_suffix(".held"))
    with listener, listener.accept() as caller:
        while (called := json.loads(caller.recv_bytes())) is not None:
            try:
                answer = {"answer": getattr(server, called[0])(**called[1])}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            caller.send_bytes(json.dumps(answer).encode())
    server.receiver.leave()


class Caller(Server):
    """Calls it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()  # an update that was left may still be open

    def num_workers(self) -> int:
        return int(self._call("num_workers"))

    def _call(self, name: str, has_timeout: bool = True, **fields: Any) -> Any:
        with self._lock:
            self._connection.send_bytes(json.dumps([name, fields]).encode())
            answer = json.loads(self._connection.recv_bytes())
        if "error" in answer:
            raise ServerError(answer["error"])
        return answer["answer"]

    look = functools.partialmethod(_call, "look")
    arm = functools.partialmethod(_call, "arm")
    compute_in = functools.partialmethod(_call, "compute_in")


class PartsOffloader(ScriptedOffloader):
    """Fails behind a bucket, too."""

    def offload_parts(self, kind: Kind, parts: Iterable[Part]) -> int:
        self.script.reach("offload part")
        return super().offload_parts(kind, parts)


class Trainers:
    """One of the trainers, and what it publishes by."""

    def __init__(self, caller: Caller | None, job: Job, path: str) -> None:
        self.path = path
        self.caller, self.job, self.script = caller, job, Script()
        self.training = FakeTraining(self.script, job.rank, NUM_TRAINERS, elastic=True)
        self.offloader = PartsOffloader(self.script, self.training)

    def publisher(self, **settings: Any) -> WeightPublisher:
        config = GenerateConfig(bucket_mb=1, timeout_seconds=60, **{"release_weights": False, **settings})
        servers = [self.caller or object()]
        return WeightPublisher(self.training, servers, config=config, job=self.job, offloader=self.offloader)

    def step(self, publisher: WeightPublisher) -> str:
        """Train by one step; says why not."""
        with publisher.train_context():
            try:
                self.training.before_step()
            except StateError as error:
                return str(error)
            self.training.step()
        return ""

    def publish(self, publisher: WeightPublisher) -> str:
        """Says what failed."""
        try:
            publisher.publish()
        except Exception as error:
            assert publisher.state is State.TRAIN
            self.training.assert_unchanged()
            return f"{type(error).__name__}: {error}"
        return ""

    def look(self) -> dict[str, Any] | None:
        self.job.agreement.conclude("looking")
        return None if self.caller is None else self.caller.look()

    def arm(self, who: str, call: str) -> None:
        if who == "server" and self.caller is not None:
            self.caller.arm(call=call)
        elif who == f"trainer {self.job.rank}":
            self.script.arm(call, MemoryError(f"no memory in {call}"))
        self.job.agreement.conclude("arming")


def with_a_server(path: str, act: Callable[..., Any], *args: Any) -> Any:
    """Run `act(Trainers, *args)` on each trainer beside a server, and return what it returned there."""
    store, rank, _ = next(dist.rendezvous("env://"))
    if rank == NUM_TRAINERS:
        listener = Listener(path, "AF_UNIX")
        store.set("listening", "")
        return serve(listener, path)
    dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=rank, world_size=NUM_TRAINERS)
    with ExitStack() as ends:
        caller = None
        if rank == 0:
            store.wait(["listening"])
            connection = ends.enter_context(Client(path, "AF_UNIX"))
            caller = Caller(connection)
            ends.callback(lambda: connection.send_bytes(b"null"))
        job = ends.enter_context(closing(Job.join(60)))
        return act(Trainers(caller, job, path), *args)


BEFORE, WITHIN = "before the first byte", "after it"
FAULTS = {
    ("trainer 1", "prepare"): BEFORE,
    ("trainer 0", "check"): BEFORE,
    ("trainer 1", "offload optimizer"): BEFORE,
    ("trainer 0", "offload part"): WITHIN,
    ("server", "allocate second"): WITHIN,
    ("server", "commit second"): WITHIN,
    ("server", "wake"): WITHIN,
}
"""Who fails in which of its calls -> when that is."""


def fail_in_each(trainers: Trainers) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""
        for who, call in FAULTS:
            assert trainers.step(publisher) == ""
            version = trainers.training.version
            training = trainers.look()
            trainers.arm(who, call)
            failed = trainers.publish(publisher)
            after, refused = trainers.look(), trainers.step(publisher)
            assert trainers.training.version == version
            again = trainers.publish(publisher)
            found[f"{who}, {call}"] = (version, training, failed, after, refused, again, trainers.look())
    return found


def test_a_failure_leaves_the_version_before_or_none(ranks: Ranks, tmp_path: Path) -> None:
    """The next publish fills the server; until then no step goes beyond the bound."""
    found, *_ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), fail_in_each, timeout=200)
    for (who, call), moment in FAULTS.items():
        version, training, failed, after, refused, again, at_last = found[f"{who}, {call}"]
        assert training == whole(version - 1), call
        assert f"no memory in {call}" in failed
        if moment is BEFORE:
            assert after == training, call
        else:
            assert (after["draws"], after["holds"], after["found"]) == (None, "EMPTY", {}), call
        assert f"version {version + 1} " in refused
        assert f"version {version - 1}: " in refused
        assert (again, at_last) == ("", whole(version)), call


def lose_at_the_end(trainers: Trainers) -> list[Any]:
    """A server is lost for one trainer where the other has come to the end of the switch."""
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""
        assert trainers.step(publisher) == ""
        manager = publisher._manager
        assert manager is not None
        enter = manager.enter

        def losing(target: State) -> None:
            enter(target)
            raise LostRankError("rank 2 has ended")

        if trainers.job.rank == 1:
            manager.enter = losing  # type: ignore[method-assign]  # of this object alone, which is not used again
        return [trainers.publish(publisher), trainers.publish(publisher), trainers.look()]


def test_what_one_trainer_has_lost_all_have(ranks: Ranks, tmp_path: Path) -> None:
    first, second, _ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), lose_at_the_end)
    assert first == [
        "RemoteError: the switch with the servers failed on 1 rank(s):\nrank 1: LostRankError: rank 2 has ended",
        "",
        whole(1),
    ]
    assert second[0].startswith("ServerError: a server was lost in a switch; training state is on the device")
    assert second[1] == ""


def whole(version: int) -> dict[str, Any]:
    """What is seen of a server that draws tokens with these weights."""
    return {"draws": str(version), "holds": "FILLED", "found": {name: [version] for name in SHAPES}, "keeps": True}


def fall_behind(trainers: Trainers, most: int) -> list[tuple[int, str]]:
    """Steps until one is refused, and so again after each publish; versions of trainers and server at each."""
    seen = []
    with closing(trainers.publisher(server_max_lag=most)) as publisher:
        trainers.step(publisher)  # nobody draws tokens yet
        for _ in range(3):
            assert trainers.publish(publisher) == ""
            assert publisher.publish() is None
            publisher.prefetch()
            for _ in range(2 * most):
                if trainers.step(publisher):
                    break
                publisher.require_drawing()
                look = trainers.look()
                seen.append((trainers.training.version, look and look["draws"]))
    trainers.training.before_step()  # there is no publisher any more
    return seen


@pytest.mark.parametrize("most", [1, 3])
def test_the_lag_never_passes_its_bound(ranks: Ranks, tmp_path: Path, most: int) -> None:
    seen, *_ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), fall_behind, most, timeout=200)
    assert [version - int(drawn) for version, drawn in seen] == [*range(1, most + 1)] * 3


def take_over(trainers: Trainers) -> list[Any]:
    """Other trainers fail in their first publish, and then do not; and others that take weights back."""
    seen = []
    with closing(trainers.publisher()) as publisher:
        trainers.publish(publisher)
    seen.append(trainers.look())
    with closing(trainers.publisher()) as publisher:
        trainers.step(publisher)
        trainers.arm("trainer 1", "prepare")
        assert "no memory" in trainers.publish(publisher)
        seen.append(trainers.look())
        assert trainers.publish(publisher) == ""
        seen.append(trainers.look())
    return seen


def test_a_server_draws_tokens_until_other_trainers_write(ranks: Ranks, tmp_path: Path) -> None:
    seen, *_ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), take_over, timeout=200)
    assert seen == [whole(0), whole(0), whole(1)]


def send_what_changed(trainers: Trainers) -> list[Any]:
    trainers.training.frozen = ("first",)
    seen = []
    with closing(trainers.publisher(incremental="auto")) as publisher:
        for fault in (None, None, ("trainer 1", "prepare"), ("server", "commit second"), None):
            if fault is not None:
                trainers.arm(*fault)
                said = trainers.publish(publisher)
                assert "no memory" in said, said
            assert trainers.publish(publisher) == ""
            report, look = publisher.last_report, trainers.look()
            assert report is not None
            seen.append((report.bytes_received, report.bytes_skipped, look and look["draws"], look and look["found"]))
            trainers.step(publisher)
    return seen


def test_only_what_changed_is_sent(ranks: Ranks, tmp_path: Path) -> None:
    """After a failure in a fill all is sent; after one before it, what changed."""
    seen, *_ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), send_what_changed, timeout=200)
    first, second = (4 * rows * columns for rows, columns in SHAPES.values())
    received = [(first + second, 0), (second, first), (second, first), (first + second, 0), (second, first)]
    versions = [(str(number), {"first": [0], "second": [number]}) for number in range(5)]
    assert seen == [(*sent, *said) for sent, said in zip(received, versions, strict=True)]


def send_deltas(trainers: Trainers) -> list[Any]:
    """With a step of all elements, or a write to a few, before each; another publisher joins in the end."""
    seen = []
    events = ("step", "write", "write", ("trainer 1", "prepare"), ("server", "commit second"), "write", "join", "write")
    with ExitStack() as ends:
        for event in events:
            if not seen or event == "join":
                ends.close()
                keys = {"incremental": "delta", "transport": "collective", "server_max_lag": 9}
                publisher = ends.enter_context(closing(trainers.publisher(**keys)))
            if event == "step":
                assert trainers.step(publisher) == ""
            with publisher.train_context():
                trainers.training.write()
            if isinstance(event, tuple):
                trainers.arm(*event)
                assert "no memory" in trainers.publish(publisher)
            assert trainers.publish(publisher) == ""
            report, look = publisher.last_report, trainers.look()
            assert report is not None
            seen.append(
                (event, report.messages_delta, report.messages_whole, report.bytes_received, look and look["draws"])
            )
    return seen


def test_a_delta_goes_to_a_server_that_is_known_to_have_the_last_message(ranks: Ranks, tmp_path: Path) -> None:
    """Failures before the fill change nothing of what it has; within it, and for who joins, all goes again."""
    seen, *_ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), send_deltas, timeout=200)
    for number, (event, deltas, whole, received, draws) in enumerate(seen):
        assert draws is not None
        is_whole = number == 0 or event in (("server", "commit second"), "join")
        assert (deltas == 0) is is_whole, event
        assert (whole > 0) is is_whole, event
        assert (received > 4096) is is_whole, event


def publish_to_one_that_rounds(trainers: Trainers, dtype: str) -> tuple[str, str, str]:
    if trainers.caller is not None:
        trainers.caller.compute_in(dtype=dtype)
    with closing(trainers.publisher()) as publisher:
        said = trainers.publish(publisher)
    with closing(trainers.publisher(compress_reshard=True)) as publisher:
        cast = trainers.publish(publisher)
    if trainers.caller is not None:
        trainers.caller.compute_in(dtype="float32")
    with closing(trainers.publisher()) as publisher:
        return said, cast, trainers.publish(publisher)


def test_weights_are_rounded_where_that_was_asked_for_alone(ranks: Ranks, tmp_path: Path) -> None:
    arguments = str(tmp_path / "server"), publish_to_one_that_rounds, "bfloat16"
    for said, *others in ranks.launch(with_a_server, NUM_TRAINERS + 1, *arguments)[:NUM_TRAINERS]:
        assert "are float32 in training and bfloat16 in the servers: start the servers with --dtype float32" in said
        assert others == ["", ""]


class Stepped(GuardedState):
    """As many parameters as optimizers; a step is of all of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(number)]
        self.optimizers = [torch.optim.SGD([each], lr=1.0) for each in parameters]
        self.watch([], self.optimizers)
        for each in parameters:
            each.grad = torch.ones(2)


@pytest.mark.parametrize("number", [1, 3])
def test_a_step_is_asked_for_once(number: int) -> None:
    """Where several optimizers take part in it, none is refused after another has stepped."""
    state, asked = Stepped(number), list[int]()
    state.before_step = lambda: asked.append(0)
    for step in range(1, 4):
        for optimizer in state.optimizers:
            optimizer.step()
            assert len(asked) == step

    def refuse() -> None:
        raise StateError("too far ahead")

    state.before_step = refuse
    with pytest.raises(StateError, match="too far ahead"):
        state.optimizers[0].step()
    assert all((group["params"][0] == -3).all() for each in state.optimizers for group in each.param_groups)


def test_an_optimizer_that_replaces_another_is_asked_for_too() -> None:
    state, asked = Stepped(1), list[int]()
    state.before_step = lambda: asked.append(0)
    state.optimizers[0].step()
    later = torch.optim.SGD(state.optimizers[0].param_groups[0]["params"], lr=1.0)
    state.watch([], [later])
    later.step()
    assert len(asked) == 2
