"""The gate of a server's engine core; tests/hybrid_engine/serving has real servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.server import probing
from hybrid_engine.backends.vllm.server.gate import close_gate
from hybrid_engine.errors import StateError
from tests.harness.errors import refused

pytestmark = pytest.mark.slow  # imports vLLM

OURS = "hybrid_engine"


class Engine:
    """The attributes of a worker's transfer engine that the gate uses."""

    def __init__(self) -> None:
        self.why = "no weights yet"
        self.job = ""
        self.version = -1
        self.is_uncompared = False
        self.receiver = self

    def obstacle(self, also_uncompared: bool = False) -> str:
        return "" if self.is_uncompared and also_uncompared else self.why

    def take_worker(self, worker: object) -> None:
        self.worker = worker


class Worker:
    def __init__(self) -> None:
        self.weight_transfer_engine = Engine()
        self.calls = list[str]()

    def __getattr__(self, name: str) -> Callable[..., str]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> str:
            self.calls.append(name)
            if kwargs.get("fails") is self:
                raise MemoryError("no memory in this worker")
            return name

        return call


class Wrapper:
    """vLLM's wrapper of a worker: reads from the worker, but keeps attributes that are set."""

    def __init__(self) -> None:
        self.worker = Worker()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class Executor:
    """Two workers. Like vLLM's executor it reads no answer after the first failure."""

    def __init__(self) -> None:
        self.workers = [Wrapper(), Wrapper()]
        self._answers: list[list[Any]] = [[], []]

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> list[Any]:
        for worker, answers in zip(self.workers, self._answers, strict=True):
            call = (
                (lambda *a, worker=worker, **k: method(worker, *a, **k))
                if callable(method)
                else getattr(worker, method)
            )
            try:
                answers.append(("", call(*args, **(kwargs or {}))))
            except Exception as error:
                answers.append((str(error), None))
        results = []
        for answers in self._answers:
            why, answer = answers.pop(0)
            if why:
                raise RuntimeError(why)
            results.append(answer)
        return results


class Scheduler:
    def __init__(self, running: list[str]) -> None:
        self.state = "drawing"
        self.running = running
        self.requests: dict[str, Any] = {}

    def set_pause_state(self, state: Any) -> None:
        self.state = state


