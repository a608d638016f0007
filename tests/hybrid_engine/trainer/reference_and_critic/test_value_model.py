"""A critic that shares devices with the actor and vLLM: memory, training, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ReferenceModel, ValueModel
from hybrid_engine.config.job_rules import memory_plan
from hybrid_engine.errors import HybridEngineError, StateError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import has_code
from tests.harness.launch import Ranks
from tests.hybrid_engine.end_to_end.digests import digest, training_state
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TP2 = {"tensor_model_parallel_size": 2, "params_dtype": "bfloat16"}
NUM_STEPS = 12


@dataclass
class Recorded:
    """Results of one rank.

    Attributes:
        resident: phase -> bytes by model. planned: the same, from the plan.
        losses: losses of the critic's steps.
        resumed: True if a step repeated after loading gives bit-identical values.
        actor_is_untouched: True if the critic's steps did not change the actor.
        completions: before and after a context of the critic, in one rollout.
        decoders: digests of the actor's decoder and of the critic copied from it, by name.
        loaded: the same of a saved actor, and of a critic loaded from its files.
        states: states of the worker around contexts of the critic.
        refused: codes of wrong calls.
        scores: by the reference, sharing the device with the actor and alone.
        stayed: True if the actor stayed resident while the reference scored.
    """

    resident: dict[str, dict[str, int]] = field(default_factory=dict)
    planned: dict[str, dict[str, int]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    resumed: bool = False
    actor_is_untouched: bool = False
    completions: list[Any] = field(default_factory=list)
    decoders: list[dict[str, str]] = field(default_factory=list)
    loaded: list[dict[str, str]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    stayed: bool = False


def regression(micro_batch: Any, values: torch.Tensor) -> tuple[torch.Tensor, TensorDict]:
    """Regress to 1 for tokens in the upper half of the vocabulary, 0 for the others."""
    target = (micro_batch["tokens"] > 64).float()
    loss = (values - target).square().mean()
    return loss, {"loss": loss}


def code_of(call: Any) -> str:
    """Return the code of the error that `call` raises."""
    try:
        call()
    except HybridEngineError as error:
        return error.code
    return "no error"


def decoder_digests(model: Any) -> dict[str, str]:
    """Return digests of the decoder's weights."""
    weights = model.weights.model.named_weights()
    return {name: digest(weight) for name, weight in weights if not name.startswith("output_layer.")}


def run_job(model: Path, directory: Path) -> Recorded:
    recorded = Recorded()
    critic_config = {"micro_batch_size": 4, "optimizer": {"lr": 3e-3}}
    worker = workers.build_worker(model, TP2, {"bucket_mb": 1}, critic_config=critic_config)
    # Token ids are below the model's vocab_size of 128.
    batch = {name: tensor.clamp(max=127) for name, tensor in workers.batch(seed=1).items()}

    def record_resident(phase: str) -> None:
        recorded.resident[phase] = {name: nbytes for name, nbytes in worker.resident_nbytes().items() if nbytes}

    with worker.train_context():
        worker.update(batch, workers.cross_entropy)
        critic = ValueModel(worker)
        recorded.states.append(worker.sharding.state)
        recorded.decoders.append(decoder_digests(worker.train))
        critic.copy_actor()
        recorded.states.append(worker.sharding.state)
        # Zeroed gradients take no memory on the CPU until they are written.
        worker.update(batch, workers.cross_entropy)
        before = training_state(worker.train)
        record_resident("train")
    with worker.forward_context():
        reference = ReferenceModel(worker)
        record_resident("forward")
    with reference.forward_context():
        reference.compute_log_probs(batch)
        record_resident("reference")
    with worker.rollout_context():
        record_resident("generate")
        recorded.completions.append(worker.generate_sequences([[1, 2, 3]], workers.GREEDY))
        with critic.forward_context():
            first = critic.values(batch)
            recorded.decoders.append(decoder_digests(critic.engine.model))
            record_resident("critic forward")
        recorded.states.append(worker.sharding.state)
        recorded.completions.append(worker.generate_sequences([[1, 2, 3]], workers.GREEDY))
    with critic.train_context():
        recorded.losses = [critic.update(batch, regression)["loss"] for _ in range(NUM_STEPS)]
        record_resident("critic train")
        recorded.refused.append(code_of(lambda: worker.update(batch, workers.cross_entropy)))
        critic.save_checkpoint(directory / "critic")
        critic.update(batch, regression)
        values_before_loading = critic.values(batch)
        critic.load_checkpoint(directory / "critic")
        critic.update(batch, regression)
        recorded.resumed = torch.equal(critic.values(batch), values_before_loading)
        recorded.resumed = recorded.resumed and not torch.equal(first, values_before_loading)
    recorded.states.append(worker.sharding.state)
    recorded.refused.append(code_of(lambda: critic.values(batch)))
    with critic.forward_context():
        recorded.refused.append(code_of(lambda: critic.update(batch, regression)))
        with pytest.raises(StateError, check=has_code("inside-another-context", "critic")):
            critic.train_context()
        with pytest.raises(StateError, check=has_code("inside-another-context", "critic")):
            reference.forward_context()
    with worker.train_context():
        recorded.actor_is_untouched = training_state(worker.train) == before
        worker.save_hf_checkpoint(directory / "hf")
        recorded.loaded.append(decoder_digests(worker.train))
        before_scoring = worker.sharding.last_report
        recorded.scores.append(reference.compute_log_probs(batch))
        recorded.stayed = worker.sharding.last_report is before_scoring
        recorded.states.append(worker.sharding.state)
        with reference.forward_context():
            recorded.scores.append(reference.compute_log_probs(batch))
    plan = memory_plan(worker.config, worker.world_size)
    for name in recorded.resident:
        phase = plan.phases[name]
        recorded.planned[name] = {key: int(nbytes[worker.rank]) for key, nbytes in phase.by_model.items()}
    # A critic without a model loads the files of the worker's model.
    worker.config = worker.config.model_copy(update={"random_weights": False, "model": directory / "hf"})
    from_files = ValueModel(worker)
    with from_files.forward_context():
        recorded.loaded.append(decoder_digests(from_files.engine.model))
    worker.shutdown()
    return recorded


