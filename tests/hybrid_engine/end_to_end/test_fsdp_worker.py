"""`ActorHybridWorker` with FSDP2: two ranks, real vLLM."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker, ReferenceModel, Sampling
from hybrid_engine.errors import ArgumentError, BatchError, LossError, StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.fsdp.actor import build_actor
from tests.harness.errors import failing
from tests.harness.launch import REPO_ROOT, of_all_ranks, on_engines
from tests.harness.values import Values
from tests.hybrid_engine.end_to_end.digests import training_state
from tests.zoo import workers
from tests.zoo.shares import share_of
from tests.zoo.tokenizers import save_characters

pytestmark = pytest.mark.timeout(600)

HYBRID = {
    "fsdp": {"sharding_strategy": "HYBRID_SHARD", "replicas": 2},
    "make_vocab_size_divisible_by": 128,
}
LINEAR = {
    "lr_decay_style": "linear",
    "lr_warmup_steps": 2,
    "lr_decay_steps": 12,
    "lr_warmup_init": 1e-3,
}
SCHEDULED = {"optimizer": {"lr": 1e-2, "schedule": LINEAR}}
SHARDED = {"fsdp": {}, "make_vocab_size_divisible_by": 128, **SCHEDULED}
CHECKPOINTED = {**SHARDED, "fsdp": {"activation_checkpointing": True}}
NUM_UPDATES = 3
SAMPLED = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [3, 4, 5, 6, 7], [9], [8, 9]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = workers.write_model(tmp_path_factory.mktemp("model"), "qwen3")
    save_characters(path)
    return path


@dataclass(frozen=True)
class Alone:
    """Results of updates by the trainer alone; `kept`: bytes kept for a backward pass."""

    losses: list[float]
    state: dict[str, str]
    kept: int


def train_alone(model: Path, actor: Values) -> Alone:
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    config = workers.configuration(model, actor)
    with closing(Job.join(60)) as job, ExitStack() as owner:
        engine = build_actor(config, config.table(), job, owner).engine
        losses = [
            engine.train_step(share_of(engine, workers.batch(seed=number)), workers.cross_entropy)[
                "loss"
            ]
            for number in range(NUM_UPDATES)
        ]
        state = training_state(engine.model)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.model.model(share_of(engine, workers.batch(seed=9))["tokens"], use_cache=False)
        return Alone(losses, state, sum(kept))


@on_engines(2)
def test_recomputed_layers_are_bitwise_equal(model: Path) -> None:
    alone = train_alone(model, SHARDED)
    recomputed = train_alone(model, CHECKPOINTED)
    assert recomputed.losses == alone.losses
    assert sorted(recomputed.state.values()) == sorted(alone.state.values())
    assert recomputed.kept < alone.kept


@on_engines(2)
def test_training_with_switches_is_bitwise_training_without(model: Path, tmp_path: Path) -> None:
    """A rollout follows each update, with the weights of that update."""
    alone = train_alone(model, SHARDED)
    worker = workers.build_worker(model, SHARDED, {"max_model_len": 128})
    losses = []
    rates = []
    with worker.train_context():
        reference = ReferenceModel(worker)
        before = worker.compute_log_probs(workers.batch(seed=9))
    for number in range(NUM_UPDATES):
        with worker.train_context():
            report = worker.update(workers.batch(seed=number), workers.cross_entropy)
            losses.append(report["loss"])
            rates.append(report["learning_rate"])
        with worker.rollout_context():
            completions = worker.generate_sequences(PROMPTS, SAMPLED)
        report = worker.sharding.last_report
        assert report.bytes_received == report.bytes_least
        with worker.forward_context():
            check_scores(worker, completions)
    assert losses == alone.losses
    # A reference keeps its weights.
    assert torch.equal(reference.compute_log_probs(workers.batch(seed=9)), before)
    with worker.train_context():
        assert training_state(worker.train) == alone.state
        worker.save_hf_checkpoint(tmp_path / "hf")
        worker.save_checkpoint(tmp_path / "resume")
        saved = worker.compute_log_probs(workers.batch(seed=9))
        worker.update(workers.batch(seed=7), workers.cross_entropy)
        worker.load_hf_checkpoint(tmp_path / "hf")
        assert torch.equal(worker.compute_log_probs(workers.batch(seed=9)), saved)
        worker.load_checkpoint(tmp_path / "resume")
        assert training_state(worker.train) == alone.state
        assert worker.train.version == NUM_UPDATES
        # A schedule continues from its checkpoint.
        assert [*rates, worker.learning_rate] == pytest.approx([1e-3, 5.5e-3, 1e-2, 9e-3])
    worker.shutdown()
    check_replicas(tmp_path)


def check_replicas(directory: Path) -> None:
    """Build another worker in the same processes, from the checkpoints of the first.

    Its replicas are uncut.
    """
    worker = workers.build_worker(
        directory / "hf", HYBRID, {"infer_tensor_parallel_size": 2}, random_weights=False
    )
    batch = workers.batch(seed=9)
    with worker.train_context():
        at_start = worker.compute_log_probs(batch)
        worker.load_checkpoint(directory / "resume")
        scores = worker.compute_log_probs(batch)
        assert torch.equal(at_start, scores)
        check_shares(worker)
        check_bad_batches(worker)
        assert torch.equal(worker.compute_log_probs(batch), scores)
    with worker.rollout_context():
        completions = worker.generate_sequences(PROMPTS, SAMPLED)
    with worker.forward_context():
        check_scores(worker, completions)
    worker.shutdown()


def check_shares(worker: Any) -> None:
    """Check that a rank can pass its share of a batch, and get more than log-probabilities."""
    batch = workers.batch(seed=9)
    share = share_of(worker.actor.engine, batch)
    whole = worker.compute_log_probs(batch, entropy=True, top_k=2)
    part = share_of(worker.actor.engine, {**batch, **whole})
    assert torch.equal(worker.compute_log_probs(share, data="local"), part["log_probs"])
    by_reference = ReferenceModel(worker).compute_log_probs(share, data="local", top_k=2)
    assert by_reference.keys() == {"log_probs", "top_log_probs", "top_token_ids"}
    assert all(torch.equal(values, part[name]) for name, values in by_reference.items())
    assert (part["entropy"] > 0).all()
    worker.set_learning_rate(0.0)
    loss = workers.cross_entropy
    assert worker.update(batch, loss) == worker.update(share, loss, data="local")


def check_bad_batches(worker: Any) -> None:
    """Check that an error of one rank reaches all."""
    batch = workers.batch(seed=9)
    share = share_of(worker.actor.engine, batch)
    is_at_fault = worker.rank == 1
    without_labels = {name: batch[name] for name in ("tokens", *(["labels"] * (not is_at_fault)))}
    other_shape = {name: tensor[: 2 + 2 * is_at_fault] for name, tensor in share.items()}
    other_labels = {**batch, "labels": batch["labels"].roll(int(is_at_fault), 1)}
    loss = workers.cross_entropy
    of_rank = "local" if is_at_fault else "global"
    for bad, data, on, code, pattern in (
        (without_labels, "global", 1, "missing-key", "labels: is missing"),
        (other_shape, "local", None, "differs-between-ranks", ""),
        (
            share,
            of_rank,
            None,
            "differs-between-ranks",
            "data: 'global' on rank 0, 'local' on rank 1",
        ),
        (
            other_labels,
            "global",
            None,
            "differs-between-ranks",
            "labels: has other values on rank 1",
        ),
    ):
        with failing(BatchError, code, pattern, on=on):
            worker.update(bad, loss, data=data)
    for bad_loss, code, value in (
        (lambda _batch, log_probs: None if is_at_fault else -log_probs.mean(), "no-loss", None),
        (
            lambda _batch, log_probs: log_probs.mean() * (torch.nan if is_at_fault else 1),
            "loss-not-finite",
            torch.nan,
        ),
    ):
        returned = f"loss function check_bad_batches.<locals>.<lambda> returned {value}"
        with failing(LossError, code, returned, on=1):
            worker.update(batch, bad_loss)


@on_engines(2)
def test_calls_are_refused_in_a_rollout_and_after_the_end(model: Path, tmp_path: Path) -> None:
    """The snippets of the page on generation run in between."""
    worker = workers.build_worker(model, SHARDED, {"max_model_len": 128})
    with pytest.raises(StateError, match="vLLM runs in this process already"):
        workers.build_worker(model, SHARDED)
    with worker.rollout_context():
        for call in (worker.actor.checkpoints.save, worker.actor.checkpoints.load):  # the trainer's
            with pytest.raises(
                StateError, match=r"in state infer \(rollout_context\); call this in train"
            ):
                call(tmp_path / "never")
        del call  # a bound method refers to its trainer
        with pytest.raises(ArgumentError, match=r"sampling: got \{\}"):
            worker.generate_sequences(PROMPTS, {})
        run_snippets(worker)
    trainer = weakref.ref(worker.train)
    worker.shutdown()
    for name, call in calls_of_worker(worker).items():
        with pytest.raises(StateError):
            call()
            raise AssertionError(name)
    del worker, call
    gc.collect()
    assert trainer() is None


def run_snippets(worker: ActorHybridWorker) -> None:
    """Run the snippets of docs/generation.md in order; all ranks have the same answers."""
    names = {"worker": worker}
    page = (REPO_ROOT / "docs" / "generation.md").read_text()
    for snippet in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "docs/generation.md", "exec"), names)
    conversations = [(names[name].turns, names[name].is_drawn) for name in ("one", "other")]
    assert all(any(is_drawn) for _, is_drawn in conversations)
    answers = (conversations, list(names["outputs"][0].outputs[0].token_ids))
    assert of_all_ranks(answers) == [answers] * 2
    # One rank has the environments.
    roles = [message["role"] for message in names["one"].messages]
    assert roles[:3] == ([] if worker.rank else ["user", "assistant"])


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


def check_scores(worker: Any, completions: Any) -> None:
    """Check that vLLM and the trainer have the same log-probabilities of completions."""
    longest = max(map(len, PROMPTS)) + SAMPLED.max_tokens
    rows = torch.zeros(len(PROMPTS), longest + 1, dtype=torch.int64)
    for row, prompt, (completion,) in zip(rows, PROMPTS, completions, strict=True):
        sequence = [*prompt, *completion.token_ids]
        row[: len(sequence)] = torch.tensor(sequence)
    scores = worker.compute_log_probs(
        {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    )
    for row, prompt, (completion,) in zip(scores, PROMPTS, completions, strict=True):
        of_completion = row[len(prompt) - 1 :][: SAMPLED.max_tokens]
        torch.testing.assert_close(
            of_completion, torch.tensor(completion.logprobs), atol=1e-4, rtol=0
        )
