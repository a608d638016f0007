"""`ActorHybridWorker` with FSDP2: two ranks, real vLLM."""

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
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.fsdp.actor import build_actor
from tests.harness.launch import REPO_ROOT, Outcomes, Ranks
from tests.harness.values import Values
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


def with_switches(model: Path, directory: Path) -> Values:
    """Run updates with a rollout after each; return observations of the worker."""
    worker = workers.build_worker(model, SHARDED, {"max_model_len": 128})
    observed: Values = {"losses": [], "rates": [], "differences": [], "surplus": []}
    with worker.train_context():
        reference = ReferenceModel(worker)
        observed["before"] = worker.compute_log_probs(workers.batch(seed=9))
    for number in range(NUM_UPDATES):
        with worker.train_context():
            report = worker.update(workers.batch(seed=number), workers.cross_entropy)
            observed["losses"].append(report["loss"])
            observed["rates"].append(report["learning_rate"])
        with worker.rollout_context():
            completions = worker.generate_sequences(PROMPTS, SAMPLED)
            for call in (
                worker.actor.checkpoints.save,
                worker.actor.checkpoints.load,
            ):  # the trainer's, not the worker's
                with pytest.raises(StateError, match=r"in state infer \(rollout_context\); call this in train"):
                    call(directory / "never")
            del call  # a bound method refers to its trainer
            if number == 0:
                with pytest.raises(ArgumentError, match=r"sampling: got \{\}"):
                    worker.generate_sequences(PROMPTS, {})
                observed["snippets"] = run_snippets(worker)
        observed["surplus"].append(worker.sharding.last_report.bytes_received - worker.sharding.last_report.bytes_least)
        with worker.forward_context():
            observed["differences"].append(_difference(worker, completions))
    observed["reference"] = reference.compute_log_probs(workers.batch(seed=9))
    with worker.train_context():
        observed["state"] = training_state(worker.train)
        worker.save_hf_checkpoint(directory / "hf")
        worker.save_checkpoint(directory / "resume")
        saved = worker.compute_log_probs(workers.batch(seed=9))
        worker.update(workers.batch(seed=7), workers.cross_entropy)
        worker.load_hf_checkpoint(directory / "hf")
        observed["weights are back"] = torch.equal(worker.compute_log_probs(workers.batch(seed=9)), saved)
        worker.load_checkpoint(directory / "resume")
        observed["rates"].append(worker.learning_rate)
        observed["state is back"] = training_state(worker.train) == observed["state"]
        observed["version"] = worker.train.version
    with pytest.raises(StateError, match="vLLM runs in this process already"):
        workers.build_worker(model, SHARDED)
    trainer_ref = weakref.ref(worker.train)
    worker.shutdown()
    observed["closed"] = {name: outcome_of(call) for name, call in calls_of_worker(worker).items()}
    del worker, reference
    gc.collect()
    observed["is left"] = trainer_ref() is not None
    return observed


def calls_of_worker(worker: ActorHybridWorker) -> dict[str, Callable[[], object]]:
    """Return all calls that need the engines."""
    batch = workers.batch(seed=9)
    return {
        "rollout_context": worker.rollout_context,
        "train_context": worker.train_context,
        "forward_context": worker.forward_context,
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


def run_snippets(worker: ActorHybridWorker) -> Values:
    """Run the snippets of docs/generation.md in order; return values of the last ones."""
    names: Values = {"worker": worker}
    page = (REPO_ROOT / "docs" / "generation.md").read_text()
    for snippet in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "docs/generation.md", "exec"), names)
    return {
        "conversations": [(names[name].turns, names[name].is_drawn) for name in ("one", "other")],
        "messages": [message["role"] for message in names["one"].messages],
        "raw": list(names["outputs"][0].outputs[0].token_ids),
    }


def _boundary(worker: Any) -> Values:
    """Pass batches per rank, request more than log-probabilities, and pass bad batches on one rank.

    The weights must not change.
    """
    batch = workers.batch(seed=9)
    reference = ReferenceModel(worker)
    share = share_of(worker.actor.engine, batch)
    results: Values = {}
    whole = worker.compute_log_probs(batch, entropy=True, top_k=2)
    results["local"] = worker.compute_log_probs(share, data="local")
    results["local reference"] = reference.compute_log_probs(share, data="local", top_k=2)
    results["part of global"] = share_of(worker.actor.engine, {**batch, **whole})
    worker.set_learning_rate(0.0)
    loss = workers.cross_entropy
    results["reports"] = [worker.update(batch, loss), worker.update(share, loss, data="local")]
    is_at_fault = worker.rank == 1
    bad_batches = {
        "labels": ({name: batch[name] for name in ("tokens", *(["labels"] * (not is_at_fault)))}, {}),
        "another shape": ({name: tensor[: 2 + 2 * is_at_fault] for name, tensor in share.items()}, {"data": "local"}),
        "other data": (share, {"data": "local" if is_at_fault else "global"}),
        "other labels": ({**batch, "labels": batch["labels"].roll(int(is_at_fault), 1)}, {}),
    }
    for name, (bad, settings) in bad_batches.items():
        results[name] = outcome_of(partial(worker.update, bad, loss, **settings))
    losses = {
        "loss": lambda _batch, log_probs: None if is_at_fault else -log_probs.mean(),
        "loss that is nan": lambda _batch, log_probs: log_probs.mean() * (float("nan") if is_at_fault else 1.0),
    }
    results |= {name: outcome_of(partial(worker.update, batch, bad)) for name, bad in losses.items()}
    results["again"] = worker.compute_log_probs(batch)
    return results