@pytest.fixture(scope="module")
def recorded(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    directory = tmp_path_factory.mktemp("critic")
    model = workers.write_model(directory / "model", "qwen3", tie_word_embeddings=True, vocab_size=128)
    return engines.launch(run_job, 2, model, directory, timeout=500)


def test_resident_memory_of_each_phase_is_as_planned(recorded: list[Recorded]) -> None:
    """The tolerance covers padded buffers and whole pages, a few per cent of so small a model."""
    for rank in recorded:
        assert rank.resident.keys() == rank.planned.keys()
        for phase, resident in rank.resident.items():
            assert resident == pytest.approx(rank.planned[phase], rel=0.05), phase


def test_only_one_model_is_resident_at_a_time(recorded: list[Recorded]) -> None:
    assert {len(resident) for rank in recorded for resident in rank.resident.values()} == {1}


def test_the_critic_learns(recorded: list[Recorded]) -> None:
    for rank in recorded:
        assert rank.losses[-1] < 0.6 * rank.losses[0]
        assert rank.losses == recorded[0].losses


def test_a_critic_can_copy_the_actor(recorded: list[Recorded]) -> None:
    for rank in recorded:
        assert len(rank.decoders[0]) > 10
        assert rank.decoders[0] == rank.decoders[1]


def test_a_critic_loads_the_weights_of_its_model(recorded: list[Recorded]) -> None:
    for rank in recorded:
        assert rank.loaded[0] == rank.loaded[1] != rank.decoders[0]


def test_a_resumed_critic_is_bit_identical(recorded: list[Recorded]) -> None:
    assert all(rank.resumed for rank in recorded)


def test_the_critic_does_not_change_the_actor(recorded: list[Recorded]) -> None:
    assert all(rank.actor_is_untouched for rank in recorded)
    assert all(rank.completions[0] == rank.completions[1] for rank in recorded)


def test_the_state_around_a_critic_context_is_restored(recorded: list[Recorded]) -> None:
    """The worker's context is restored; after the critic alone, the device stays empty."""
    assert [rank.states[:4] for rank in recorded] == [["train", "train", "infer", "idle"]] * 2


def test_a_reference_scores_with_the_actor_resident_or_alone(recorded: list[Recorded]) -> None:
    for rank in recorded:
        assert rank.stayed
        assert rank.states[4:] == ["train"]
        assert torch.equal(*rank.scores)


def test_calls_outside_their_context_are_refused(recorded: list[Recorded]) -> None:
    for rank in recorded:
        assert rank.refused == ["wrong-state", "not-on-the-device", "not-on-the-device"]
