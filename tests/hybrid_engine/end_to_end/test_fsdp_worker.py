"""`ActorHybridWorker` with FSDP2 in place of Megatron: two ranks, real vLLM."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker, ReferenceModel, Sampling
from hybrid_engine.errors import ArgumentError, StateError
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.fsdp.actor import build_actor
from tests.harness.launch import REPO_ROOT, Outcomes, Ranks
from tests.hybrid_engine.end_to_end.digests import training_state
from tests.hybrid_engine.ranks.test_agreement import outcome_of
from tests.zoo import workers
from tests.zoo.shares import share_of
from tests.zoo.tokenizers import save_characters

pytestmark = pytest.mark.timeout(600)

HYBRID = {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "replicas": 2}, "make_vocab_size_divisible_by": 128}
LINEAR = {"lr_decay_style": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 12, "lr_warmup_init": 1e-3}
SCHEDULED = {"optimizer": {"lr": 1e-2, "schedule": LINEAR}}
SHARDED = {"fsdp": {}, "make_vocab_size_divisible_by": 128, **SCHEDULED}
CHECKPOINTED = {**SHARDED, "fsdp": {"activation_checkpointing": True}}
NUM_UPDATES = 3
SAMPLED = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [3, 4, 5, 6, 7], [9], [8, 9]]


def with_switches(model: Path, directory: Path) -> dict[str, Any]:
    """Updates with a rollout after each, and what the worker does besides."""
    worker = workers.build_worker(model, SHARDED, {"max_model_len": 128})
    found: dict[str, Any] = {"losses": [], "rates": [], "differences": [], "surplus": []}
    with worker.train_context():
        reference = ReferenceModel(worker)
        found["before"] = worker.compute_log_probs(workers.batch(seed=9))
    for number in range(NUM_UPDATES):
        with worker.train_context():
            report = worker.update(workers.batch(seed=number), workers.cross_entropy)
            found["losses"].append(report["loss"])
            found["rates"].append(report["learning_rate"])
        with worker.rollout_context():
            completions = worker.generate_sequences(PROMPTS, SAMPLED)
            for call in (worker.train.save_checkpoint, worker.train.load_checkpoint):  # not worker's own
                with pytest.raises(StateError, match=r"in state infer \(rollout_context\); call this in train"):
                    call(directory / "never")
            del call  # a method holds its trainer
            if number == 0:
                with pytest.raises(ArgumentError, match=r"sampling: got \{\}"):
                    worker.generate_sequences(PROMPTS, {})
                found["snippets"] = run_snippets(worker)
        found["surplus"].append(worker.sharding.last_report.bytes_received - worker.sharding.last_report.bytes_least)
        with worker.forward_context():
            found["differences"].append(_difference(worker, completions))
    found["reference"] = reference.compute_log_probs(workers.batch(seed=9))
    with worker.train_context():
        found["state"] = training_state(worker.train)
        worker.save_hf_checkpoint(directory / "hf")
        worker.save_checkpoint(directory / "resume")
        saved = worker.compute_log_probs(workers.batch(seed=9))
        worker.update(workers.batch(seed=7), workers.cross_entropy)
        worker.load_hf_checkpoint(directory / "hf")
        found["weights are back"] = torch.equal(worker.compute_log_probs(workers.batch(seed=9)), saved)
        worker.load_checkpoint(directory / "resume")
        found["rates"].append(worker.learning_rate)
        found["state is back"] = training_state(worker.train) == found["state"]
        found["version"] = worker.train.version
    with pytest.raises(StateError, match="vLLM runs in this process already"):
        workers.build_worker(model, SHARDED)
    trained = weakref.ref(worker.train)
    worker.shutdown()
    found["closed"] = {name: outcome_of(call) for name, call in of_a_closed(worker).items()}
    del worker, reference
    gc.collect()
    found["is left"] = trained() is not None
    return found


def of_a_closed(worker: ActorHybridWorker) -> dict[str, Callable[[], object]]:
    """What needs the engines."""
    batch = workers.batch(seed=9)
    return {
        "rollout_context": worker.rollout_context,
        "train_context": worker.train_context,
        "forward_context": worker.forward_context,
        "prefetch": worker.prefetch,
        "on_reshard_end": lambda: worker.on_reshard_end(print),
        "generate_sequences": lambda: worker.generate_sequences(PROMPTS, SAMPLED),
        "compute_log_probs": lambda: worker.compute_log_probs(batch),
        "update": lambda: worker.update(batch, workers.cross_entropy),
        "save_checkpoint": lambda: worker.save_checkpoint("nowhere"),
        "load_checkpoint": lambda: worker.load_checkpoint("nowhere"),
        "save_hf_checkpoint": lambda: worker.save_hf_checkpoint("nowhere"),
        "load_hf_checkpoint": lambda: worker.load_hf_checkpoint("nowhere"),
        "resident_nbytes": worker.resident_nbytes,
        "barrier": lambda: worker.barrier("here"),
        "generate": lambda: worker.inference.generate(PROMPTS, SAMPLED),
        "generate_over_replicas": lambda: worker.inference.generate_over_replicas(PROMPTS, SAMPLED),
        "prompt_logprobs": lambda: worker.inference.prompt_logprobs(PROMPTS),
        "reset_caches": worker.inference.reset_caches,
        "release": worker.inference.release,
        "set_lora": lambda: worker.inference.remove_lora("one"),
        "abandon_requests": worker.inference.abandon_requests,
        "reference": lambda: ReferenceModel(worker),
    }


def run_snippets(worker: ActorHybridWorker) -> dict[str, Any]:
    """Run the snippets of docs/generation.md, one after the other; returns what the last ones left."""
    names: dict[str, Any] = {"worker": worker}
    page = (REPO_ROOT / "docs" / "generation.md").read_text()
    for snippet in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "docs/generation.md", "exec"), names)
    return {
        "conversations": [(each.turns, each.is_drawn) for each in (names["one"], names["other"])],
        "messages": [message["role"] for message in names["one"].messages],
        "raw": list(names["outputs"][0].outputs[0].token_ids),
    }


def _boundary(worker: Any) -> dict[str, Any]:
    """A batch of its own for each rank, more than log-probabilities, and what is refused though one rank alone is at
    fault; the weights stay."""
    batch, reference = workers.batch(seed=9), ReferenceModel(worker)
    own, found = share_of(worker.train, batch), {}
    whole = worker.compute_log_probs(batch, entropy=True, top_k=2)
    found["local"] = worker.compute_log_probs(own, data="local")
    found["local reference"] = reference.compute_log_probs(own, data="local", top_k=2)
    found["part of global"] = share_of(worker.train, {**batch, **whole})
    worker.train.set_learning_rate(0.0)
    loss = workers.cross_entropy
    found["reports"] = [worker.update(batch, loss), worker.update(own, loss, data="local")]
    is_at_fault = worker.rank == 1
    bad_batches = {
        "labels": ({name: batch[name] for name in ("tokens", *(["labels"] * (not is_at_fault)))}, {}),
        "another shape": ({name: tensor[: 2 + 2 * is_at_fault] for name, tensor in own.items()}, {"data": "local"}),
        "other data": (own, {"data": "local" if is_at_fault else "global"}),
        "other labels": ({**batch, "labels": batch["labels"].roll(int(is_at_fault), 1)}, {}),
    }
    for name, (bad, settings) in bad_batches.items():
        found[name] = outcome_of(partial(worker.update, bad, loss, **settings))
    losses = {
        "loss": lambda _batch, log_probs: None if is_at_fault else -log_probs.mean(),
        "loss that is nan": lambda _batch, log_probs: log_probs.mean() * (float("nan") if is_at_fault else 1.0),
    }
    found |= {name: outcome_of(partial(worker.update, batch, bad)) for name, bad in losses.items()}
    found["again"] = worker.compute_log_probs(batch)
    return found


def without(model: Path, actor: dict[str, Any]) -> dict[str, Any]:
    """The same updates by the trainer alone."""
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    config = workers.configuration(model, actor)
    with closing(Job.join(60)) as job, ExitStack() as owner:
        engine = build_actor(config, table_for(config.hf_config()), job, owner)
        losses = [
            engine.train_step(share_of(engine, workers.batch(seed=number)), workers.cross_entropy)["loss"]
            for number in range(NUM_UPDATES)
        ]
        state = training_state(engine)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.model(share_of(engine, workers.batch(seed=9))["tokens"], use_cache=False)
        return {"losses": losses, "state": state, "kept": sum(kept)}


def with_replicas(directory: Path) -> dict[str, Any]:
    """Another worker in the same processes, whole on every rank, that begins with what the first has saved."""
    worker = workers.build_worker(directory / "hf", HYBRID, {"infer_tensor_parallel_size": 2}, random_weights=False)
    with worker.train_context():
        at_start = worker.compute_log_probs(workers.batch(seed=9))
        worker.load_checkpoint(directory / "resume")
        scores = worker.compute_log_probs(workers.batch(seed=9))
        boundary = _boundary(worker)
    with worker.rollout_context():
        completions = worker.generate_sequences(PROMPTS, SAMPLED)
    with worker.forward_context():
        difference = _difference(worker, completions)
    worker.shutdown()
    begins_as_saved = torch.equal(at_start, scores)
    return {"begins as saved": begins_as_saved, "scores": scores, "difference": difference, **boundary}


def _difference(worker: Any, completions: Any) -> float:
    """The largest, between vLLM's log-probabilities of what it drew and the trainer's."""
    longest = max(map(len, PROMPTS)) + SAMPLED.max_tokens
    rows = torch.zeros(len(PROMPTS), longest + 1, dtype=torch.int64)
    for row, prompt, (completion,) in zip(rows, PROMPTS, completions, strict=True):
        sequence = [*prompt, *completion.token_ids]
        row[: len(sequence)] = torch.tensor(sequence)
    scores = worker.compute_log_probs({"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()})
    differences = [
        scores[index, len(prompt) - 1 : len(prompt) - 1 + SAMPLED.max_tokens] - torch.tensor(completion.logprobs)
        for index, (prompt, (completion,)) in enumerate(zip(PROMPTS, completions, strict=True))
    ]
    return max(each.abs().max().item() for each in differences)


@pytest.fixture(scope="module")
def launched(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    directory = tmp_path_factory.mktemp("worker")
    model = workers.write_model(directory / "model", "qwen3")
    save_characters(model)
    calls = {
        "alone": (without, (model, SHARDED)),
        "checkpointed": (without, (model, CHECKPOINTED)),
        "switched": (with_switches, (model, directory)),
        "replicas": (with_replicas, (directory,)),
    }
    return engines.launch_in_turn(2, calls)


def test_the_snippets_about_generation_run(launched: Outcomes) -> None:
    for found in launched["switched"]:
        assert found["snippets"]["conversations"] == launched["switched"][0]["snippets"]["conversations"]
        assert all(any(is_drawn) for _, is_drawn in found["snippets"]["conversations"])
        assert found["snippets"]["raw"] == launched["switched"][0]["snippets"]["raw"]


def test_one_rank_has_the_environments(launched: Outcomes) -> None:
    first, second = (found["snippets"]["messages"] for found in launched["switched"])
    assert first[:3] == ["system", "user", "assistant"]
    assert second == []


def test_a_closed_worker_says_so_whatever_is_asked(launched: Outcomes) -> None:
    for found in launched["switched"]:
        assert {name: outcome for name, outcome in found["closed"].items() if "StateError: " not in outcome} == {}


def test_training_with_switches_is_bitwise_training_without(launched: Outcomes) -> None:
    for switched, alone in zip(launched["switched"], launched["alone"], strict=True):
        assert switched["losses"] == alone["losses"]
        assert switched["state"] == alone["state"]


def test_layers_that_are_computed_again_change_no_bit(launched: Outcomes) -> None:
    for found, alone in zip(launched["checkpointed"], launched["alone"], strict=True):
        assert found["losses"] == alone["losses"]
        assert sorted(found["state"].values()) == sorted(alone["state"].values())
        assert found["kept"] < alone["kept"]


def test_a_schedule_goes_on_where_it_was_saved(launched: Outcomes) -> None:
    """Rates of the updates, and of the next one after a checkpoint was loaded."""
    for found in launched["switched"]:
        assert found["rates"] == pytest.approx([1e-3, 5.5e-3, 1e-2, 9e-3])


def test_a_rank_may_pass_its_own_part_and_keeps_what_is_made_of_it(launched: Outcomes) -> None:
    for found in launched["replicas"]:
        part = found["part of global"]
        assert torch.equal(found["local"], part["log_probs"])
        assert found["local reference"].keys() == {"log_probs", "top_log_probs", "top_token_ids"}
        assert all(torch.equal(values, part[name]) for name, values in found["local reference"].items())
        assert (part["entropy"] > 0).all()
        assert found["reports"][0] == found["reports"][1]


def test_what_one_rank_does_wrong_is_told_to_all_and_changes_nothing(launched: Outcomes) -> None:
    first, second = launched["replicas"]
    assert second["labels"].startswith("BatchError: unusable batch (1):\n  - labels: is missing")
    assert first["labels"].startswith("RemoteError: checking the batch for: training step failed on 1 rank(s)")
    assert "labels: is missing" in first["labels"]
    assert all("BatchError" in each["another shape"] for each in (first, second))
    assert all("data: 'global' on rank 0, 'local' on rank 1" in each["other data"] for each in (first, second))
    assert all("labels: has other values on rank 1" in each["other labels"] for each in (first, second))
    assert second["loss"].startswith("LossError: loss function _boundary.<locals>.<lambda> returned None")
    assert first["loss"].startswith("RemoteError: loss function failed on 1 rank(s)")
    assert second["loss that is nan"].startswith("LossError: loss function _boundary.<locals>.<lambda> returned nan")
    assert first["loss that is nan"].startswith("RemoteError: loss function failed on 1 rank(s)")
    assert all(torch.equal(each["again"], each["scores"]) for each in (first, second))


def test_vllm_samples_from_the_weights_that_are_trained(launched: Outcomes) -> None:
    for found in launched["switched"]:
        assert max(found["differences"]) < 1e-4
        assert found["surplus"] == [0] * NUM_UPDATES
    assert all(found["difference"] < 1e-4 for found in launched["replicas"])


def test_a_reference_keeps_the_weights_that_it_copied(launched: Outcomes) -> None:
    for found in launched["switched"]:
        assert torch.equal(found["reference"], found["before"])


def test_checkpoints_bring_back_what_they_were_given(launched: Outcomes) -> None:
    for found in launched["switched"]:
        assert found["weights are back"]
        assert found["state is back"]
        assert found["version"] == NUM_UPDATES
    assert all(found["begins as saved"] for found in launched["replicas"])


def test_nothing_is_left_of_a_worker_that_was_shut_down(launched: Outcomes) -> None:
    assert not any(found["is left"] for found in launched["switched"])
