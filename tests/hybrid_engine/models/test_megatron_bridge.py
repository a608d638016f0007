"""Layouts by conventional names, compared with Megatron-Bridge's own import and export, bit by bit.

    python -m tests.hybrid_engine.models.test_megatron_bridge DIRECTORY     # a rank of the test

Every element of a checkpoint has its own number as value. Real: Megatron-Bridge's providers, import
and export; megatron-core's models; gloo. Mocked: Transformer Engine, which has parameters alone.

Megatron-Bridge is in no lock: its wheel asks for Python 3.12 and Transformer Engine. See INSTALL.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hybrid_engine.models import TABLES, table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import REPO_ROOT, of_all_ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.megatron import mock_transformer_engine
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo.families import TRAIN_KEYS, read_config, tiny_config, write_config

INSTALL = (
    "pip install --no-deps --ignore-requires-python --target DIR "
    "megatron-core==0.19.2 megatron-bridge==0.6.2 "
    "omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.2, and "
    f"PYTHONPATH=DIR:{REPO_ROOT}/tests/harness/typing_override"
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason=INSTALL),
]

NUM_RANKS = 4
DENSE = ("", "tp4", "tp2 pp2 vpp2")
EXPERTS = ("", "tp4 etp4", "tp2 ep2 etp2", "tp2 pp2 vpp2 ep2 etp1")
# megatron-core refuses biases of experts with ETP.
EXPERTS_WITH_BIASES = ("", "tp4 ep4 etp1", "tp2 pp2 vpp2 ep2 etp1")


@dataclass(frozen=True)
class Model:
    """A model, and training layouts of four ranks; the other ranks are data parallel."""

    config: Values
    layouts: tuple[str, ...]
    # Multi-token prediction is in no class of transformers.
    changes: Values = field(
        default_factory=lambda: {"num_nextn_predict_layers": 0, "num_key_value_heads": 4}
    )


def four_layers(family: str) -> Values:
    return tiny_config(family, num_hidden_layers=4)


MODELS = {
    "Mistral": Model(small_config("MistralForCausalLM"), DENSE),
    "Llama": Model(four_layers("llama"), DENSE),
    "Qwen2": Model(four_layers("qwen2"), DENSE),
    "Qwen3": Model(four_layers("qwen3"), DENSE),
    "Qwen3-MoE": Model(four_layers("qwen3_moe"), EXPERTS),
    "GLM-4.5": Model(small_config("Glm4MoeForCausalLM"), EXPERTS),
    "GLM-4.7-Flash": Model(small_config("Glm4MoeLiteForCausalLM"), EXPERTS),
    "gpt-oss": Model(small_config("GptOssForCausalLM"), EXPERTS_WITH_BIASES),
    "DeepSeek-V2": Model(four_layers("deepseek_v2"), EXPERTS),
    "DeepSeek-V3": Model(four_layers("deepseek_v3"), EXPERTS),
}


def write_numbers(directory: Path, model: Model) -> None:
    """Write a checkpoint in which every element has another value."""
    config = {**model.config, **model.changes}
    write_config(directory, config)
    tensors = {}
    start = 1
    for name, shape in table_for(config).shapes.items():
        numel = math.prod(shape)
        tensors[name] = torch.arange(start, start + numel, dtype=torch.float32).reshape(shape)
        start += numel
    assert start <= 2**24, "float32 is not exact"
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def sizes_of(layout: str) -> dict[str, int]:
    words = [(word.rstrip("0123456789"), word) for word in layout.split()]
    return {TRAIN_KEYS[name]: int(word.removeprefix(name)) for name, word in words}


@pytest.mark.timeout(1800)
def test_megatron_bridge_imports_and_exports_the_same_elements(tmp_path: Path) -> None:
    for name, model in MODELS.items():
        write_numbers(tmp_path / name, model)
    ended = run_ranks(["-m", __name__, str(tmp_path)], NUM_RANKS, 1700)
    assert ended.status == 0, ended.output
    print(ended.output)


def compare(directory: Path, sizes: Values) -> int:
    """Compare a model in a layout; return the number of this rank's parameters and expert biases.

    Args:
        directory: checkpoint whose elements differ from each other.
        sizes: parallel sizes, by their names in TransformerConfig.
    """
    from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
    from hybrid_engine.backends.megatron.model_tensors import ModelTensors
    from tests.zoo.megatron_models import region_slices, view_of

    checkpoint = load_file(directory / "model.safetensors")
    bridge, chunks = built(directory, sizes)
    adaptor = MegatronAdaptor(ModelTensors(chunks, table_for(read_config(directory))))
    tensors = {
        f"{number}.{name}": tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
        if isinstance(tensor, torch.nn.Parameter)
        or (name.endswith("expert_bias") and tensor is not None)
    }
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
        for shard in adaptor.layout().shards:
            part = checkpoint[shard.region.tensor].reshape(
                adaptor.layout().tensors[shard.region.tensor]
            )
            view_of(adaptor.buffers(), shard).copy_(part[region_slices(shard)])
        by_records = {name: tensor.clone() for name, tensor in tensors.items()}
        exported = exported_by(bridge, chunks)
        for name, values in exported.items():
            num_rows = len(checkpoint[name])
            # Megatron-Bridge exports the rows that pad the vocabulary.
            assert torch.equal(values[:num_rows].float(), checkpoint[name]), name
            assert not values[num_rows:].any(), name
        assert exported.keys() == checkpoint.keys()
        for tensor in tensors.values():
            tensor.zero_()
        bridge.load_hf_weights(chunks)
    assert [
        name for name, tensor in tensors.items() if not torch.equal(tensor, by_records[name])
    ] == []
    return len(tensors)


def built(directory: Path, sizes: Values) -> tuple[Any, list[torch.nn.Module]]:
    """Return the bridge for a config, and the chunks of this rank, built by its provider."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(directory), torch_dtype=torch.float32)
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
    return bridge, provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True
    )


def exported_by(bridge: Any, chunks: list[torch.nn.Module], **settings: Any) -> TensorDict:
    return dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False, **settings))


def start() -> None:
    """Mock Transformer Engine and join the process group."""
    mock_transformer_engine.install()
    # The first that computes attention sinks.
    sys.modules["transformer_engine"].__version__ = "2.8.0"  # type: ignore[attr-defined]
    import megatron_patches
    from hybrid_engine.ranks.job import join_process_group

    join_process_group(120)
    megatron_patches.apply()


def main(root: str) -> None:
    """Compare all models in all layouts; a difference ends this rank."""
    start()
    from hybrid_engine.trainer.megatron.build import destroy_parallel_state

    TABLES.clear()
    for name, model in MODELS.items():
        for layout in model.layouts:
            print(f"{name}: {layout}")
            num_parameters = sum(of_all_ranks(compare(Path(root, name), sizes_of(layout))))
            assert num_parameters > NUM_RANKS * 10
            if dist.get_rank() == 0:
                print(f"{num_parameters} parameters of {NUM_RANKS} ranks, 0 different")
            destroy_parallel_state()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