def without(model: Path, actor: Values) -> Values:
    """Run the same updates by the trainer alone."""
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    config = workers.configuration(model, actor)
    with closing(Job.join(60)) as job, ExitStack() as owner:
        engine = build_actor(config, config.table(), job, owner).engine
        losses = [
            engine.train_step(share_of(engine, workers.batch(seed=number)), workers.cross_entropy)["loss"]
            for number in range(NUM_UPDATES)
        ]
        state = training_state(engine.model)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.model.model(share_of(engine, workers.batch(seed=9))["tokens"], use_cache=False)
        return {"losses": losses, "state": state, "kept": sum(kept)}


def with_replicas(directory: Path) -> Values:
    """Build another worker in the same processes, from the checkpoint of the first.

    Its replicas are uncut.
    """
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
    """Return the largest difference of log-probabilities of completions between vLLM and
    trainer."""
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
    return max(difference.abs().max().item() for difference in differences)


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


def test_the_snippets_of_the_page_on_generation_run(launched: Outcomes) -> None:
    for observed in launched["switched"]:
        assert observed["snippets"]["conversations"] == launched["switched"][0]["snippets"]["conversations"]
        assert all(any(is_drawn) for _, is_drawn in observed["snippets"]["conversations"])
        assert observed["snippets"]["raw"] == launched["switched"][0]["snippets"]["raw"]


def test_one_rank_has_the_environments(launched: Outcomes) -> None:
    first, second = (observed["snippets"]["messages"] for observed in launched["switched"])
    assert first[:3] == ["user", "assistant"]
    assert second == []


def test_every_call_of_a_closed_worker_is_refused(launched: Outcomes) -> None:
    for observed in launched["switched"]:
        assert {name: outcome for name, outcome in observed["closed"].items() if "StateError: " not in outcome} == {}


def test_training_with_switches_is_bitwise_training_without(launched: Outcomes) -> None:
    for switched, alone in zip(launched["switched"], launched["alone"], strict=True):
        assert switched["losses"] == alone["losses"]
        assert switched["state"] == alone["state"]


def test_recomputed_layers_are_bitwise_equal(launched: Outcomes) -> None:
    for observed, alone in zip(launched["checkpointed"], launched["alone"], strict=True):
        assert observed["losses"] == alone["losses"]
        assert sorted(observed["state"].values()) == sorted(alone["state"].values())
        assert observed["kept"] < alone["kept"]


def test_a_schedule_continues_from_its_checkpoint(launched: Outcomes) -> None:
    """Rates of the updates, and of the next one after loading a checkpoint."""
    for observed in launched["switched"]:
        assert observed["rates"] == pytest.approx([1e-3, 5.5e-3, 1e-2, 9e-3])


def test_a_rank_can_pass_its_share_of_a_batch(launched: Outcomes) -> None:
    for observed in launched["replicas"]:
        part = observed["part of global"]
        assert torch.equal(observed["local"], part["log_probs"])
        assert observed["local reference"].keys() == {"log_probs", "top_log_probs", "top_token_ids"}
        assert all(torch.equal(values, part[name]) for name, values in observed["local reference"].items())
        assert (part["entropy"] > 0).all()
        assert observed["reports"][0] == observed["reports"][1]


def test_an_error_of_one_rank_reaches_all_and_changes_nothing(launched: Outcomes) -> None:
    first, second = launched["replicas"]
    assert second["labels"].startswith("BatchError: unusable batch (1):\n  - labels: is missing")
    assert first["labels"].startswith("RemoteError: checking the batch for: training step failed on 1 rank(s)")
    assert "labels: is missing" in first["labels"]
    for results in (first, second):
        assert "BatchError" in results["another shape"]
        assert "data: 'global' on rank 0, 'local' on rank 1" in results["other data"]
        assert "labels: has other values on rank 1" in results["other labels"]
        assert torch.equal(results["again"], results["scores"])
    assert second["loss"].startswith("LossError: loss function _boundary.<locals>.<lambda> returned None")
    assert first["loss"].startswith("RemoteError: training step failed on 1 rank(s)")
    assert second["loss that is nan"].startswith("LossError: loss function _boundary.<locals>.<lambda> returned nan")
    assert first["loss that is nan"].startswith("RemoteError: training step failed on 1 rank(s)")


def test_vllm_samples_from_the_trained_weights(launched: Outcomes) -> None:
    for observed in launched["switched"]:
        assert max(observed["differences"]) < 1e-4
        assert observed["surplus"] == [0] * NUM_UPDATES
    assert all(observed["difference"] < 1e-4 for observed in launched["replicas"])


def test_a_reference_keeps_its_weights(launched: Outcomes) -> None:
    for observed in launched["switched"]:
        assert torch.equal(observed["reference"], observed["before"])


def test_checkpoints_restore_weights_and_state(launched: Outcomes) -> None:
    for observed in launched["switched"]:
        assert observed["weights are back"]
        assert observed["state is back"]
        assert observed["version"] == NUM_UPDATES
    assert all(observed["begins as saved"] for observed in launched["replicas"])


def test_a_worker_is_collected_after_shutdown(launched: Outcomes) -> None:
    assert not any(observed["is left"] for observed in launched["switched"])
