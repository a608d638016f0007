"""Training with switches is bitwise training without; other readers get the latest weights."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybrid_engine import ActorHybridWorker, ReferenceModel
from hybrid_engine.backends.vllm.internals import core_of
from hybrid_engine.errors import HybridEngineError, StateError
from tests.harness.launch import Call, Outcomes, Ranks, real_collector
from tests.harness.values import Values
from tests.hybrid_engine.end_to_end.digests import training_state
from tests.zoo import workers
from tests.zoo.megatron_models import running
from tests.zoo.shares import share_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_UPDATES = 5
BF16 = {"params_dtype": "bfloat16"}
TP2 = {"tensor_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
COSINE = {"lr_decay_style": "cosine", "lr_warmup_steps": 2, "lr_decay_steps": 6, "min_lr": 1e-3}
SCHEDULED = {"optimizer": {"lr": 1e-2, "schedule": COSINE}}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
ACTORS: dict[str, tuple[int, Values]] = {
    "bf16 replicated dp2": (2, {**BF16, "use_distributed_optimizer": False}),
    "fp32 replicated tp2": (2, {**TP2, "use_distributed_optimizer": False}),
    "fp32 overlap dp2": (2, {**OVERLAP, **SCHEDULED, **RECOMPUTED}),
    "bf16 distributed tp2 pp2": (4, {**TP2, "pipeline_model_parallel_size": 2, **BF16}),
}
"""Name -> number of ranks, actor_config."""
GATHERS = "overlapped gathers"
ATTACHED = "attached"


@real_collector()
def train_with_switches(model: Path, actor: Values) -> Values:
    """Train with a switch and a complete offload after each update.

    "offloaded" has the share of the training bytes that each switch offloaded.
    """
    num_threads = _num_gloo_threads()
    worker = workers.build_worker(model, actor)
    losses: list[float] = []
    offloaded: list[float] = []
    for number in range(NUM_UPDATES):
        with worker.train_context():
            losses.append(worker.update(workers.batch(seed=number), workers.cross_entropy)["loss"])
            training_nbytes = sum(item.tensor.nbytes for item in worker.train.offload_items())
        with worker.rollout_context():
            worker.inference.generate([[1, 2, 3]], workers.GREEDY)
            offloaded.append(worker.sharding.last_report.bytes_offloaded / training_nbytes)
        with worker.forward_context():
            worker.compute_log_probs(workers.batch(seed=number))
    with worker.train_context():
        state = training_state(worker.train)
    version = worker.train.version
    chunk = weakref.ref(worker.train.chunks[0])
    outlives = shut_down(worker)
    del worker
    gc.collect()
    return {
        "losses": losses,
        "state": state,
        "version": version,
        "offloaded": offloaded,
        "vLLM's model outlives its worker": outlives,
        "model is left": chunk() is not None,
        "more gloo threads": _num_gloo_threads() - num_threads,
    }


def shut_down(worker: ActorHybridWorker) -> bool:
    """Return whether vLLM's model outlives vLLM's worker, while others still refer to the
    switch."""
    model = weakref.ref(worker.inference.adaptor.model)
    referring = (worker, worker.sharding)
    vllm_worker = core_of(worker.inference.llm).model_executor.driver_worker
    outlives: list[bool] = []
    end = vllm_worker.shutdown
    vllm_worker.shutdown = lambda: (end(), outlives.append(model() is not None))
    worker.shutdown()
    assert all(referring)
    return outlives == [True]


def _num_gloo_threads() -> int:
    """Return the number of threads of gloo's process groups, three for each group."""
    return sum("gloo" in comm.read_text() for comm in Path("/proc/self/task").glob("*/comm"))


def train_without(model: Path, actor: Values) -> Values:
    """Run the same updates by Megatron alone."""
    with running(model, **dict(workers.configuration(model, actor).actor_config)) as run:
        losses = [
            run.engine.train_step(share_of(run.engine, workers.batch(seed=number)), workers.cross_entropy)["loss"]
            for number in range(NUM_UPDATES)
        ]
        return {"losses": losses, "state": training_state(run.engine.model), "version": run.engine.model.version}


