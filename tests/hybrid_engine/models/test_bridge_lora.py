"""Sums of weights and Megatron-Bridge's adapters, compared with its own merge, bit by bit.

    python -m tests.hybrid_engine.models.test_bridge_lora DIRECTORY     # a rank that compares sums

Real: Megatron-Bridge's providers, adapters, their training, and export, which merges them;
megatron-core's layers; gloo; vLLM. Mocked: Transformer Engine, which Megatron-Bridge imports, and
which has parameters alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.tools.launching import run_ranks
from tests.harness.errors import refused
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.megatron import mock_transformer_engine
from tests.hybrid_engine.models.test_megatron_bridge import (
    INSTALL,
    MODELS,
    built,
    exported_by,
    sizes_of,
    start,
    write_numbers,
)
from tests.zoo.families import read_config, tiny_config

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason=INSTALL),
]

LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
CANONICAL = [
    "linear_q",
    "linear_k",
    "linear_v",
    "linear_proj",
    "linear_fc1_up",
    "linear_fc1_gate",
    "linear_fc2",
]
PROJECTIONS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@dataclass(frozen=True)
class BridgeCase:
    """A model with adapters, on two ranks.

    Attributes:
        model: key of MODELS.
        layout: of the ranks.
        method: of Megatron-Bridge.
        settings: its arguments.
        changes: further values of Megatron's configuration.
        changed: modules of a checkpoint that adapters change.
        num_sums: weights of a rank with one adapter each.
    """

    model: str
    layout: str
    num_sums: int
    method: str = "LoRA"
    settings: Values = field(default_factory=lambda: {"target_modules": LAYERS})
    changes: Values = field(default_factory=dict)
    changed: tuple[str, ...] = tuple(PROJECTIONS)


EACH = {"target_modules": LAYERS, "share_expert_adapters": False}
SEQUENTIAL = {"moe_grouped_gemm": False}
WITH_ROUTER = {
    "settings": {"target_modules": [*LAYERS, "router"]},
    "changed": (PROJECTIONS[0], "gate", *PROJECTIONS[1:]),
}
CASES = {
    "column and row parallel": BridgeCase("Qwen3", "tp2", 16),
    "canonical": BridgeCase("Qwen3", "tp2", 8, "CanonicalLoRA", {"target_modules": CANONICAL}),
    "one adapter for all experts": BridgeCase("Qwen3-MoE", "ep2", 24, **WITH_ROUTER),
    "one adapter for each expert": BridgeCase("Qwen3-MoE", "ep2", 24, settings=EACH),
}
# Megatron-Bridge's export of the parts of experts does not undo their split over ranks as their
# modules compute, so that only its LoRAMerge is compared there.
ONLY_MERGED = {
    "experts over tensor parallel ranks": BridgeCase(
        "Qwen3-MoE", "tp2 etp2", 24, settings={"target_modules": LAYERS[:3]}
    ),
    "each expert over tensor parallel ranks": BridgeCase(
        "Qwen3-MoE", "tp2 etp2", 24, settings={**EACH, "target_modules": LAYERS[:3]}
    ),
    "modules of experts, tensor parallel": BridgeCase(
        "Qwen3-MoE", "tp2 etp2", 24, settings={"target_modules": LAYERS[:3]}, changes=SEQUENTIAL
    ),
    "modules of experts": BridgeCase("Qwen3-MoE", "ep2", 24, changes=SEQUENTIAL),
}
PARTIAL = "its adapter applies B to a part of A x: ranks sum the layer's outputs outside of it"
REFUSED = {
    "DoRA": (BridgeCase("Qwen3", "tp2", 0, "DoRA"), 16, "a switch does not merge its DoRALinear"),
    "shared outer": (
        BridgeCase(
            "Qwen3-MoE",
            "ep2",
            0,
            settings={"target_modules": LAYERS, "experts_shared_outer_loras": True},
        ),
        8,
        "its adapter is a SharedOuterGroupedExpertAdapter",
    ),
    "columns of experts": (BridgeCase("Qwen3-MoE", "tp2 etp2", 0), 4, PARTIAL),
    "columns of each expert": (BridgeCase("Qwen3-MoE", "tp2 etp2", 0, settings=EACH), 4, PARTIAL),
    "router, by sequence": (
        BridgeCase(
            "Qwen3-MoE",
            "tp2 etp1",
            0,
            settings={"target_modules": ["router"]},
            changes={"sequence_parallel": True},
        ),
        4,
        "its adapter mixes tokens: the ranks that share A x have different ones "
        "(sequence_parallel)",
    ),
    "columns of modules of experts": (
        BridgeCase("Qwen3-MoE", "tp2 etp2", 0, changes=SEQUENTIAL),
        16,
        PARTIAL,
    ),
}


@pytest.mark.engines
def test_sums_are_those_of_megatron_bridge(tmp_path: Path) -> None:
    """Other adapters are refused by name."""
    for name in ("Qwen3", "Qwen3-MoE"):
        write_numbers(tmp_path / name, MODELS[name])
    ended = run_ranks(["-m", __name__, str(tmp_path)], 2, 500)
    assert ended.status == 0, ended.output


def main(root: str) -> None:
    """Compare all cases; a difference ends this rank."""
    start()
    from hybrid_engine.trainer.megatron.build import destroy_parallel_state

    for name, case in {**CASES, **ONLY_MERGED}.items():
        print(name)
        check_sums(case, Path(root, case.model), is_exported=name in CASES)
        destroy_parallel_state()
    for name, (case, num_refusals, problem) in REFUSED.items():
        print(name)
        check_refusals(case, Path(root, case.model), [problem] * num_refusals)
        destroy_parallel_state()
    dist.destroy_process_group()


def adapted(case: BridgeCase, directory: Path) -> tuple[Any, list[torch.nn.Module]]:
    """Return Megatron-Bridge's bridge for a config, and the chunks of this rank with adapters."""
    from megatron.bridge.peft import canonical_lora, dora, lora, utils

    bridge, chunks = built(directory, {**sizes_of(case.layout), **case.changes})
    # The mock is not an installed distribution, whose version would be read.
    utils.version = lambda _: "2.8.0"  # type: ignore[attr-defined]
    classes = {"LoRA": lora.LoRA, "CanonicalLoRA": canonical_lora.CanonicalLoRA, "DoRA": dora.DoRA}
    classes[case.method](dim=4, alpha=10, **case.settings)(chunks, training=True)
    return bridge, chunks


