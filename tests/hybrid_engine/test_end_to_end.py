"""Both real engines on 2 and 4 ranks: what training keeps, and what failures leave. What reaches vLLM and what the
models compute is in test_matrix.py."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker, ReferenceModel
from hybrid_engine.errors import ConfigError, HybridEngineError, StateError, Violation
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch import rendezvous
from hybrid_engine.worker import share_of
from tests.harness.launch import Ranks, remembered
from tests.hybrid_engine.planning.cases import network_lower_bound
from tests.zoo import workers
from tests.zoo.megatron_models import running

TP2 = {"tensor_model_parallel_size": 2}
TP2PP2 = {**TP2, "pipeline_model_parallel_size": 2}
BF16 = {"params_dtype": "bfloat16"}
HEADERS_AND_PADDING = 1 << 16


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)  # .numpy() would pin the live storage
        digest.update(copy.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train_with_switches(model: Path, actor: dict[str, Any]) -> dict[str, Any]:
    """Five updates, with a switch and an offload of everything after each; the training state then.

    And what is left once the worker is shut down and dropped: whether its model is, and threads of process groups.
    """
    num_threads = _num_gloo_threads()
    worker = workers.build_worker(model, actor)
    losses, offloaded = [], set()
    for version in range(5):
        with worker.train_context():
            losses.append(worker.update(workers.batch(seed=version), workers.cross_entropy)["loss"])
            training_nbytes = sum(item.tensor.nbytes for item in worker.train.offload_items())
        with worker.rollout_context():
            worker.inference.generate([[1, 2, 3]], workers.GREEDY)
            offloaded.add(worker.sharding.last_report.bytes_offloaded / training_nbytes)
        with worker.forward_context():
            worker.compute_log_probs(workers.batch(seed=version))
    with worker.train_context():
        state = _training_state(worker.train)
    version, chunk = worker.train.version, weakref.ref(worker.actor.chunks[0])
    worker.shutdown()
    del worker
    gc.collect()
    left = chunk() is not None, _num_gloo_threads() - num_threads
    return {"losses": losses, "state": state, "version": version, "offloaded": offloaded, "left": left}


def _num_gloo_threads() -> int:
    """Every process group of gloo has three."""
    return sum("gloo" in comm.read_text() for comm in Path("/proc/self/task").glob("*/comm"))


def train_without(model: Path, actor: dict[str, Any]) -> dict[str, Any]:
    """The same five updates by Megatron alone."""
    config = workers.configuration(model, actor)
    with running(model, config.actor_config) as run:
        losses = [
            run.engine.train_step(share_of(run.engine, workers.batch(seed=version)), workers.cross_entropy)["loss"]
            for version in range(5)
        ]
        return {"losses": losses, "state": _training_state(run.engine), "version": run.engine.version}


def _training_state(engine: Any) -> dict[str, str]:
    """Digest of every parameter buffer, main parameter and moment; an overlapped gather that is still owed is made."""
    engine.weights.prepare()
    return {item.owner: _digest([item.tensor]) for item in engine.offload_items() if item.action == "copy"}


ACTORS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16 replicated dp2": (2, {**BF16, "use_distributed_optimizer": False}),
    "fp32 replicated tp2": (2, {**TP2, "use_distributed_optimizer": False}),
    "fp32 overlap dp2": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "bf16 distributed tp2 pp2": (4, {**TP2PP2, **BF16}),
}
"""Name -> number of ranks, actor_config."""


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[Any]]]:
    """Number of ranks -> by name, what everything that runs on so many ranks brought back; launched once."""
    directory = tmp_path_factory.mktemp("end to end")
    model = workers.write_model(directory / "model", "qwen3")

    @remembered
    def launched(num_ranks: int) -> dict[str, list[Any]]:
        calls: dict[str, Any] = {}
        if num_ranks == 2:  # what makes and ends a process group of its own comes before what finds one
            calls["versions"] = (refuse_versions, (model,))
            calls["half built"] = (fail_while_building, (model,))
            calls["failures"] = (fail_and_go_on, (model,))
            calls["gathers"] = (follow_overlapped_gathers, (model, directory / "checkpoint"))
        else:
            calls["two hosts"] = (switch_on_hosts, (model, ("a", "a", "b", "b")))
            calls["one host"] = (switch_on_hosts, (model, ("a", "a", "a", "a")))
        for name, (wanted, actor) in ACTORS.items():
            if wanted == num_ranks:
                calls[f"{name}, switched"] = (train_with_switches, (model, actor))
                calls[f"{name}, without"] = (train_without, (model, actor))
        return engines.launch_in_turn(num_ranks, calls, timeout=800)

    return launched


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ACTORS)
def test_training_is_bitwise_the_same_with_switches(outcomes: Callable[[int], Any], name: str) -> None:
    found = outcomes(ACTORS[name][0])
    without, switched = found[f"{name}, without"], found[f"{name}, switched"]
    for plain, other in zip(without, switched, strict=True):
        assert other["losses"] == plain["losses"]
        assert other["state"] == plain["state"]
        assert len(plain["state"]) > 1
        assert other["version"] == plain["version"] == 5
        assert other["offloaded"] == {1.0}
        model_is_left, num_threads_more = other["left"]
        assert not model_is_left and num_threads_more <= 0  # less, where a former worker was just collected
    assert len({str(result["losses"]) for result in switched}) == 1


def switch_on_hosts(model: Path, hosts: tuple[str, ...]) -> dict[str, Any]:
    """A pipeline stage on two ranks each, whole models for generation; `hosts` is where each rank takes itself to be.
    What vLLM holds after a switch, an update and another switch, and what that switch moved."""
    config = workers.configuration(model, {**TP2PP2, **BF16}, {"bucket_mb": 1})
    job = Job.join(config.generate_config.timeout_seconds, host=hosts[int(os.environ["RANK"])])
    worker = ActorHybridWorker(config, job=job)
    digests: list[dict[str, str]] = [{}, {}]
    for seed, seen in enumerate(digests):
        digested = worker.inference.adaptor.observed(
            lambda name, tensor, seen=seen: seen.update({name: _digest([tensor])})
        )
        with digested, worker.rollout_context():
            completions = worker.inference.generate([[1, 2, 3]], workers.GREEDY)
            report = worker.sharding.last_report
        with worker.train_context():
            worker.update(workers.batch(seed), workers.cross_entropy)
    plan = worker.sharding.plan
    layouts: list[Any] = [None] * len(hosts)
    dist.all_gather_object(layouts, (worker.sharding.training.layout(), worker.sharding.inference.layout()))
    found = {
        "digests": digests,
        "tokens": completions[0][0].token_ids,
        "received": report.bytes_received,
        "least": report.bytes_least,
        "across_hosts": report.bytes_across_hosts,
        "network_least": network_lower_bound(*(Layout.merge(side) for side in zip(*layouts, strict=True)), hosts),
        "transports": set(report.bytes_by_transport),
        "staging": report.staging_bytes,
        "staging planned": staging_nbytes(plan.buckets, plan.relays, worker.rank),
    }
    worker.shutdown()
    job.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_on_two_hosts_hold_what_those_on_one_do(outcomes: Callable[[int], Any]) -> None:
    together, apart = outcomes(4)["one host"], outcomes(4)["two hosts"]
    for one, other in zip(together, apart, strict=True):
        assert other["digests"] == one["digests"] == together[0]["digests"]
        assert other["tokens"] == one["tokens"]
        assert one["digests"][0] != one["digests"][1]
        assert other["received"] == other["least"] == one["least"] == one["received"] > 0
        assert one["transports"] == {"shared_memory"}
        assert other["transports"] == {"shared_memory", "collective"}
        assert (one["staging"], one["staging planned"]) == (0, 0)
        assert 0 < other["staging planned"] <= other["staging"] < other["staging planned"] + HEADERS_AND_PADDING
    for host, ranks in {"a": apart[:2], "b": apart[2:]}.items():
        assert sum(rank["across_hosts"] for rank in ranks) == ranks[0]["network_least"][host] > 0
        assert min(rank["across_hosts"] for rank in ranks) > 0, "one rank carries all"


def fail_and_go_on(model: Path) -> dict[str, Any]:
    """Failures of all kinds, on one rank only where that can be; then all is well. Returns the messages."""
    worker = workers.build_worker(model, TP2, {"bucket_mb": 1})
    outcome: dict[str, Any] = {}
    with pytest.raises(StateError) as wrong_state:
        worker.generate_sequences([[1, 2]], workers.GREEDY)
    outcome["wrong state"] = str(wrong_state.value)
    with worker.train_context():
        worker.update(workers.batch(seed=0), workers.cross_entropy)
    states = [_training_state(worker.train)]

    parameter = dict(worker.train.weights.model.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
    good = parameter.data[3, 5].clone()
    for name, value in (("nan", torch.nan), ("inf", torch.inf)):
        if worker.rank == 1:
            parameter.data[3, 5] = value
        outcome[name] = _failure_of_switch(worker)
    parameter.data[3, 5] = good
    states.append(_training_state(worker.train))

    run, worker.sharding.router.run = worker.sharding.router.run, _second_bucket_on_fire(worker)
    outcome["transfer"] = _failure_of_switch(worker)
    worker.sharding.router.run = run
    states.append(_training_state(worker.train))

    home, parameter.data = parameter.data, parameter.data.clone()
    outcome["moved"] = _failure_of_switch(worker)
    parameter.data = home
    states.append(_training_state(worker.train))
    outcome["states"] = states

    with worker.train_context():
        worker.update(workers.batch(seed=1), workers.cross_entropy)
    with worker.rollout_context():
        with pytest.raises(ConfigError) as prompt:
            worker.generate_sequences([[1, 2], [500_000]], workers.GREEDY)
        outcome["prompt"] = str(prompt.value)
        with pytest.raises(StateError):
            ReferenceModel(worker)
        outcome["released"] = [_error_of(call) for call in _uses_of_training(worker)]
        outcome["completions"] = len(worker.generate_sequences([[1, 2], [3]], workers.GREEDY))
    with worker.forward_context():
        outcome["read only"] = [_error_of(call) for call in _uses_of_training(worker)]
    outcome["version"] = worker.train.version
    worker.shutdown()
    outcome["group ended"] = not dist.is_initialized()
    return outcome


def _uses_of_training(worker: Any) -> list[Callable[[], Any]]:
    """Calls that train, then calls that score, past the worker."""
    engine, batch = worker.train, share_of(worker.train, workers.batch(seed=1))
    return [
        lambda: engine.train_step(batch, workers.cross_entropy),
        lambda: engine.reload_main_params(),
        lambda: engine.copy_weights_from(engine),
        lambda: engine.log_probs(batch),
        lambda: engine.logits(batch["tokens"]),
        lambda: worker.compute_log_probs(workers.batch(seed=1)),
    ]


def _error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except StateError as error:
        return str(error)
    return None


def _failure_of_switch(worker: Any) -> tuple[str, str]:
    """Type and message of the error with which the switch to the rollout fails; training goes on afterwards."""
    with pytest.raises(HybridEngineError) as failure, worker.rollout_context():
        raise AssertionError("entered the rollout all the same")
    assert worker.sharding.state.value == "train"
    return type(failure.value).__name__, str(failure.value)


def _second_bucket_on_fire(worker: Any) -> Any:
    """The router's run, which on rank 0 fails in the second bucket."""
    run = worker.sharding.router.run

    def fail(bucket: Any, *args: Any) -> Any:
        if worker.rank == 0 and bucket.index == 1:
            raise OSError("disk on fire")
        return run(bucket, *args)

    return fail


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_failures_reach_every_rank_and_lose_nothing(outcomes: Callable[[int], Any]) -> None:
    results = outcomes(2)["failures"]
    assert [result["nan"][0] for result in results] == ["RemoteError", "WeightError"]
    assert [result["inf"][0] for result in results] == ["RemoteError", "WeightError"]
    assert [result["transfer"][0] for result in results] == ["ReshardError", "PeerTransportError"]
    for result in results:
        assert "state train" in result["wrong state"]
        assert "decoder.layers.1.mlp.linear_fc2.weight on rank 1" in result["nan"][1]
        assert "model.layers.1.mlp.down_proj.weight): 1 NaN of " in result["nan"][1]
        assert "model.layers.1.mlp.down_proj.weight): 1 Inf of " in result["inf"][1]
        assert all("in state infer; call this in the train" in message for message in result["released"])
        assert all("in state forward; call this in the train context" in message for message in result["read only"][:3])
        assert result["read only"][3:] == [None] * 3
        assert result["version"] == 2, "a refused step counted"
        assert "disk on fire" in result["transfer"][1]
        assert "bucket 1" in result["transfer"][1]
        assert "decoder.layers.1.mlp.linear_fc2.weight" in result["moved"][1]
        assert "prompts[1]" in result["prompt"]
        assert result["states"] == [result["states"][0]] * 4
        assert result["completions"] == 2
        assert result["group ended"]


