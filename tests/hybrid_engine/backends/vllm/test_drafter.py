"""DeepSeek-V3's MTP layer as vLLM's drafter: traced, filled with the main model, and compared with vLLM's own load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings, Sampling, VllmAdaptor, internals
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
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import differences
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm import support
from tests.zoo.families import served_config

pytestmark = pytest.mark.engines

MODEL = served_config("deepseek_v3", num_nextn_predict_layers=1, kv_lora_rank=512, qk_rope_head_dim=64)
TABLE = table_for(MODEL)
MTP_LAYER = f"model.layers.{MODEL['num_hidden_layers']}."
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
NUM_SWITCHES = 3
TRACES = trace_model, trace_drafter


def _engine(path: str, vllm: Values, left_out: str = "nothing") -> InferenceEngine:
    generate = GenerateConfig(max_model_len=64, max_num_seqs=4, kv_cache_mb=16, dtype="float32", vllm=vllm)
    num_ranks = dist.get_world_size()
    settings = InferenceSettings(path, InferenceParallelism(num_ranks, tensor=num_ranks), generate, dtype="float32")
    shapes = {name: shape for name, shape in TABLE.shapes.items() if name != left_out}
    return InferenceEngine(settings, shapes, Job.join(120), dtypes=TABLE.dtypes)


def _weights(seed: int) -> TensorDict:
    weights = support.random_weights(MODEL, seed, torch.float32)
    return weights | {copy: weights[original].clone() for copy, original in TABLE.copies.items()}


def _tokens(engine: InferenceEngine) -> list[list[int]]:
    greedy = Sampling(max_tokens=12, temperature=0.0)
    return [list(answers[0].token_ids) for answers in engine.generate(PROMPTS, greedy)]


def fill(directory: str) -> Values:
    """Fill an engine with a drafter, and one without."""
    dist.init_process_group("gloo")
    results: Values = {"plain": [], "drafted": [], "different": [], "compared": [], "resident": []}
    checkpoints = []
    for seed in range(NUM_SWITCHES):
        path = Path(directory) / f"version{seed}"
        checkpoints.append(support.write_checkpoint(path, MODEL, _weights(seed)))
    engine = _engine(checkpoints[0], {})
    for seed in range(NUM_SWITCHES):
        support.fill_by_records(engine.adaptor, _weights(seed))
        engine.reset_caches()
        results["plain"].append(_tokens(engine))
        engine.adaptor.release()
    layout = engine.adaptor.layout()
    results["unread"] = set(layout.tensors) - {shard.region.tensor for shard in layout.shards}
    engine.shutdown()

    engine = _engine(checkpoints[0], MTP)
    runner = internals.model_runner_of(engine.llm)
    for seed, checkpoint in enumerate(checkpoints):
        filled = support.fill_by_records(engine.adaptor, _weights(seed))
        native = support.native_parameters(engine, checkpoint)
        results["different"] += support.differences(filled, native)
        results["compared"].append(sorted(name for name in native if name.startswith("drafter.")))
        engine.reset_caches()
        results["drafted"].append(_tokens(engine))
        results["resident"].append(engine.adaptor.resident_nbytes())
        engine.adaptor.release()
        results["resident"].append(engine.adaptor.resident_nbytes())
    drafted = engine.adaptor.layout()
    results["without drafter"] = differences(without_drafter(drafted), layout)
    results["buffers"] = [buffer.name for buffer in drafted.buffers]
    results["drafter unread"] = set(drafted.tensors) - {shard.region.tensor for shard in drafted.shards}
    results["nbytes"] = engine.adaptor.nbytes
    side = inference_side(engine.settings.generate.served(TABLE), engine.settings.sizes, "float32")
    results["planned"] = differences(side.layout_of(engine.rank), drafted)
    results["planned nbytes"] = int(side.num_elements[engine.rank]) * 4
    drafter = internals.worker_of(engine.llm).get_draft_model()
    layer = drafter.model.layers[str(MODEL["num_hidden_layers"])]
    results["shared"] = (
        layer.shared_head.head is runner.model.lm_head,
        drafter.model.embed_tokens is runner.model.model.embed_tokens,
    )
    engine.shutdown()
    with pytest.raises(ParameterMismatchError, match=r"drafter.*enorm.*without a source"):
        _engine(checkpoints[0], MTP, left_out=f"{MTP_LAYER}enorm.weight")
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "tp2"])
def outcomes(engines: Ranks, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return engines.launch(fill, request.param, str(tmp_path_factory.mktemp("drafter")))


def test_every_parameter_of_the_drafter_is_as_vllm_loads_it(outcomes: list[Values]) -> None:
    for outcome in outcomes:
        assert outcome["different"] == []
        (first, *others) = outcome["compared"]
        assert others == [first] * (NUM_SWITCHES - 1)
        assert sum(".enorm." in name or ".experts." in name for name in first) == 3
        assert len(first) > 12


def test_greedy_tokens_with_a_drafter_are_those_without(outcomes: list[Values]) -> None:
    for outcome in outcomes:
        assert outcome["drafted"] == outcome["plain"]


def test_shared_embedding_and_head_are_filled_once(outcomes: list[Values]) -> None:
    for outcome in outcomes:
        assert outcome["shared"] == (True, True)
        assert not [name for name in outcome["buffers"] if "drafter" in name and "embed_tokens" in name]
        assert not [name for name in outcome["buffers"] if "drafter" in name and ".head." in name]


def test_only_a_drafter_reads_the_mtp_layer(outcomes: list[Values]) -> None:
    expected = {name for name in TABLE.shapes if name.startswith(MTP_LAYER)}
    for outcome in outcomes:
        assert outcome["unread"] == expected
        assert not outcome["drafter unread"] & expected
        assert outcome["without drafter"] == []


def test_a_plan_counts_the_drafter(outcomes: list[Values]) -> None:
    for outcome in outcomes:
        assert outcome["planned"] == []
        assert outcome["planned nbytes"] == outcome["nbytes"]


def test_a_release_frees_the_drafter(outcomes: list[Values]) -> None:
    for outcome in outcomes:
        assert outcome["resident"] == [outcome["nbytes"], 0] * NUM_SWITCHES


@dataclass
class Pair:
    """A main model and its drafter, outside of an engine, as vLLM builds them."""

    main: torch.nn.Module
    drafter: torch.nn.Module
    config: Any

    @staticmethod
    def built(engine: InferenceEngine, path: str) -> Pair:
        main, config = second_model(engine.settings, engine.rank, path)
        return Pair(main, _constructed(config, config.speculative_config.draft_model_config), config)

    def load(self) -> None:
        """Load the checkpoint by vLLM's own loader."""
        from vllm.model_executor.model_loader import DefaultModelLoader

        loader = DefaultModelLoader(self.config.load_config)
        with torch.no_grad(), self.context():
            for model, config in self.configs.items():
                for parameter in model.parameters():
                    parameter.zero_()
                loader.load_weights(model, config)

    def process(self) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with self.context():
            for model, config in self.configs.items():
                process_weights_after_loading(model, config, torch.device("cpu"))

    def share(self) -> None:
        self.drafter.model.embed_tokens = self.main.model.embed_tokens
        self.drafter.model.layers[str(MODEL["num_hidden_layers"])].shared_head.head = self.main.lm_head

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