def check_refusals(case: BridgeCase, directory: Path, problems: list[str]) -> None:
    from hybrid_engine.backends.megatron.live_model import unsupported_adapters
    from hybrid_engine.backends.megatron.model_tensors import ModelTensors
    from hybrid_engine.errors import ConfigError
    from hybrid_engine.models import table_for

    _, chunks = adapted(case, directory)
    violations = list(unsupported_adapters(chunks))
    assert [violation.problem for violation in violations] == problems
    assert all(
        violation.key.startswith("model_chunks[0]: decoder.layers.") for violation in violations
    )
    with pytest.raises(ConfigError) as caught:
        ModelTensors(chunks, table_for(read_config(directory)))
    assert list(caught.value.findings) == violations


def check_sums(case: BridgeCase, directory: Path, *, is_exported: bool) -> None:
    """Compare sums with the merge, and unless its export of experts differs also with that."""
    from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
    from hybrid_engine.backends.megatron.live_model import unsupported_adapters
    from hybrid_engine.backends.megatron.model_tensors import ModelTensors
    from hybrid_engine.models import table_for
    from tests.zoo.megatron_models import region_slices, view_of

    table = table_for(read_config(directory))
    bridge, chunks = adapted(case, directory)
    assert list(unsupported_adapters(chunks)) == []
    fill(chunks, 0.3)
    adaptor = MegatronAdaptor(ModelTensors(chunks, table))
    adaptor.prepare()
    exported = exported_by(bridge, chunks)
    layout = adaptor.layout()
    names = {shard.region.tensor for shard in layout.shards}
    different = set()
    for shard in layout.shards:
        name = shard.region.tensor
        # Megatron-Bridge exports the rows that pad the vocabulary.
        whole = exported[name][: table.shapes[name][0]].reshape(layout.tensors[name])
        if not torch.equal(view_of(adaptor.buffers(), shard), whole[region_slices(shard)]):
            different.add(name)
    assert len(names - different) > 30
    if is_exported:
        assert different == set()
    assert all(".mlp.experts." in name for name in different)
    stored, shown = dict(adaptor.model.named_weights()), dict(adaptor.shown_weights())
    merged = dict(merged_weights(chunks, stored))
    assert len(merged) == case.num_sums
    assert [name for name in merged if not torch.equal(shown[name], merged[name])] == []
    unmerged = exported_by(bridge, chunks, merge_adapter_weights=False)
    base = {name.replace(".base_layer", ""): values for name, values in unmerged.items()}
    changed = [name for name in names if not torch.equal(base[name], exported[name])]
    if is_exported:
        assert {name.removesuffix(".weight").rpartition(".")[2] for name in changed} == {
            *case.changed
        }
    # The weight and two matrices for each adapter.
    assert all(len(adaptor.origins()[name]) >= 3 for name in changed)
    check_changes(adaptor.model, chunks[0])
    adaptor.base.finish_loading()
    loaded = {
        name: tensor
        for name, tensor in chunks[0].named_parameters()
        if name.endswith("linear_out.weight")
    }
    assert [name for name, tensor in loaded.items() if tensor.any()] == []


