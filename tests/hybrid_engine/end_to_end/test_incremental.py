"""Incremental switches with real engines and a frozen embedding and head: vLLM is right, also with
kept weights.

What is sent is counted in switch/test_incremental.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
PROMPT = [list(range(2, 14))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose embedding and head take 0.27 MB each, and its 4 layers 0.5 MB."""
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=528)


@on_engines(2, timeout=500)
def test_changes_of_fsdp2_are_sent(path: Path) -> None:
    """`requires_grad_(False)` freezes; the optimizer has all parameters, as usual."""
    model = sharded_models.from_config(path)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for module in ends:
        module.requires_grad_(False)
    rollout = {
        "tp_size": 2,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_mb": 16,
        **INCREMENTAL,
    }
    engine = HybridEngine(model=model, rollout_config=rollout, train_config={})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    vocab_size = ends[0].num_embeddings

    def step() -> None:
        batch = {
            name: tensor % vocab_size
            for name, tensor in token_batch(dist.get_rank(), 2, 16).items()
        }
        optimizer.zero_grad()
        (-label_log_probs(model(batch["tokens"]).logits, batch["labels"]).mean()).backward()
        optimizer.step()

    def unfreeze() -> None:
        ends[0].requires_grad_(True)
        step()
        ends[0].requires_grad_(False)  # before any switch, which must still send the change

    def load() -> None:
        model.load_state_dict(
            {name: tensor.detach() * 2 for name, tensor in model.state_dict().items()}
        )

    def write_unseen() -> None:
        ends[1].weight.data.to_local().copy_(ends[1].weight.data.to_local() + 1)

    committed: TensorDict = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        committed[name] = tensor.detach().clone()

    def roll_out(*actions: Callable[[], object]) -> tuple[ReshardReport, list[torch.Tensor]]:
        """Switch after `actions` in `train_context`, and compare vLLM's weights with its own load
        of the trained ones.

        Returns:
            What was sent, and vLLM's distributions over a prompt.
        """
        with engine.train_context():
            for action in actions:
                action()
            sharded_models.save(model, path, torch.float32)
        with engine.inference.adaptor.observed(keep), engine.rollout_context():
            native = native_parameters(engine.inference, str(path))
            logprobs = engine.inference.prompt_distributions(PROMPT)
        assert committed.keys() == native.keys()
        assert [
            name for name, tensor in native.items() if not torch.equal(tensor, committed[name])
        ] == []
        return engine.sharding.last_report, logprobs

    first, _ = roll_out()
    roll_out(step)
    _, of_sent = roll_out(step)
    none, of_kept = roll_out()
    assert none.bytes_own + none.bytes_received == 0
    assert none.bytes_skipped == first.bytes_own + first.bytes_received
    _, of_sent_again = roll_out(engine.sharding._of_rank.incremental.forget)
    for logprobs in (of_kept, of_sent_again):
        assert all(map(torch.equal, of_sent, logprobs))
    roll_out(write_unseen)
    roll_out(unfreeze)
    assert roll_out(load)[0].bytes_skipped == 0
    engine.shutdown()
