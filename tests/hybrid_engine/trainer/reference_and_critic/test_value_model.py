"""A critic that shares devices with the actor and vLLM: memory, training, checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForSequenceClassification

from hybrid_engine import ReferenceModel, ValueModel
from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.config.job_rules import memory_plan
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.job import join_process_group
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import refused
from tests.harness.launch import of_all_ranks, on_engines
from tests.hybrid_engine.backends.fsdp.actors import whole
from tests.hybrid_engine.end_to_end.digests import digest, training_state
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ACTORS = {
    "Megatron": {"tensor_model_parallel_size": 2, "params_dtype": "bfloat16"},
    "FSDP2": {"fsdp": {}, "make_vocab_size_divisible_by": 128},
}
NUM_STEPS = 12
MODELS = {"train": "actor", "forward": "actor", "reference": "reference", "generate": "vLLM"}
MODELS |= dict.fromkeys(["critic forward", "critic train"], "critic")
"""Phase -> the only model that is on the device."""


def regression(micro_batch: Any, values: torch.Tensor) -> tuple[torch.Tensor, TensorDict]:
    """Regress to 1 for tokens in the upper half of the vocabulary, 0 for the others."""
    target = (micro_batch["tokens"] > 64).float()
    loss = (values - target).square().mean()
    return loss, {"loss": loss}


def decoder_digests(model: Any) -> dict[str, str]:
    """Return digests of the decoder's weights."""
    weights = model.weights
    is_sharded = isinstance(model, ShardedModel)
    named = weights.computing_tensors() if is_sharded else dict(weights.model.named_weights())
    heads = ("output_layer.", "lm_head.", "score.")
    return {name: digest(weight) for name, weight in named.items() if not name.startswith(heads)}


def values_of_transformers(model: Path, critic: ValueModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the values [B, S] of transformers' class with the weights that FSDP2 shards."""
    config = AutoConfig.from_pretrained(model, num_labels=1, attn_implementation="eager")
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    tensors = critic.engine.model.model.state_dict()
    plain.load_state_dict({name: whole(tensor) for name, tensor in tensors.items()})
    return plain.score(plain.model(tokens).last_hidden_state).squeeze(-1)


@on_engines({2: list(ACTORS)}, timeout=500)
def test_a_critic_and_a_reference_share_devices_with_the_actor(tmp_path: Path, case: str) -> None:
    model = tmp_path / "model"
    if os.environ["RANK"] == "0":
        workers.write_model(model, "qwen3", tie_word_embeddings=True, vocab_size=128)
    join_process_group(60)
    dist.barrier()
    critic_config = {"micro_batch_size": 4, "optimizer": {"lr": 3e-3}}
    generate = {"bucket_mb": 1}
    worker = workers.build_worker(model, ACTORS[case], generate, critic_config=critic_config)
    # Token ids are below the model's vocab_size of 128.
    batch = {name: tensor.clamp(max=127) for name, tensor in workers.batch(seed=1).items()}

    def check_memory(phase: str) -> None:
        """Check that one model is resident; padded buffers and whole pages are a few per cent of so
        small a model.
        """
        resident = {name: nbytes for name, nbytes in worker.resident_nbytes().items() if nbytes}
        assert list(resident) == [MODELS[phase]]
        if case == "Megatron":
            planned = memory_plan(worker.config, worker.world_size).phases[phase].by_model
            expected = {name: nbytes[worker.rank] for name, nbytes in planned.items()}
            assert resident == pytest.approx(expected, rel=0.05)

    with worker.train_context():
        worker.update(batch, workers.cross_entropy)
        critic = ValueModel(worker)
        assert worker.sharding.state == "train"
        copied = decoder_digests(worker.train)
        assert len(copied) > 10
        critic.copy_actor()
        assert worker.sharding.state == "train"
        # Zeroed gradients take no memory on the CPU until they are written.
        worker.update(batch, workers.cross_entropy)
        before = training_state(worker.train)
        check_memory("train")
    with worker.forward_context():
        reference = ReferenceModel(worker)
        check_memory("forward")
    with reference.forward_context():
        reference.compute_log_probs(batch)
        check_memory("reference")
    with worker.rollout_context():
        check_memory("generate")
        completions = worker.generate_sequences([[1, 2, 3]], workers.GREEDY)
        with critic.forward_context():
            first = critic.values(batch)
            assert decoder_digests(critic.engine.model) == copied
            check_memory("critic forward")
        assert worker.sharding.state == "infer"
        assert worker.generate_sequences([[1, 2, 3]], workers.GREEDY) == completions
    with critic.train_context():
        losses = [critic.update(batch, regression)["loss"] for _ in range(NUM_STEPS)]
        assert losses[-1] < 0.6 * losses[0]
        if case == "FSDP2":
            expected = values_of_transformers(model, critic, batch["tokens"])
            torch.testing.assert_close(critic.values(batch), expected)
        assert of_all_ranks(losses) == [losses, losses]
        check_memory("critic train")
        with refused(StateError, "wrong-state"):
            worker.update(batch, workers.cross_entropy)
        critic.save_checkpoint(tmp_path / "critic")
        critic.update(batch, regression)
        values = critic.values(batch)
        assert not torch.equal(first, values)
        critic.load_checkpoint(tmp_path / "critic")
        critic.update(batch, regression)
        assert torch.equal(critic.values(batch), values)
    assert worker.sharding.state == "idle"  # the device stays empty
    with refused(StateError, "not-on-the-device"):
        critic.values(batch)
    with critic.forward_context():
        with refused(StateError, "not-on-the-device"):
            critic.update(batch, regression)
        for context in (critic.train_context, reference.forward_context):
            with refused(StateError, "inside-another-context", "critic"):
                context()
    with worker.train_context():
        assert training_state(worker.train) == before
        worker.save_hf_checkpoint(tmp_path / "hf")
        saved = decoder_digests(worker.train)
        before_scoring = worker.sharding.last_report
        scores = reference.compute_log_probs(batch)
        assert worker.sharding.last_report is before_scoring  # the actor stayed
        assert worker.sharding.state == "train"
        with reference.forward_context():
            assert torch.equal(reference.compute_log_probs(batch), scores)
    # A critic without a model loads the files of the worker's model.
    worker.config = worker.config.model_copy(
        update={"random_weights": False, "model": tmp_path / "hf"}
    )
    from_files = ValueModel(worker)
    with from_files.forward_context():
        assert decoder_digests(from_files.engine.model) == saved != copied
    worker.shutdown()