def check_changes(tensors: Any, chunk: torch.nn.Module) -> None:
    """Check that a disabled adapter, and another matrix with the same values, are noticed."""
    assert not tensors.adapters_changed()
    layer: Any = next(
        module for module in chunk.modules() if hasattr(module, "disable_adapter_layers")
    )
    layer.disable_adapter_layers()
    assert tensors.adapters_changed()
    layer.enable_adapter_layers()
    assert not tensors.adapters_changed()
    linear = next(
        module for name, module in layer.adapter.named_modules() if name.endswith("linear_in")
    )
    weight = linear.weight
    linear.weight = torch.nn.Parameter(weight.detach().clone())
    assert tensors.adapters_changed()
    linear.weight = weight


def merged_weights(
    chunks: list[torch.nn.Module], stored: TensorDict
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in `stored`, sum by LoRAMerge) of weights with one adapter each. Collective."""
    from megatron.bridge.peft.lora_layers import LoRALinear
    from megatron.bridge.peft.lora_merge import LoRAMerge

    names = {tensor: name for name, tensor in stored.items()}
    for chunk in chunks:
        for module in chunk.modules():
            if not isinstance(module, LoRALinear):
                continue
            adapter = module.adapter
            matrices = [adapter.linear_out.weight, adapter.linear_in.weight]
            group = adapter.expert_tp_group if matrices[0].dim() == 3 else adapter.tp_group
            weights = [
                tensor for tensor in module.to_wrap.parameters(recurse=False) if tensor.dim() == 2
            ]
            for number, weight in enumerate(weights):
                b, a = (matrix[number] if matrix.dim() == 3 else matrix for matrix in matrices)
                yield (
                    names[weight],
                    LoRAMerge().merge(weight, b, a, adapter.alpha, adapter.dim, tp_group=group),
                )


def fill(chunks: list[torch.nn.Module], std: float) -> None:
    """Give every parameter random values: those of replicas are equal, those of parts are not."""
    from megatron.core import parallel_state

    seeds = {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "experts": 10 * parallel_state.get_expert_model_parallel_rank()
        + parallel_state.get_expert_tensor_parallel_rank(),
    }
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                is_split = getattr(parameter, "tensor_model_parallel", False) or ".linear_" in name
                part = seeds["experts" if ".experts." in name else "tensor"] if is_split else 0
                generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * part)
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


# -- on megatron-core's layers, which compute ------------------------------------------------------


NUM_ROUNDS = 2
TOKENS = torch.arange(16).view(2, 8) % 13
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
def methods(left_out: str = "") -> Iterator[dict[str, Any]]:
    """Yield LoRA and CanonicalLoRA of all layers but one, to apply in the block."""
    from megatron.core import tensor_parallel  # before the mock: megatron-core must compute  # noqa: F401

    with mock_transformer_engine.importable():
        from megatron.bridge.peft import utils
        from megatron.bridge.peft.canonical_lora import CanonicalLoRA
        from megatron.bridge.peft.lora import LoRA
    with mock.patch.object(utils, "HAVE_TE", False):
        applied = {
            "LoRA": LoRA(target_modules=LAYERS, dim=4, alpha=12),
            "CanonicalLoRA": CanonicalLoRA(dim=4, alpha=12),
        }
        for method in applied.values():
            method.target_modules = [layer for layer in method.target_modules if layer != left_out]
        yield applied


@contextmanager
def adapted_model() -> Iterator[tuple[Any, Any, TensorDict]]:
    """Yield the example's model, TP=2, with adapters, its optimizer, and the frozen values."""
    from tests.hybrid_engine.end_to_end.test_attached_example import built, example

    wrap = example.DistributedDataParallel
    with (
        methods() as applied,
        mock.patch.object(
            example,
            "DistributedDataParallel",
            lambda config, ddp, model: wrap(config, ddp, applied["LoRA"](model, training=True)),
        ),
        built() as (model, optimizer),
    ):
        frozen = {
            name: tensor.detach().clone()
            for name, tensor in model.named_parameters()
            if not tensor.requires_grad
        }
        assert all(
            (".adapter." not in name) == (name in frozen) for name, _ in model.named_parameters()
        )
        yield model, optimizer, frozen