class Core:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_executor = Executor()
        self.collective_rpc("update_max_model_len")
        assert self._initialize_kv_caches(vllm_config) == "blocks"
        self.scheduler = vllm_config.scheduler_config.get_scheduler_cls()(running=[])
        self.batch_queue = None
        self.output_queue = SimpleQueue[tuple[int, Any]]()

    def _initialize_kv_caches(self, vllm_config: object) -> str:
        return "blocks"

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def resume_scheduler(self) -> None:
        self.scheduler.state = "drawing"

    def set_weight_version(self, version: str) -> None:
        self._weight_version = version

    def _reset_caches(self) -> None:
        self.model_executor.collective_rpc("reset_encoder_cache")

    def is_scheduler_paused(self) -> bool:
        return self.scheduler.state != "drawing"

    def sleep(self, level: int = 1, mode: str = "abort") -> str:
        return f"asleep at {level}"

    def release_kv_cache_memory(self) -> str:
        return "released"

    def add_lora(self, request: object) -> str:
        return "added"

    def add_request(self, request: Any, wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            self.scheduler.requests.pop(name, None)

    def refused(self) -> dict[str, str]:
        """Return the requests refused since the last call, with the reasons."""
        reasons = {}
        while not self.output_queue.empty():
            client, outputs = self.output_queue.get()
            (output,) = outputs.outputs
            assert (client, outputs.finished_requests) == (7, {output.request_id})
            assert (output.new_token_ids, str(output.finish_reason)) == ([], "abort")
            reasons[output.request_id] = output.stop_reason
        return reasons


@pytest.fixture
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a core in a process with a closed gate; its load format is ours or the parameter."""
    kind = type("Core", (Core,), dict(vars(Core)))
    from hybrid_engine.backends.vllm.server import receiver

    monkeypatch.setattr(receiver, "HybridEngineReceiver", Engine)
    monkeypatch.setitem(internals.NAMES, "ENGINE_CORE", SimpleNamespace(load=lambda: kind))
    close_gate(OURS)
    return kind(
        SimpleNamespace(
            load_config=SimpleNamespace(load_format=getattr(request, "param", OURS)),
            scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Scheduler),
        )
    )


def engines_of(core: Any) -> list[Engine]:
    return [worker.weight_transfer_engine for worker in core.model_executor.workers]


def fill(core: Any, *versions: int, job: str = "") -> None:
    for engine, version in zip(engines_of(core), versions, strict=True):
        engine.why = ""
        engine.job = job
        engine.version = version


def add_request_for(core: Any, name: str, **weights: str) -> None:
    """Add a request for certain weights, or for any weights."""
    params = SimpleNamespace(
        extra_args={f"hybrid_engine_{key}": value for key, value in weights.items()} or None
    )
    request = {
        "request_id": name,
        "client_index": 7,
        "sampling_params": params,
        "is_finished": lambda: False,
    }
    core.add_request(SimpleNamespace(**request))


def test_a_request_for_other_weights_is_refused(core: Any) -> None:
    join = functools.partial(core.collective_rpc, "init_weight_transfer_engine")
    add_request_for(core, "too early", job="a", version="3")
    assert core.refused() == {
        "too early": "the server belongs to job none, and the request asks for job a"
    }
    join(kwargs={"init_info": {"job": "a"}})
    for version in ("3", "4"):
        add_request_for(core, f"waits for {version}", job="a", version=version)
    add_request_for(core, "any")
    add_request_for(core, "any of a", job="a")
    add_request_for(core, "of b", job="b", version="3")
    assert core.refused() == {"of b": "the server belongs to job a, and the request asks for job b"}
    fill(core, 3, 3, job="a")
    core.resume_scheduler()  # refuses requests waiting for other weights
    assert core.refused() == {
        "waits for 4": "the server has version 3 of job a, and the request asks for version 4"
    }
    add_request_for(core, "of 2", job="a", version="2")
    add_request_for(core, "of 3", job="a", version="3")
    assert [*core.refused()] == ["of 2"]
    join(kwargs={"init_info": {"job": "b"}})  # refuses all requests for job a
    assert sorted(core.refused()) == ["any of a", "of 3", "waits for 3"]
    add_request_for(core, "of b", job="b", version="3")
    assert core.refused() == {
        "of b": "the server has version 3 of job a, and the request asks for version 3"
    }
    assert [*core.scheduler.requests] == ["any"]
    del core.output_queue  # an engine in this process raises
    with refused(StateError, "request-refused", "job b", "job a"):
        add_request_for(core, "of a", job="a")


def test_a_server_starts_paused_and_resumes_with_weights_of_the_same_version(core: Any) -> None:
    assert [engine.worker for engine in engines_of(core)] == [
        wrapper.worker for wrapper in core.model_executor.workers
    ]
    assert core.is_scheduler_paused()
    assert core._weight_version == "none"
    for versions in ((), (3, 4)):
        if versions:
            fill(core, *versions)
        with refused(StateError, "weights-incomplete"):
            core.resume_scheduler()
        assert core.is_scheduler_paused()
    fill(core, 4, 4)
    core.resume_scheduler()
    assert not core.is_scheduler_paused()
    assert core._weight_version == "4"


def test_weights_cannot_change_while_a_server_generates(core: Any) -> None:
    update = ["reset_encoder_cache", "update_weights"]
    fill(core, 0, 0)
    assert core.collective_rpc("update_weights") == ["update_weights"] * 2
    # A paused scheduler may still run requests to their end.
    for drawing in ({"state": "drawing"}, {"running": ["request"]}):
        with (
            mock.patch.multiple(core.scheduler, **drawing),
            refused(StateError, "server-is-generating"),
        ):
            core.collective_rpc("update_weights")
    core.batch_queue = ["step"]
    with refused(StateError, "server-is-generating"):
        core.collective_rpc("update_weights")
    assert all(
        worker.calls == ["update_max_model_len", *update] for worker in core.model_executor.workers
    )


def test_a_generating_server_reports_its_weight_version(core: Any) -> None:
    with refused(StateError, "weights-incomplete", "'4'"):
        core.set_weight_version("4")
    fill(core, 4, 4)
    for version in ("4", "none"):
        core.set_weight_version(version)
        assert core._weight_version == version
    core.resume_scheduler()
    for version, code in (("77", "wrong-version"), ("none", "server-is-generating")):
        with refused(StateError, code):
            core.set_weight_version(version)
    assert core._weight_version == "4"


def test_all_workers_answer_every_call_if_a_worker_fails(core: Any) -> None:
    first, second = (wrapper.worker for wrapper in core.model_executor.workers)
    for failing, number in ((first, 0), (second, 1)):
        with refused(
            StateError, "worker-failed", f"worker {number}: MemoryError: no memory in this worker"
        ):
            core.collective_rpc("start_weight_update", kwargs={"fails": failing})
        # No answer is left over.
        assert core.collective_rpc("finish_weight_update") == ["finish_weight_update"] * 2
    with refused(StateError, "weights-incomplete"):
        core.resume_scheduler()


@pytest.mark.parametrize(
    "name", ["sleep", "wake_up", "discard", "reset_weights", "reload_weights", "load_model"]
)
def test_other_calls_that_change_weights_are_refused(core: Any, name: str) -> None:
    fill(core, 0, 0)
    with refused(StateError, "call-refused"):
        core.collective_rpc(name)
    with refused(StateError, "call-refused", "save_sharded_state"):
        core.collective_rpc("save_sharded_state", kwargs={"path": "/elsewhere"})
    for call in (core.sleep, core.release_kv_cache_memory):
        with refused(StateError, "call-refused"):
            call()
    assert core.sleep(0) == core.sleep(level=0) == "asleep at 0"  # level 0 only pauses
    assert all(worker.calls == ["update_max_model_len"] for worker in core.model_executor.workers)


def test_missing_weights_cannot_be_read(core: Any) -> None:
    """An in-process engine can inspect its model."""
    calls: dict[str, tuple[Any, ...]] = {
        "compute_weight_checksums": (),
        "get_model_inspection": (),
        "apply_model": (type,),
    }
    for name, args in calls.items():
        with refused(StateError, "weights-incomplete"):
            core.collective_rpc(name, args=args)
    with refused(StateError, "weights-incomplete"):
        core.add_lora("request")
    banned = core.collective_rpc("monkey_patch_model", kwargs={"vocab_size": 9})
    assert banned == [], "verl's server calls it first, and it is left out"
    fill(core, 0, 0)
    for name, args in calls.items():
        assert core.collective_rpc(name, args=args) == [name] * 2
    assert core.add_lora("request") == "added"
    for wrong_args in ((), ("type",)):
        with refused(StateError, "call-refused", "apply_model"):
            core.collective_rpc("apply_model", args=wrong_args)


def test_a_probe_needs_the_weights_of_all_workers(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "probe", lambda core, tokens: f"of {tokens}")
    first, second = engines_of(core)
    first.is_uncompared = True
    probe = functools.partial(core.collective_rpc, "hybrid_engine_probe", args=([[1, 2]],))
    with refused(StateError, "weights-incomplete"):
        probe()
    second.is_uncompared = True
    assert probe() == ["of [[1, 2]]"]
    with refused(StateError, "weights-incomplete"):
        core.resume_scheduler()
    first.is_uncompared = second.is_uncompared = False
    fill(core, 3, 3)
    assert probe() == ["of [[1, 2]]"]


@pytest.mark.parametrize("names", [("waiting",), ("waiting", "skipped_waiting")])
def test_waiting_requests_do_not_run_during_a_probe(names: tuple[str, ...]) -> None:
    scheduler = Scheduler(running=[])
    scheduler.pause_state = scheduler.state = "paused"
    queues = {name: [f"request of {name}"] for name in names}
    vars(scheduler).update(queues)
    with (
        pytest.raises(ValueError, match="while it computes"),
        probing._alone(SimpleNamespace(scheduler=scheduler)),
    ):
        assert [getattr(scheduler, name) for name in names] == [[] for _ in names]
        assert scheduler.state != "paused"
        raise ValueError("while it computes")
    assert {name: getattr(scheduler, name) for name in names} == queues
    assert scheduler.state == "paused"
    assert names == ("waiting", "skipped_waiting") or not hasattr(scheduler, "skipped_waiting")


@pytest.mark.parametrize("core", ["auto"], indirect=True)
def test_engines_with_other_load_formats_are_unaffected(core: Any) -> None:
    assert not core.is_scheduler_paused()
    assert core.collective_rpc("reload_weights") == ["reload_weights"] * 2
    assert core.sleep() == "asleep at 1"
    assert core.release_kv_cache_memory() == "released"
    core.resume_scheduler()