def refuse_versions(model: Path) -> list[tuple[str, str]]:
    """The worker on a megatron-core, then on a vLLM, that nobody tested: on one rank, on all ranks."""
    import importlib.metadata

    import megatron.core

    outcomes = []
    config = workers.configuration(model, TP2)
    is_odd_rank = os.environ["RANK"] == "1"
    tested = megatron.core.__version__
    if is_odd_rank:
        megatron.core.__version__ = "0.15.0"
    with pytest.raises(HybridEngineError) as megatron_error:
        ActorHybridWorker(config)
    outcomes.append((type(megatron_error.value).__name__, str(megatron_error.value)))
    megatron.core.__version__ = tested
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.31.0" if name.startswith("vllm") else version(name)
    with pytest.raises(HybridEngineError) as vllm_error:
        ActorHybridWorker(config)
    importlib.metadata.version = version
    outcomes.append((type(vllm_error.value).__name__, str(vllm_error.value)))
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_untested_versions_are_refused_on_every_rank(outcomes: Callable[[int], Any]) -> None:
    results = outcomes(2)["versions"]
    assert [megatron[0] for megatron, _ in results] == ["RemoteError", "DependencyError"]
    for megatron, vllm in results:
        assert "0.15.0" in megatron[1] and "0.16.1" in megatron[1]
        assert vllm[0] == "DependencyError" and "0.31.0" in vllm[1] and "0.32.0" in vllm[1]