def log_probs_of(model: torch.nn.Module) -> torch.Tensor:
    from hybrid_engine.backends.megatron import forward_probe

    return forward_probe.probe([model], 14, TOKENS).log_probs


def set_enabled(layers: list[Any], is_enabled: bool) -> None:
    for layer in layers:
        (layer.enable_adapter_layers if is_enabled else layer.disable_adapter_layers)()


@on_engines(2, timeout=500)
def test_adapters_of_an_attached_model_reach_vllm() -> None:
    """Train the example's own model, and switch `NUM_ROUNDS` times."""
    import hybrid_engine
    from examples import bring_your_own_megatron as example
    from hybrid_engine.errors import ReshardError

    hybrid_engine.prepare()
    with adapted_model() as (model, optimizer, frozen):
        engine = hybrid_engine.attach(
            model, optimizer, {**example.CONFIG, "generate_config": GENERATE}
        )
        layers = [module for module in model.modules() if hasattr(module, "disable_adapter_layers")]
        assert len(layers) == 16
        summed = [
            name for name, tensors in engine.train.weights.origins().items() if len(tensors) == 3
        ]
        assert {name.split(".")[-2] for name in summed} == set(PROJECTIONS)
        losses, reports = [], []
        for _ in range(NUM_ROUNDS):
            with engine.train_context():
                losses.append(example.train(model, optimizer, 4))
                expected = log_probs_of(model)
                set_enabled(layers, False)
                base = log_probs_of(model)
                with refused(ReshardError, "adapters-changed"):
                    engine.train.weights.prepare()
                set_enabled(layers, True)
            with engine.rollout_context():
                log_probs = torch.stack(engine.inference.prompt_logprobs(TOKENS.tolist()))
            assert (log_probs - expected).abs().max() < 1e-4 < 0.1 < (log_probs - base).abs().max()
            reports.append(engine.sharding.last_report)
        assert losses == sorted(losses, reverse=True)
        moved = [report.bytes_own + report.bytes_received for report in reports]
        skipped = [report.bytes_skipped for report in reports]
        assert skipped[0] == 0 < skipped[1]  # the base, which is frozen
        assert skipped[1] + moved[1] == moved[0]
        with engine.train_context():
            trained = dict(model.named_parameters())
            assert [
                name for name, tensor in frozen.items() if not torch.equal(trained[name], tensor)
            ] == []
        engine.shutdown()


@on_engines(
    {2: [f"{layout}, {method}" for layout in LAYOUTS for method in ("LoRA", "CanonicalLoRA")]},
    timeout=500,
)
def test_a_model_computes_with_sums_as_with_adapters_on_experts(case: str) -> None:
    from hybrid_engine.models import table_for
    from hybrid_engine.ranks.job import join_process_group
    from tests.zoo.megatron_models import actor_config, parallel_state_of

    join_process_group(120)
    layout, _, method = case.partition(", ")
    config = tiny_config("qwen3_moe")
    table = table_for(config)
    actor = actor_config(**LAYOUTS[layout])
    # Expert tensor parallelism splits the columns of `linear_fc2`.
    with parallel_state_of(actor), methods("linear_fc2" if layout == "tp2 etp2" else "") as applied:
        from hybrid_engine.backends.megatron.live_model import LiveModel
        from hybrid_engine.trainer.megatron.build import build_model

        chunks, _ = build_model(actor, table, config, dist.get_world_size())
        applied[method](chunks, training=True)
        fill(chunks, 0.2)
        weights = LiveModel(chunks, None, table).weights
        with_adapters = log_probs_of(chunks[0])
        layers = [
            module for module in chunks[0].modules() if hasattr(module, "disable_adapter_layers")
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
        assert (
            (with_adapters - with_sums).abs().max()
            < 1e-5
            < 0.1
            < (with_adapters - base).abs().max()
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