Pair = tuple[list[Values], list[Values]]
"""Results by rank of training with and without switches."""


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcomes]:
    """Results of all functions that run on a number of ranks, launched once.

    Functions that end their process group run first.
    """
    directory = tmp_path_factory.mktemp("training")
    model = workers.write_model(directory / "model", "qwen3")

    @functools.cache
    def launched(num_ranks: int) -> Outcomes:
        actors = {name: actor for name, (wanted, actor) in ACTORS.items() if wanted == num_ranks}
        calls: dict[str, Call] = {}
        if num_ranks == 2:
            calls[ATTACHED] = (attach_to_the_example, ())
            calls[GATHERS] = (follow_overlapped_gathers, (model, directory / "checkpoint"))
        else:
            # Some groups of a worker stay until the next one is built, so run one uncounted worker.
            calls["first"] = (train_with_switches, (model, next(iter(actors.values()))))
        for name, actor in actors.items():
            calls[f"{name}, switched"] = (train_with_switches, (model, actor))
            calls[f"{name}, without"] = (train_without, (model, actor))
        return engines.launch_in_turn(num_ranks, calls, timeout=800)

    return launched


@pytest.fixture(params=ACTORS)
def pair(request: pytest.FixtureRequest, outcomes: Callable[[int], Outcomes]) -> Pair:
    results = outcomes(ACTORS[request.param][0])
    return results[f"{request.param}, switched"], results[f"{request.param}, without"]


def test_losses_and_state_are_bitwise_equal(pair: Pair) -> None:
    """Losses are equal on all ranks, and a switch is not counted as an update."""
    for switched, without in zip(*pair, strict=True):
        assert switched["losses"] == without["losses"] == pair[0][0]["losses"]
        assert len(without["state"]) > 1
        assert switched["state"] == without["state"]
        assert switched["version"] == without["version"] == NUM_UPDATES


def test_every_switch_offloads_all_training_bytes(pair: Pair) -> None:
    for result in pair[0]:
        first, *others = result["offloaded"]
        assert first >= 1  # includes position embeddings cached by the forward pass of `check_compute`
        assert others == [1.0] * (NUM_UPDATES - 1)


def test_a_dropped_worker_leaves_no_model(pair: Pair) -> None:
    for result in pair[0]:
        assert not result["model is left"]
        assert not result["vLLM's model outlives its worker"]


def test_a_dropped_worker_leaves_no_process_group(pair: Pair) -> None:
    """Threads can be fewer than before if an earlier worker was just collected."""
    assert max(result["more gloo threads"] for result in pair[0]) <= 0


# -- other readers of the weights ------------------------------------------------------------------


def follow_overlapped_gathers(model: Path, directory: Path) -> dict[str, bool | int]:
    """Return which readers have scores equal to the live weights' while an overlapped gather is pending.

    A second worker with another seed starts from the weights saved then; it is read at its start,
    after an update, after loading the checkpoint made then, and after a checkpoint that rank 1
    lacks.
    """
    batch = workers.batch(seed=7)
    with workers.build_worker(model, OVERLAP) as worker, worker.train_context():
        for number in range(2):
            worker.update(workers.batch(seed=number), workers.cross_entropy)
        reference = ReferenceModel(worker)
        worker.save_checkpoint(directory)
        worker.save_hf_checkpoint(directory.with_name("hf"))
        live = worker.compute_log_probs(batch)
        reference_scores = reference.compute_log_probs(batch)
        with pytest.raises(StateError, match="Megatron's process groups are in use in this process"):
            workers.build_worker(model, OVERLAP)
        assert torch.equal(worker.compute_log_probs(batch), live)
    second = workers.build_worker(directory.with_name("hf"), {**OVERLAP, "seed": 99}, random_weights=False)
    with second.train_context():
        begun = second.compute_log_probs(batch)
        second.update(workers.batch(seed=5), workers.cross_entropy)
        fresh = second.compute_log_probs(batch)
        second.load_checkpoint(directory)
        loaded = second.compute_log_probs(batch)
        version = second.train.version
        if second.rank == 1:
            (directory / (directory / "latest").read_text().strip() / "__1_0.distcp").unlink()
        second.barrier("the file is gone")  # rank 0 must not verify the file earlier
        with pytest.raises(HybridEngineError, match=r"__1_0\.distcp: no such file"):
            second.load_checkpoint(directory)
        refused = second.compute_log_probs(batch)
    second.shutdown()
    readers = {"reference": reference_scores, "begun": begun, "fresh": fresh, "loaded": loaded, "refused": refused}
    return {**{name: torch.equal(live, scores) for name, scores in readers.items()}, "version": version}


