"""A critic beside the actor and vLLM, on two ranks: what is on the device when, that it learns, and that it resumes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ReferenceModel, ValueModel
from hybrid_engine.config.job_rules import memory_plan
from hybrid_engine.errors import HybridEngineError, StateError
from tests.harness.errors import has_code
from tests.harness.launch import Ranks
from tests.hybrid_engine.end_to_end.digests import digest, training_state
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TP2 = {"tensor_model_parallel_size": 2, "params_dtype": "bfloat16"}
NUM_STEPS = 12


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        resident: phase -> bytes by model. planned: the same, of the plan.
        losses: of the critic's steps.
        resumed: whether a step after resuming gives the values of the same step before, bit by bit.
        actor_is_untouched: by all that the critic did.
        completions: in one rollout, before and after a context of the critic.
        decoders: of the actor and of the critic that began as it did, by name.
        loaded: the same of an actor whose weights were written, and of a critic that began with these files.
        states: of the worker after contexts of the critic, inside and outside its own.
        refused: what each wrong call said, and those without room.
        scores: by the reference in train state, together with the actor and alone.
        stayed: the actor stayed on the device while the reference scored together with it.
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


def regression(micro_batch: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Whether the token is above the middle of the vocabulary."""
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


def decoder_of(engine: Any) -> dict[str, str]:
    """Its weights' digests."""
    weights = engine.weights.model.named_weights()
    return {name: digest(weight) for name, weight in weights if not name.startswith("output_layer.")}


def follow(model: Path, directory: Path) -> Seen:
    seen = Seen()
    critic_config = {"micro_batch_size": 4, "optimizer": {"lr": 3e-3}}
    worker = workers.build_worker(model, TP2, {"bucket_mb": 1}, critic_config=critic_config)
    batch = {name: tensor.clamp(max=127) for name, tensor in workers.batch(seed=1).items()}  # of its vocabulary

    def look(phase: str) -> None:
        seen.resident[phase] = {name: nbytes for name, nbytes in worker.resident_nbytes().items() if nbytes}

    with worker.train_context():
        worker.update(batch, workers.cross_entropy)
        critic = ValueModel(worker)
        seen.states.append(worker.sharding.state)
        seen.decoders.append(decoder_of(worker.train))
        critic.copy_actor()
        seen.states.append(worker.sharding.state)
        worker.update(batch, workers.cross_entropy)  # on the CPU, zeroed gradients take no memory before they are used
        before = training_state(worker.train)
        look("train")
    with worker.forward_context():
        reference = ReferenceModel(worker)
        look("forward")
    with reference.forward_context():
        reference.compute_log_probs(batch)
        look("reference")
    with worker.rollout_context():
        look("generate")
        seen.completions.append(worker.generate_sequences([[1, 2, 3]], workers.GREEDY))
        with critic.forward_context():
            first = critic.values(batch)
            seen.decoders.append(decoder_of(critic.engine))
            look("critic forward")
        seen.states.append(worker.sharding.state)
        seen.completions.append(worker.generate_sequences([[1, 2, 3]], workers.GREEDY))
    with critic.train_context():
        seen.losses = [critic.update(batch, regression)["loss"] for _ in range(NUM_STEPS)]
        look("critic train")
        seen.refused.append(code_of(lambda: worker.update(batch, workers.cross_entropy)))
        critic.save_checkpoint(directory / "critic")
        critic.update(batch, regression)
        later = critic.values(batch)
        critic.load_checkpoint(directory / "critic")
        critic.update(batch, regression)
        seen.resumed = torch.equal(critic.values(batch), later) and not torch.equal(first, later)
    seen.states.append(worker.sharding.state)
    seen.refused.append(code_of(lambda: critic.values(batch)))
    with critic.forward_context():
        seen.refused.append(code_of(lambda: critic.update(batch, regression)))
        with pytest.raises(StateError, check=has_code("inside-another-context", "critic")):
            critic.train_context()
        with pytest.raises(StateError, check=has_code("inside-another-context", "critic")):
            reference.forward_context()
    with worker.train_context():
        seen.actor_is_untouched = training_state(worker.train) == before
        worker.save_hf_checkpoint(directory / "hf")
        seen.loaded.append(decoder_of(worker.train))
        before_scoring = worker.sharding.last_report
        seen.scores.append(reference.compute_log_probs(batch))
        seen.stayed = worker.sharding.last_report is before_scoring
        seen.states.append(worker.sharding.state)
        with reference.forward_context():
            seen.scores.append(reference.compute_log_probs(batch))
    plan = memory_plan(worker.config, worker.world_size)
    for name in seen.resident:
        phase = plan.phases[name]
        seen.planned[name] = {key: int(nbytes[worker.rank]) for key, nbytes in phase.by_model.items()}
    worker.config = worker.config.model_copy(update={"random_weights": False, "model": directory / "hf"})
    from_files = ValueModel(worker)
    with from_files.forward_context():
        seen.loaded.append(decoder_of(from_files.engine))
    worker.shutdown()
    return seen


@pytest.fixture(scope="module")
def seen(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    directory = tmp_path_factory.mktemp("critic")
    model = workers.write_model(directory / "model", "qwen3", tie_word_embeddings=True, vocab_size=128)
    return engines.launch(follow, 2, model, directory, timeout=500)


def test_what_is_on_the_device_in_each_phase_is_what_was_planned(seen: list[Seen]) -> None:
    """Buffers are padded, and lie in whole pages: some per cent of a model this small."""
    for found in seen:
        assert found.resident.keys() == found.planned.keys()
        for phase, resident in found.resident.items():
            assert resident == pytest.approx(found.planned[phase], rel=0.05), phase


def test_no_two_models_are_on_the_device_together(seen: list[Seen]) -> None:
    assert {len(resident) for found in seen for resident in found.resident.values()} == {1}


def test_the_critic_learns(seen: list[Seen]) -> None:
    for found in seen:
        assert found.losses[-1] < 0.6 * found.losses[0]
        assert found.losses == seen[0].losses


def test_a_critic_may_begin_as_the_actor_does(seen: list[Seen]) -> None:
    for found in seen:
        assert len(found.decoders[0]) > 10
        assert found.decoders[0] == found.decoders[1]


def test_a_critic_begins_with_the_weights_of_its_model(seen: list[Seen]) -> None:
    for found in seen:
        assert found.loaded[0] == found.loaded[1] != found.decoders[0]


def test_a_resumed_critic_goes_on_bit_by_bit(seen: list[Seen]) -> None:
    assert all(found.resumed for found in seen)


def test_the_actor_stays_as_it_is(seen: list[Seen]) -> None:
    assert all(found.actor_is_untouched for found in seen)
    assert all(found.completions[0] == found.completions[1] for found in seen)


def test_the_state_outside_is_restored(seen: list[Seen]) -> None:
    """Inside a context of the worker; after one of the critic alone, the device stays empty for what comes next."""
    assert [found.states[:4] for found in seen] == [["train", "train", "infer", "idle"]] * 2


def test_a_reference_scores_beside_the_actor_or_alone(seen: list[Seen]) -> None:
    for found in seen:
        assert found.stayed
        assert found.states[4:] == ["train"]
        assert torch.equal(*found.scores)


def test_calls_outside_of_their_context_are_refused(seen: list[Seen]) -> None:
    for found in seen:
        assert found.refused == ["wrong-state", "not-on-the-device", "not-on-the-device"]
