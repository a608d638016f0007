"""A rank that compares Megatron's parameters, filled by records, with Megatron-Bridge.

    python -m tests.hybrid_engine.models.bridge_ranks CASES OUT

Every element of a checkpoint has its own number as value. Real: Megatron-Bridge's providers, import
and export; megatron-core's models; gloo. Mocked: Transformer Engine, which has parameters alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.harness.values import Values
from tests.hybrid_engine.backends.megatron import mock_transformer_engine

EXPERT_BIAS = "expert_bias"


@dataclass
class Comparison:
    """Comparison on one rank.

    Attributes:
        num_imported: parameters, and biases of routers, that Megatron-Bridge imported.
        imported_differently: those that records fill otherwise.
        exported: tensors that Megatron-Bridge exported, after records filled the parameters.
        exported_differently: those that are not the checkpoint's.
    """

    num_imported: int = 0
    imported_differently: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    exported_differently: list[str] = field(default_factory=list)


def compare(directory: Path, sizes: Values) -> Comparison:
    """Compare one model in one layout.

    Args:
        directory: checkpoint whose elements differ from each other.
        sizes: parallel sizes, by their names in TransformerConfig.
    """
    from megatron.bridge import AutoBridge

    from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
    from hybrid_engine.backends.megatron.model_tensors import ModelTensors
    from hybrid_engine.models import table_for
    from tests.zoo.families import read_config
    from tests.zoo.megatron_models import region_slices, view_of

    checkpoint = load_file(directory / "model.safetensors")
    table = table_for(read_config(directory))
    bridge = AutoBridge.from_hf_pretrained(str(directory), torch_dtype=torch.float32)
    chunks = built(bridge, sizes)
    adaptor = MegatronAdaptor(ModelTensors(chunks, table))
    tensors = {
        f"{number}.{name}": tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
        if isinstance(tensor, torch.nn.Parameter)
        or (name.endswith(EXPERT_BIAS) and tensor is not None)
    }
    result = Comparison()
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
        for shard in adaptor.layout().shards:
            part = checkpoint[shard.region.tensor].reshape(
                adaptor.layout().tensors[shard.region.tensor]
            )
            view_of(adaptor.buffers(), shard).copy_(part[region_slices(shard)])
        by_records = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, values in bridge.export_hf_weights(chunks, cpu=True, show_progress=False):
            result.exported.append(name)
            num_rows = len(checkpoint[name])
            # Megatron-Bridge exports the rows that pad the vocabulary.
            if (
                not torch.equal(values[:num_rows].float(), checkpoint[name])
                or values[num_rows:].any()
            ):
                result.exported_differently.append(name)
        for tensor in tensors.values():
            tensor.zero_()
        bridge.load_hf_weights(chunks)
    for name, tensor in tensors.items():
        result.num_imported += 1
        if not torch.equal(tensor, by_records[name]):
            result.imported_differently.append(name)
    return result


def built(bridge: Any, sizes: Values) -> list[torch.nn.Module]:
    """Return the chunks of this rank, built by Megatron-Bridge's provider."""
    provider = bridge.to_megatron_provider(load_weights=False)
    values = {
        **sizes,
        "sequence_parallel": sizes.get("tensor_model_parallel_size", 1) > 1,
        # Without tensor parallelism Megatron-Bridge imports no padded vocabulary: 130 tokens need
        # none then.
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 2,
        "pipeline_dtype": torch.float32,
        # These need a GPU.
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    provider.apply_overrides_and_finalize(torch.float32, values)
    provider.initialize_model_parallel(seed=0)
    return provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def start() -> None:
    """Mock Transformer Engine and join the process group."""
    mock_transformer_engine.install()
    # The first that computes attention sinks.
    sys.modules["transformer_engine"].__version__ = "2.8.0"  # type: ignore[attr-defined]
    import megatron_patches
    from hybrid_engine.ranks.job import join_process_group

    join_process_group(120)
    megatron_patches.apply()


def compare_all(compare_case: Callable[..., Any], job: str, out: str) -> None:
    """Compare the cases in file `job`; rank 0 writes the results, by case and rank, to file `out`.

    `compare_case`: called with the directory of a case's model and its other values.
    """
    from hybrid_engine.trainer.megatron.build import destroy_parallel_state

    results = {}
    for name, (directory, *case) in json.loads(Path(job).read_text()).items():
        comparison = compare_case(Path(directory), *case)
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, asdict(comparison))
        results[name] = by_rank
        destroy_parallel_state()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


def main(job: str, out: str) -> None:
    start()
    from hybrid_engine.models import TABLES

    TABLES.clear()
    compare_all(compare, job, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
