"""A rank that computes with Megatron-Bridge's adapters on megatron-core's layers, and without them.

    python -m tests.hybrid_engine.models.attached_bridge_lora trained OUT
    python -m tests.hybrid_engine.models.attached_bridge_lora merged OUT MODEL

trained: on a user's own model, with rollouts by vLLM
merged: not trained; the model computes with the sums in place of its weights

Real: Megatron-Bridge's adapters and their training, megatron-core's layers, vLLM. Mocked:
Transformer Engine, which Megatron-Bridge imports.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.values import Values
from tests.hybrid_engine.backends.megatron import mock_transformer_engine

NUM_ROUNDS = 2
TOKENS = torch.arange(16).view(2, 8) % 13
LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
GENERATE = {
    **{"max_model_len": 16, "max_num_seqs": 8, "kv_cache_mb": 16, "bucket_mb": 1},
    **{"verify": "full", "incremental": "auto"},
}


SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, Values] = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 etp2": SPLIT,
    "tp2 ep2 etp1": {**SPLIT, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}


@contextmanager
def methods(left_out: str = "") -> Iterator[tuple[Any, Any]]:
    """Yield Megatron-Bridge's LoRA and CanonicalLoRA, which can be applied in the block, of all
    layers but one.
    """
    from megatron.core import tensor_parallel  # before the mock: megatron-core must compute  # noqa: F401

    with mock_transformer_engine.importable():
        from megatron.bridge.peft import utils
        from megatron.bridge.peft.canonical_lora import CanonicalLoRA
        from megatron.bridge.peft.lora import LoRA
    with mock.patch.object(utils, "HAVE_TE", False):
        lora, canonical = (
            LoRA(target_modules=LAYERS, dim=4, alpha=12),
            CanonicalLoRA(dim=4, alpha=12),
        )
        for method in (lora, canonical):
            method.target_modules = [layer for layer in method.target_modules if layer != left_out]
        yield lora, canonical


def adapted_model() -> tuple[Any, Any, TensorDict]:
    """Return the example's model, TP=2, with adapters, its optimizer, and the frozen weights'
    values.
    """
    from examples import bring_your_own_megatron as example

    wrap = example.DistributedDataParallel
    torch.manual_seed(0)
    with (
        methods() as (lora, _),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(
            example,
            "DistributedDataParallel",
            lambda config, ddp, model: wrap(config, ddp, lora(model, training=True)),
        ),
    ):
        model, optimizer = example.build_my_model()
    frozen = {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if not tensor.requires_grad
    }
    assert all(
        (".adapter." not in name) == (name in frozen) for name, _ in model.named_parameters()
    )
    return model, optimizer, frozen


@dataclass
class TrainedAdapters:
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


def trained() -> TrainedAdapters:
    """Train and switch `NUM_ROUNDS` times."""
    import hybrid_engine
    from examples import bring_your_own_megatron as example
    from hybrid_engine.errors import ReshardError

    hybrid_engine.prepare()
    model, optimizer, frozen = adapted_model()
    engine = hybrid_engine.attach(model, optimizer, {**example.CONFIG, "generate_config": GENERATE})
    layers = [module for module in model.modules() if hasattr(module, "disable_adapter_layers")]
    result = TrainedAdapters(num_layers=len(layers))
    result.summed = [
        name for name, tensors in engine.train.weights.origins().items() if len(tensors) == 3
    ]
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


def merged(directory: Path) -> dict[str, tuple[float, float]]:
    """Map layouts and methods to the largest differences of log-probabilities.

    The differences of a model with adapters: from the model with sums, and from the model without
    adapters.
    """
    from hybrid_engine.models import table_for
    from tests.hybrid_engine.models.bridge_lora_ranks import fill
    from tests.zoo.families import read_config
    from tests.zoo.megatron_models import actor_config, parallel_state_of

    config = read_config(directory)
    table = table_for(config)
    gaps = {}
    for (layout, sizes), number in itertools.product(LAYOUTS.items(), range(2)):
        actor = actor_config(**sizes)
        # Expert tensor parallelism splits the columns of `linear_fc2`.
        with (
            parallel_state_of(actor),
            methods("linear_fc2" if layout == "tp2 etp2" else "") as applied,
        ):
            from hybrid_engine.backends.megatron.live_model import LiveModel
            from hybrid_engine.trainer.megatron.build import build_model

            chunks, _ = build_model(actor, table, config, dist.get_world_size())
            method = applied[number]
            method(chunks, training=True)
            fill(chunks, 0.2)
            weights = LiveModel(chunks, None, table).weights
            with_adapters = log_probs_of(chunks[0])
            layers = [
                module
                for module in chunks[0].modules()
                if hasattr(module, "disable_adapter_layers")
            ]
            weights.prepare()
            set_enabled(layers, False)
            base = log_probs_of(chunks[0])
            with torch.no_grad():
                for (_, stored), (_, shown) in zip(
                    weights.model.named_weights(), weights.shown_weights(), strict=True
                ):
                    stored.copy_(shown)
            with_sums = log_probs_of(chunks[0])
            differences = [
                float((with_adapters - other).abs().max()) for other in (with_sums, base)
            ]
            gaps[f"{layout}, {type(method).__name__}"] = (differences[0], differences[1])
    return gaps


def log_probs_of(model: torch.nn.Module) -> torch.Tensor:
    from hybrid_engine.backends.megatron import forward_probe

    return forward_probe.probe([model], 14, TOKENS).log_probs


def set_enabled(layers: list[Any], is_enabled: bool) -> None:
    for layer in layers:
        (layer.enable_adapter_layers if is_enabled else layer.disable_adapter_layers)()


def main(name: str, out: str, *directory: str) -> None:
    from hybrid_engine.ranks.job import join_process_group

    join_process_group(120)
    by_rank = [None] * dist.get_world_size()
    result = asdict(trained()) if name == "trained" else merged(Path(*directory))
    dist.all_gather_object(by_rank, result)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(by_rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
