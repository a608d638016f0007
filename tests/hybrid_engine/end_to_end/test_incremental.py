"""Incremental switches with real engines and a frozen embedding and head: vLLM is right, also with kept weights.

What is sent is counted in switch/test_incremental.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.switch.report import ReshardReport
from tests.harness.launch import on_engines
from tests.zoo import sharded_models, workers
from tests.zoo.tiny_models import label_log_probs, token_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INCREMENTAL = {"incremental": "auto", "incremental_mb": 2, "bucket_mb": 1}
TP2 = {"tensor_model_parallel_size": 2}
INFER_TP2 = {"infer_tensor_parallel_size": 2}
PROMPT = [list(range(2, 14))]
Action = Callable[[], object]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose embedding and head take 0.27 MB each, and its 4 layers 0.5 MB."""
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=528)


class Rounds:
    """Switches an engine back and forth, and compares vLLM's weights with its own load of the trained ones.

    Args:
        engine: of either trainer.
        save: writes the training weights as a checkpoint to `path`, in `train_context`.
        adapter: name of the adapter to compute with.

    Attributes:
        logprobs: distributions over a prompt in the last round.
    """

    def __init__(self, engine: Any, save: Action, path: Path, adapter: str | None = None) -> None:
        self._engine = engine
        self._save = save
        self._path = path
        self._adapter = adapter
        self._committed: TensorDict = {}
        self.logprobs: list[torch.Tensor] = []

    def run(self, action: Action | None = None) -> ReshardReport:
        """Run `action` in `train_context`, then a rollout."""
        inference = self._engine.inference
        with self._engine.train_context():
            if action is not None:
                action()
            self._save()
        with inference.adaptor.observed(self._keep), self._engine.rollout_context():
            native = native_parameters(inference, str(self._path))
            self.logprobs = inference.prompt_distributions(PROMPT, self._adapter)
        assert self._committed.keys() == native.keys()
        assert [name for name, tensor in native.items() if not torch.equal(tensor, self._committed[name])] == []
        return self._engine.sharding.last_report

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._committed[name] = tensor.detach().clone()

    def check_kept_weights(self, step: Action) -> None:
        """Check that nothing is sent without a step, and that kept weights compute the same as sent ones."""
        first = self.run()
        self.run(step)
        self.run(step)
        of_another = self.logprobs
        none = self.run()
        assert none.bytes_own + none.bytes_received == 0
        assert none.bytes_skipped == first.bytes_own + first.bytes_received
        of_none = self.logprobs
        self.run(self._engine.sharding._forget_sent)
        assert all(map(torch.equal, of_another, self.logprobs))
        assert all(map(torch.equal, of_none, self.logprobs))


@on_engines(2, timeout=500)
def test_changes_of_fsdp2_are_sent(path: Path) -> None:
    """`requires_grad_(False)` freezes; the optimizer has all parameters, as usual."""
    model = sharded_models.from_config(path)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for module in ends:
        module.requires_grad_(False)
    rollout = {"tp_size": 2, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, **INCREMENTAL}
    engine = HybridEngine(model=model, rollout_config=rollout, train_config={})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    vocab_size = ends[0].num_embeddings

    def step() -> None:
        batch = {name: tensor % vocab_size for name, tensor in token_batch(dist.get_rank(), 2, 16).items()}
        optimizer.zero_grad()
        (-label_log_probs(model(batch["tokens"]).logits, batch["labels"]).mean()).backward()
        optimizer.step()

    def unfreeze() -> None:
        ends[0].requires_grad_(True)
        step()
        ends[0].requires_grad_(False)  # before any switch, which must still send the change

    def load() -> None:
        model.load_state_dict({name: tensor.detach() * 2 for name, tensor in model.state_dict().items()})

    def write_unseen() -> None:
        ends[1].weight.data.to_local().copy_(ends[1].weight.data.to_local() + 1)

    rounds = Rounds(engine, lambda: sharded_models.save(model, path, torch.float32), path)
    rounds.check_kept_weights(step)
    rounds.run(write_unseen)
    rounds.run(unfreeze)
    assert rounds.run(load).bytes_skipped == 0
    engine.shutdown()


@on_engines(2, timeout=500)
def test_the_base_of_adapters_is_kept(path: Path, tmp_path: Path) -> None:
    """LoRA is delivered separately: vLLM's base weights equal the first round's, to which LoRA adds nothing yet."""
    actor = {**TP2, "lora": {"rank": 8}}
    worker = workers.build_worker(path, actor, {**INFER_TP2, **INCREMENTAL, "lora_delivery": "adapter"})
    base = tmp_path / "base"

    def save_once() -> None:
        if worker.train.version == 0:
            worker.save_hf_checkpoint(base)

    def step() -> None:
        worker.update(workers.batch(seed=0), workers.cross_entropy)

    Rounds(worker, save_once, base, worker.adapter).check_kept_weights(step)
    worker.shutdown()