def test_all_readers_get_the_latest_weights(outcomes: Callable[[int], Outcomes]) -> None:
    """A reference, a run from them, a checkpoint. An unreadable checkpoint changes nothing."""
    expected = {"reference": True, "begun": True, "fresh": False, "loaded": True, "refused": True, "version": 2}
    assert outcomes(2)[GATHERS] == [expected] * 2


def attach_to_the_example() -> Values:
    from tests.hybrid_engine.end_to_end.attached_megatron import attach_and_train

    return attach_and_train()


@pytest.fixture
def attached(outcomes: Callable[[int], Outcomes]) -> list[Values]:
    return outcomes(2)[ATTACHED]


def test_an_attached_engine_leaves_training_bitwise_equal(attached: list[Values]) -> None:
    for observed in attached:
        assert len(set(observed["plain"])) == len(observed["plain"])
        assert observed["attached"] == observed["plain"]
        assert observed["unprepared"] == observed["plain"]
        assert observed["loose"]["moved=True"] == observed["loose"]["moved=False"]


def test_a_missing_prepare_is_warned_of(attached: list[Values]) -> None:
    for rank, observed in enumerate(attached):
        assert not any("prepare" in text for text in observed["warned_if_prepared"])
        (text,) = (text for text in observed["warned"] if "prepare" in text)
        assert re.match(
            rf"rank {rank}: [1-9][\d.]* MiB of parameters and gradients are in ordinary memory, since hybrid_eng", text
        )


def test_an_attached_model_refuses_to_compute_without_weights(attached: list[Values]) -> None:
    assert all(observed["is_held_back"] for observed in attached)


def test_an_attached_engine_stores_weights(attached: list[Values]) -> None:
    for observed in attached:
        assert observed["keeps"]


def test_a_setting_that_vllm_lacks_fails_the_first_switch(attached: list[Values]) -> None:
    """Training continues bitwise equal, as the test above shows."""
    for observed in attached:
        text = observed["other_setting"]
        assert "vLLM does not compute what the trainer computes: log-probabilities of 28 tokens are" in text
        assert "the trainer has TransformerConfig.glu_linear_offset 100.0" in text
        assert observed["state_after"] == "train"


def test_mismatches_of_model_and_configuration_are_refused(attached: list[Values]) -> None:
    for observed in attached:
        refused = observed["refused"]
        assert ("model_chunks[0]", "not-in-ddp") in refused["without DDP"]
        assert ("optimizer", "unsupported-optimizer") in refused["without DDP"]
        assert ("model_chunks[0]", "not-a-megatron-model") in refused["no Megatron"]
        for key in ("tensor_model_parallel_size", "params_dtype", "overlap_grad_reduce"):
            assert (f"actor_config.{key}", "differs-from-model") in refused["other sizes"]
        assert ("generate_config.infer_tensor_size", "unknown-key") in refused["other sizes"]
        assert all("use_distributed_optimizer" not in key for key, _ in refused["other sizes"])