def fail_while_building(model: Path) -> list[tuple[str, bool]]:
    """Workers whose construction fails once Megatron's groups are there, then in the plan: the error, and whether the
    job is left."""
    from hybrid_engine.backends.megatron import build

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError([Violation("actor_config", "it does not fit", "Take another")])

    outcomes = []
    for owner, name in ((build, "build_actor"), (rendezvous, "plan")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
            patch.setattr(owner, name, fail)
            workers.build_worker(model, TP2)
        outcomes.append((str(error.value), dist.is_initialized()))
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_worker_can_be_built_after_one_that_failed(outcomes: Callable[[int], Any]) -> None:
    """The tests that follow it on the same ranks build more."""
    for result in outcomes(2)["half built"]:
        assert len(result) == 2
        assert all("it does not fit" in message and not job_is_left for message, job_is_left in result)


def follow_overlapped_gathers(model: Path, directory: Path) -> dict[str, Any]:
    """With an overlapped gather owed: a reference, a checkpoint and a score must all see the latest weights."""
    actor = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    worker = workers.build_worker(model, actor)
    batch = workers.batch(seed=7)
    with worker.train_context():
        for version in range(2):
            worker.update(workers.batch(seed=version), workers.cross_entropy)
        reference = ReferenceModel(worker)
        worker.save_checkpoint(directory)
        live = worker.compute_log_probs(batch)
        frozen = reference.compute_log_probs(batch)
    worker.shutdown()
    second = workers.build_worker(model, {**actor, "seed": 99})
    with second.train_context():
        before = second.compute_log_probs(batch)
        second.load_checkpoint(directory)
        loaded = second.compute_log_probs(batch)
        version = second.train.version
        if second.rank == 1:
            (directory / "rank0001.pt").unlink()
        with pytest.raises(HybridEngineError, match="no checkpoint of rank 1"):
            second.load_checkpoint(directory)
        kept = second.compute_log_probs(batch)
    second.shutdown()
    equal = {
        name: torch.equal(live, values) for name, values in {"frozen": frozen, "loaded": loaded, "kept": kept}.items()
    }
    return {**equal, "before": torch.equal(live, before), "version": version}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reference_and_checkpoint_hold_the_latest_weights(outcomes: Callable[[int], Any]) -> None:
    """Also: a second worker in the same process, and a checkpoint that one rank cannot read."""
    results = outcomes(2)["gathers"]
    assert results == [{"frozen": True, "loaded": True, "kept": True, "before": False, "version": 2}] * 2
