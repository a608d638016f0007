"""A rank that compares the sums of weights and Megatron-Bridge's adapters with its own export.

    python -m tests.hybrid_engine.models.bridge_lora_ranks CASES OUT

Real: Megatron-Bridge's providers, adapters, and export, which merges them; megatron-core's models;
gloo. Mocked: Transformer Engine, which has parameters alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.values import Values
from tests.hybrid_engine.models.bridge_ranks import built, compare_all, start


@dataclass
class SumComparison:
    """Comparison on one rank.

    Attributes:
        num_equal: canonical tensors of which this rank holds parts that are bitwise the exported
        ones. different: the others, with the largest difference. num_sums: weights of this rank
        that Megatron-Bridge's LoRAMerge merges to the same bits. different_sums: names of those
        that it merges otherwise. changed: modules of the canonical tensors that adapters change.
        origins: number of the model's tensors behind the canonical tensors that adapters change.
        refusals: violations of adapters that cannot be merged, as (key, problem). is_changed:
        whether a disabled adapter, and another matrix with the same values, are noticed. not_reset:
        matrices B that are not zero once a checkpoint is loaded.
    """

    num_equal: int = 0
    different: dict[str, float] = field(default_factory=dict)
    num_sums: int = 0
    different_sums: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    is_changed: list[bool] = field(default_factory=list)
    not_reset: list[str] = field(default_factory=list)


def compare(directory: Path, sizes: Values, method: str, settings: Values) -> SumComparison:
    """Compare one model in one layout.

    Args:
        directory: the model's config.
        sizes: parallel sizes, by their names in TransformerConfig.
        method: class of `megatron.bridge.peft`.
        settings: its arguments.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft import canonical_lora, dora, lora, utils

    from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
    from hybrid_engine.backends.megatron.live_model import unsupported_adapters
    from hybrid_engine.backends.megatron.model_tensors import ModelTensors
    from hybrid_engine.errors import ConfigError
    from hybrid_engine.models import table_for
    from tests.zoo.families import read_config
    from tests.zoo.megatron_models import region_slices, view_of

    table = table_for(read_config(directory))
    bridge = AutoBridge.from_hf_pretrained(str(directory), torch_dtype=torch.float32)
    chunks = built(bridge, sizes)
    # The mock is not an installed distribution, whose version would be read.
    utils.version = lambda _: "2.8.0"  # type: ignore[attr-defined]
    classes = {"LoRA": lora.LoRA, "CanonicalLoRA": canonical_lora.CanonicalLoRA, "DoRA": dora.DoRA}
    classes[method](dim=4, alpha=10, **settings)(chunks, training=True)
    result = SumComparison()
    if violations := [*unsupported_adapters(chunks)]:
        result.refusals = [(violation.key, violation.problem) for violation in violations]
        with pytest.raises(ConfigError) as caught:
            ModelTensors(chunks, table)
        assert list(caught.value.findings) == violations
        return result
    fill(chunks, 0.3)
    adaptor = MegatronAdaptor(ModelTensors(chunks, table))
    adaptor.prepare()
    exported = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
    layout = adaptor.layout()
    held = {}
    for shard in layout.shards:
        name = shard.region.tensor
        # Megatron-Bridge exports the rows that pad the vocabulary.
        whole = exported[name][: table.shapes[name][0]].reshape(layout.tensors[name])
        difference = (view_of(adaptor.buffers(), shard) - whole[region_slices(shard)]).abs().max()
        held[name] = max(held.get(name, 0.0), float(difference))
    result.num_equal = sum(not difference for difference in held.values())
    result.different = {name: difference for name, difference in held.items() if difference}
    stored, shown = dict(adaptor.model.named_weights()), dict(adaptor.shown_weights())
    for name, merged in merged_weights(chunks, stored):
        if torch.equal(shown[name], merged):
            result.num_sums += 1
        else:
            result.different_sums.append(name)
    unmerged = bridge.export_hf_weights(
        chunks, cpu=True, show_progress=False, merge_adapter_weights=False
    )
    base = {name.replace(".base_layer", ""): values for name, values in unmerged}
    changed = [name for name in held if not torch.equal(base[name], exported[name])]
    result.changed = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in changed})
    result.origins = sorted({len(adaptor.origins()[name]) for name in changed})
    assert not adaptor.model.adapters_changed()
    changed_layer = next(
        module for module in chunks[0].modules() if hasattr(module, "disable_adapter_layers")
    )
    changed_layer.disable_adapter_layers()
    result.is_changed.append(adaptor.model.adapters_changed())
    changed_layer.enable_adapter_layers()
    with replaced_matrix(changed_layer):
        result.is_changed.append(adaptor.model.adapters_changed())
    adaptor.base.finish_loading()
    for name, parameter in chunks[0].named_parameters():
        if name.endswith("linear_out.weight") and parameter.any():
            result.not_reset.append(name)
    return result


@contextmanager
def replaced_matrix(layer: Any) -> Iterator[None]:
    """Give the first adapter of a layer another A with the same values, for the block."""
    linear = next(
        module for name, module in layer.adapter.named_modules() if name.endswith("linear_in")
    )
    before = linear.weight
    linear.weight = torch.nn.Parameter(before.detach().clone())
    yield
    linear.weight = before


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


if __name__ == "__main__":
    start()
    compare_all(compare, *sys.argv[1:])