def fill_in_place(directory: str) -> list[str]:
    """Fill both models like on a GPU, where tensors stay at their addresses; return what is wrong."""
    from vllm.model_executor.layers import utils

    dist.init_process_group("gloo")
    seeds = (1, 0)
    paths = [support.write_checkpoint(Path(directory) / f"v{seed}", MODEL, _weights(seed)) for seed in seeds]
    engine = _engine(paths[0], MTP)
    faults = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
        patch.setattr(utils.ops, "_supports_onednn", False)
        pair = Pair.built(engine, paths[0])
        dtypes = dict.fromkeys(TABLE.shapes, torch.float32)
        traced = [trace(model, TABLE.shapes, dtypes, 0) for trace, model in zip(TRACES, pair.configs, strict=True)]
        pair.process()
        models = [inspect_model(model, pair.context, torch.float32, keeps_addresses=True) for model in traced]
        pair.share()
        joined = join(*models)
        assert any(name.startswith("drafter.") for name in joined.derivations), "experts of the drafter are packed"
        adaptor = VllmAdaptor(joined, CpuWeightMemory())
        places = {path: tensor.data_ptr() for path, tensor in pair.tensors().items()}
        for seed, path in zip(seeds, paths, strict=True):
            support.write_by_records(adaptor, _weights(seed))
            native = Pair.built(engine, path)
            native.load()
            native.process()
            native.share()
            tensors = pair.tensors()
            faults += support.differences(tensors, native.tensors())
            faults += [f"{name} moved" for name, place in places.items() if tensors[name].data_ptr() != place]
    engine.shutdown()
    return faults


def test_tensors_of_both_models_are_filled_in_place(engines: Ranks, tmp_path: Path) -> None:
    assert engines.launch(fill_in_place, 1, str(tmp_path)) == [[]]
