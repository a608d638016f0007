"""Training with switches is bitwise training without; other readers get the latest weights."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from hybrid_engine import ActorHybridWorker, ReferenceModel
from hybrid_engine.backends.vllm.internals import core_of
from hybrid_engine.errors import HybridEngineError, StateError
from tests.harness.launch import of_all_ranks, on_engines, real_collector
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
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}
TWO_RANKS: dict[str, Values] = {
    "bf16 replicated dp2": {**BF16, "use_distributed_optimizer": False},
    "fp32 replicated tp2": {**TP2, "use_distributed_optimizer": False},
    "fp32 overlap dp2": {**OVERLAP, **SCHEDULED, **RECOMPUTED},
}
"""Name -> actor_config."""
FOUR_RANKS: dict[str, Values] = {
    "bf16 distributed tp2 pp2": {**TP2, "pipeline_model_parallel_size": 2, **BF16},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3")


@on_engines({2: TWO_RANKS, 4: FOUR_RANKS}, timeout=800)
def test_losses_and_state_are_bitwise_those_of_training_without_switches(
    model: Path, case: str
) -> None:
    """Switch after each update. A switch offloads everything, and is not counted as an update."""
    actor = {**TWO_RANKS, **FOUR_RANKS}[case]
    train_with_switches(model, actor, 1)  # some groups stay until the next worker is built
    num_threads = num_gloo_threads()
    losses, state = train_with_switches(model, actor)
    # Threads can be fewer than before if an earlier worker was just collected.
    assert num_gloo_threads() <= num_threads, "a process group is left"
    with running(model, **dict(workers.configuration(model, actor).actor_config)) as run:
        batches = (
            share_of(run.engine, workers.batch(seed=number)) for number in range(NUM_UPDATES)
        )
        assert [
            run.engine.train_step(batch, workers.cross_entropy)["loss"] for batch in batches
        ] == losses
        assert training_state(run.engine.model) == state
        assert run.engine.model.version == NUM_UPDATES
        assert of_all_ranks(losses)[0] == losses
    assert len(state) > 1


@real_collector()
def train_with_switches(
    model: Path, actor: Values, num_updates: int = NUM_UPDATES
) -> tuple[list[float], Values]:
    """Return the losses and the digests of the state; check that nothing of the worker is left."""
    worker = workers.build_worker(model, actor)
    losses = []
    offloaded = []
    for number in range(num_updates):
        with worker.train_context():
            losses.append(worker.update(workers.batch(seed=number), workers.cross_entropy)["loss"])
            training_nbytes = sum(item.tensor.nbytes for item in worker.train.offload_items())
        with worker.rollout_context():
            worker.inference.generate([[1, 2, 3]], workers.GREEDY)
            offloaded.append(worker.sharding.last_report.bytes_offloaded / training_nbytes)
        with worker.forward_context():
            worker.compute_log_probs(workers.batch(seed=number))
    assert (
        offloaded[0] >= 1
    )  # includes position embeddings cached by the forward pass of `check_compute`
    assert offloaded[1:] == [1.0] * (num_updates - 1)
    with worker.train_context():
        state = training_state(worker.train)
    assert worker.train.version == num_updates
    chunk = weakref.ref(worker.train.chunks[0])
    assert not shut_down(worker), "vLLM's model outlives its worker"
    del worker
    gc.collect()
    assert chunk() is None
    return losses, state


def shut_down(worker: ActorHybridWorker) -> bool:
    """Return whether vLLM's model outlives vLLM's worker, while others still refer to the
    switch."""
    model = weakref.ref(worker.inference.adaptor.model)
    referring = (worker, worker.sharding)
    vllm_worker = core_of(worker.inference.llm).model_executor.driver_worker
    outlives = []
    end = vllm_worker.shutdown
    vllm_worker.shutdown = lambda: (end(), outlives.append(model() is not None))
    worker.shutdown()
    assert all(referring)
    return outlives == [True]


def num_gloo_threads() -> int:
    """Return the number of threads of gloo's process groups, three for each group."""
    return sum("gloo" in comm.read_text() for comm in Path("/proc/self/task").glob("*/comm"))


# -- other readers of the weights ------------------------------------------------------------------


@on_engines(2, timeout=800)
def test_all_readers_get_the_latest_weights(model: Path, tmp_path: Path) -> None:
    """A reference, a run from them, and a checkpoint, while an overlapped gather is pending.

    A second worker with another seed starts from the weights saved then; it is read at its start,
    after an update, after loading the checkpoint made then, and after a checkpoint that rank 1
    lacks, which changes nothing.
    """
    directory = tmp_path / "checkpoint"
    batch = workers.batch(seed=7)
    with workers.build_worker(model, OVERLAP) as worker, worker.train_context():
        for number in range(2):
            worker.update(workers.batch(seed=number), workers.cross_entropy)
        reference = ReferenceModel(worker)
        worker.save_checkpoint(directory)
        worker.save_hf_checkpoint(directory.with_name("hf"))
        live = worker.compute_log_probs(batch)
        assert torch.equal(reference.compute_log_probs(batch), live)
        with pytest.raises(
            StateError, match="Megatron's process groups are in use in this process"
        ):
            workers.build_worker(model, OVERLAP)
        assert torch.equal(worker.compute_log_probs(batch), live)
    second = workers.build_worker(
        directory.with_name("hf"), {**OVERLAP, "seed": 99}, random_weights=False
    )
    with second.train_context():
        assert torch.equal(second.compute_log_probs(batch), live)
        second.update(workers.batch(seed=5), workers.cross_entropy)
        assert not torch.equal(second.compute_log_probs(batch), live)
        second.load_checkpoint(directory)
        assert torch.equal(second.compute_log_probs(batch), live)
        assert second.train.version == 2
        if second.rank == 1:
            (directory / (directory / "latest").read_text().strip() / "__1_0.distcp").unlink()
        second.barrier("the file is gone")  # rank 0 must not verify the file earlier
        with pytest.raises(HybridEngineError, match=r"__1_0\.distcp: no such file"):
            second.load_checkpoint(directory)
        assert torch.equal(second.compute_log_probs(batch), live)
    second.shutdown()
