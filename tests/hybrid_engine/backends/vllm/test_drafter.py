"""DeepSeek-V3's MTP layer as vLLM's drafter: traced, filled with the main model, and compared with
vLLM's own load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings, VllmAdaptor, internals
from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory
from hybrid_engine.backends.vllm.native_load import _constructed, second_model
from hybrid_engine.backends.vllm.weights.drafter import join, trace_drafter, without_drafter
from hybrid_engine.backends.vllm.weights.processed_model import inspect_model
from hybrid_engine.backends.vllm.weights.traced_model import trace_model
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ParameterMismatchError
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import differences
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import job
from tests.hybrid_engine.backends.vllm.made_up_methods import addresses
from tests.zoo.families import served_config

MODEL = served_config(
    "deepseek_v3", num_nextn_predict_layers=1, kv_lora_rank=512, qk_rope_head_dim=64
)
TABLE = table_for(MODEL)
MTP_LAYER = f"model.layers.{MODEL['num_hidden_layers']}."
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
TRACES = trace_model, trace_drafter


def _engine(path: str, left_out: str = "nothing") -> InferenceEngine:
    generate = GenerateConfig(
        max_model_len=64, max_num_seqs=4, kv_cache_mb=16, dtype="float32", vllm=MTP
    )
    num_ranks = dist.get_world_size()
    settings = InferenceSettings(
        path, InferenceParallelism(num_ranks, tensor=num_ranks), generate, dtype="float32"
    )
    shapes = {name: shape for name, shape in TABLE.shapes.items() if name != left_out}
    return InferenceEngine(settings, shapes, job(), dtypes=TABLE.dtypes)


def _weights(seed: int) -> TensorDict:
    weights = support.random_weights(MODEL, seed, torch.float32)
    return weights | {copy: weights[original].clone() for copy, original in TABLE.copies.items()}


@on_engines({1: ["alone"], 2: ["tp2"]})
def test_a_drafter_has_its_computed_layout_and_shares_with_its_model(
    tmp_path: Path, case: str
) -> None:
    """end_to_end/test_drafters.py compares its weights with those of vLLM's own load, and its
    tokens.
    """
    job()
    path = support.write_config(tmp_path, MODEL)
    engine = _engine(path)
    adaptor = engine.adaptor
    support.write_by_records(adaptor, _weights(0))
    assert adaptor.resident_nbytes() == adaptor.nbytes
    adaptor.release()
    assert adaptor.resident_nbytes() == 0
    layout = adaptor.layout()
    sizes = engine.settings.sizes
    side = inference_side(engine.settings.generate.served(TABLE), sizes, "float32")
    assert differences(side.layout_of(engine.rank), layout) == []
    assert int(side.num_elements[engine.rank]) * 4 == adaptor.nbytes
    alone = inference_side(TABLE, sizes, "float32").layout_of(engine.rank)
    assert differences(without_drafter(layout), alone) == []
    # The embedding and the head are shared with the main model, and filled once.
    model = internals.model_runner_of(engine.llm).model
    drafter = internals.worker_of(engine.llm).get_draft_model()
    assert drafter.model.embed_tokens is model.model.embed_tokens
    assert drafter.model.layers[str(MODEL["num_hidden_layers"])].shared_head.head is model.lm_head
    engine.shutdown()
    with pytest.raises(ParameterMismatchError, match=r"drafter.*enorm.*without a source"):
        _engine(path, left_out=f"{MTP_LAYER}enorm.weight")


@dataclass
class Pair:
    """A main model and its drafter, outside of an engine, as vLLM builds them."""

    main: torch.nn.Module
    drafter: torch.nn.Module
    config: Any

    @staticmethod
    def built(engine: InferenceEngine, path: str) -> Pair:
        main, config = second_model(engine.settings, engine.rank, path)
        return Pair(
            main, _constructed(config, config.speculative_config.draft_model_config), config
        )

    def load(self) -> None:
        for model, config in self.configs.items():
            support.load(model, self.config, config)

    def process(self) -> None:
        for model, config in self.configs.items():
            support.process(model, self.config, config)

    def share(self) -> None:
        self.drafter.model.embed_tokens = self.main.model.embed_tokens
        self.drafter.model.layers[
            str(MODEL["num_hidden_layers"])
        ].shared_head.head = self.main.lm_head

    @property
    def configs(self) -> dict[torch.nn.Module, Any]:
        return {
            self.main: self.config.model_config,
            self.drafter: self.config.speculative_config.draft_model_config,
        }

    def context(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.config)

    def tensors(self) -> TensorDict:
        return support.tensors_of(torch.nn.ModuleDict({"main": self.main, "drafter": self.drafter}))


@on_engines(1)
def test_tensors_of_both_models_are_filled_in_place(tmp_path: Path) -> None:
    """Like on a GPU, where tensors stay at their addresses."""
    from vllm.model_executor.layers import utils

    job()
    seeds = (1, 0)
    paths = [
        support.write_checkpoint(tmp_path / f"v{seed}", MODEL, _weights(seed)) for seed in seeds
    ]
    engine = _engine(paths[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
        patch.setattr(utils.ops, "_supports_onednn", False)
        pair = Pair.built(engine, paths[0])
        dtypes = dict.fromkeys(TABLE.shapes, torch.float32)
        traced = [
            trace(model, TABLE.shapes, dtypes, 0)
            for trace, model in zip(TRACES, pair.configs, strict=True)
        ]
        pair.process()
        models = [
            inspect_model(model, pair.context, torch.float32, keeps_addresses=True)
            for model in traced
        ]
        pair.share()
        joined = join(*models)
        assert any(name.startswith("drafter.") for name in joined.derivations), (
            "experts of the drafter are packed"
        )
        adaptor = VllmAdaptor(joined, CpuWeightMemory())
        places = addresses(pair.tensors())
        for seed, path in zip(seeds, paths, strict=True):
            support.write_by_records(adaptor, _weights(seed))
            native = Pair.built(engine, path)
            native.load()
            native.process()
            native.share()
            tensors = pair.tensors()
            assert support.differences(tensors, native.tensors()) == []
            assert addresses(tensors) == places
    engine.shutdown()
