"""A rank that trains Megatron-Bridge's adapters on a user's own model, and generates by vLLM.

    python -m tests.hybrid_engine.models.attached_bridge_lora OUT

Real: Megatron-Bridge's adapters and their training, megatron-core's layers, vLLM. Mocked:
Transformer Engine, which Megatron-Bridge imports.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.hybrid_engine.backends.megatron import mock_transformer_engine

NUM_ROUNDS = 2
TOKENS = torch.arange(16).view(2, 8) % 13
LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
GENERATE = {
    **{"max_model_len": 16, "max_num_seqs": 8, "kv_cache_mb": 16, "bucket_mb": 1},
    **{"verify": "full", "incremental": "auto"},
}


def adapted_model() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Return the example's model, TP=2, with adapters, its optimizer, and the frozen weights' values."""
    from examples import bring_your_own_megatron as example

    with mock_transformer_engine.importable():
        from megatron.bridge.peft import utils
        from megatron.bridge.peft.lora import LoRA
    wrap = example.DistributedDataParallel
    lora = LoRA(target_modules=LAYERS, dim=4, alpha=12)
    torch.manual_seed(0)
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(utils, "HAVE_TE", False),
        mock.patch.object(
            example, "DistributedDataParallel", lambda config, ddp, model: wrap(config, ddp, lora(model, training=True))
        ),
    ):
        model, optimizer = example.build_my_model()
    frozen = {name: tensor.detach().clone() for name, tensor in model.named_parameters() if not tensor.requires_grad}
    assert all((".adapter." not in name) == (name in frozen) for name, _ in model.named_parameters())
    return model, optimizer, frozen


@dataclass
class Adapted:
    """Results of one rank.

    Attributes:
        losses: after the steps of each round.
        gaps: largest difference between log-probabilities of Megatron and vLLM, by round.
        base_gaps: the same, with the adapters disabled in Megatron.
        read, skipped: bytes of each switch.
        num_layers: number of layers with adapters.
        summed: canonical tensors that are sums.
        changed: frozen parameters that training or switches changed.
        refused: code of the error of a switch with disabled adapters.
    """

    losses: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    base_gaps: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    num_layers: int = 0
    summed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    refused: str = ""


def trained() -> Adapted:
    """Train and switch `NUM_ROUNDS` times."""
    import hybrid_engine
    from examples import bring_your_own_megatron as example
    from hybrid_engine.errors import ReshardError

    hybrid_engine.prepare()
    model, optimizer, frozen = adapted_model()
    engine = hybrid_engine.attach(model, optimizer, {**example.CONFIG, "generate_config": GENERATE})
    layers = [module for module in model.modules() if hasattr(module, "disable_adapter_layers")]
    result = Adapted(num_layers=len(layers))
    result.summed = [name for name, tensors in engine.train.weights.origins().items() if len(tensors) == 3]
    for _ in range(NUM_ROUNDS):
        with engine.train_context():
            result.losses.append(example.train(model, optimizer, 4))
            expected = log_probs_of(model)
            set_enabled(layers, False)
            base = log_probs_of(model)
            with pytest.raises(ReshardError) as caught:
                engine.train.weights.prepare()
            result.refused = caught.value.code
            set_enabled(layers, True)
        with engine.rollout_context():
            log_probs = torch.stack(engine.inference.prompt_logprobs(TOKENS.tolist()))
        result.gaps.append(float((log_probs - expected).abs().max()))
        result.base_gaps.append(float((log_probs - base).abs().max()))
        report = engine.sharding.last_report
        result.read.append(report.bytes_own + report.bytes_received)
        result.skipped.append(report.bytes_skipped)
    with engine.train_context():
        for name, tensor in model.named_parameters():
            if name in frozen and not torch.equal(tensor, frozen[name]):
                result.changed.append(name)
    engine.shutdown()
    return result


def log_probs_of(model: torch.nn.Module) -> torch.Tensor:
    from hybrid_engine.backends.megatron import forward_probe

    return forward_probe.probe([model], 14, TOKENS).log_probs


def set_enabled(layers: list[Any], is_enabled: bool) -> None:
    for layer in layers:
        (layer.enable_adapter_layers if is_enabled else layer.disable_adapter_layers)()


def main(out: str) -> None:
    from hybrid_engine.ranks.job import join_process_group

    join_process_group(120)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, asdict(trained()))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(by_rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
