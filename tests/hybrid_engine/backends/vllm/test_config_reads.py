"""Keys of config.json that vLLM reads and the trainer does not know are refused by name."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hybrid_engine.assembly import gather_positions
from hybrid_engine.backends.vllm import InferenceSettings
from hybrid_engine.backends.vllm.config_reads import ConfigReads
from hybrid_engine.compute_check.config_reads import ReadRecorder
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, RemoteError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from tests.harness.errors import violated
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import job
from tests.hybrid_engine.models.small_configs import variant_config
from tests.zoo.families import served_config

# A family and additional keys of its config.json.
Case = tuple[str, dict[str, Any]]

SCALED_BY_POSITION = {"beta": 0.1, "original_max_position_embeddings": 64}
# Every additional key must be refused.
REFUSED: list[Case] = [
    ("llama", {"sliding_window": 100, "rotary_pct": 0.5}),
    ("llama", {"logit_scale": 1.002}),  # read by the last stage only
    ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}),
    ("glm4", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 64}}),
    ("qwen2", {"qk_norm": True}),
    ("qwen3_moe", {"shared_expert_intermediate_size": 32}),
    ("deepseek_v3", {"index_topk": 16}),
    ("deepseek_v3", {"llama_4_scaling": SCALED_BY_POSITION}),  # read by forward passes only
]

ACCEPTED: list[Case] = [
    (
        "llama",
        {
            **{
                "logit_scale": 1.0,
                "is_causal": True,
                "bias": False,
                "qkv_bias": None,
            },  # the default values
            **{"max_sequence_length": 128, "model_max_length": 128},  # only limit lengths
            **{"use_cache": True, "initializer_range": 0.1, "sliding_windows": 3},  # not read
            "rope_scaling": {
                "rope_type": "linear",
                "factor": 2.0,
                "alpha": 1000.0,
            },  # for another type
        },
    ),
    (
        "qwen3_moe",
        {"shared_expert_intermediate_size": 0, "qkv_bias": False, "use_qk_norm": True},
    ),  # Qwen3-Coder
    ("gpt2", {"num_attention_heads": 4, "reorder_and_upcast_attn": False}),  # alias of n_head
    (
        "deepseek_v3",
        {"head_dim": 16, "scoring_func": "sigmoid", "topk_method": None},
    ),  # written by transformers
    ("deepseek_v3", {"llama_4_scaling": None}),
]


def trace(case: Case, directory: Path) -> None:
    """Trace the positions of a model on two ranks; an engine is refused in
    end_to_end/test_families.py.
    """
    config = served_config(case[0]) | case[1]
    table = table_for(config)
    generate = GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16)
    job()
    # Two stages, because some keys are read by the last stage only.
    settings = InferenceSettings(
        support.write_config(directory, config), InferenceParallelism(2, pipeline=2), generate
    )
    gather_positions(settings, table, job())


@on_engines(2)
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_keys_read_only_by_vllm_are_refused_on_all_ranks(tmp_path: Path, case: Case) -> None:
    keys = ["rope_scaling.alpha"] if "rope_scaling" in case[1] else case[1]
    with pytest.raises((ConfigError, RemoteError)) as caught:
        trace(case, tmp_path)
    for key in keys:
        assert re.search(
            rf"- {key}: .* is read by vLLM .*Remove it from config\.json", str(caught.value)
        )


@on_engines(2)
@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_keys_without_effect_are_accepted(tmp_path: Path, case: Case) -> None:
    trace(case, tmp_path)


class Scaled(torch.nn.Module):
    """The forward pass reads a key like vLLM's DeepSeek, and names that are not in config.json."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scaling = getattr(self.config, "llama_4_scaling", None)
        return hidden if scaling is None else hidden * scaling


class Named(Scaled):
    """The forward pass has the name of a key, and reads no config."""

    def forward(self, **settings: Any) -> Any:
        return settings["llama_4_scaling"]


def test_a_config_is_plain_when_recording_has_stopped(tmp_path: Path) -> None:
    """It can be pickled, and forward passes that read it compile."""
    from transformers import AutoConfig, DeepseekV3Config

    directory = support.write_config(
        tmp_path, served_config("deepseek_v3") | {"llama_4_scaling": 2.0}
    )
    reads = ConfigReads(directory)
    config = copy.deepcopy(reads(AutoConfig.from_pretrained(directory)))
    with violated(ConfigError, ("llama_4_scaling", "read-by-vllm-alone")):
        reads.require_known(Scaled(config))
    reads.stop()
    assert (type(config), type(config.rope_parameters)) == (DeepseekV3Config, dict)
    assert pickle.loads(pickle.dumps(config)) == config
    compiled = torch.compile(Scaled(config).forward, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_the_value_without_a_key_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers read their keys again, and a config object takes milliseconds."""
    from transformers import LlamaConfig

    recorder = ReadRecorder(lambda _: True)
    config = LlamaConfig()
    recorder.watch(config)
    from_dict = Mock(wraps=LlamaConfig.from_dict)
    monkeypatch.setattr(LlamaConfig, "from_dict", from_dict)
    assert config.num_key_value_heads == config.num_key_value_heads == 32
    from_dict.assert_called_once()


def test_a_quantisation_that_is_not_delivered_is_absent(tmp_path: Path) -> None:
    """gpt-oss asks whether there is one: None is not absent."""
    from transformers import AutoConfig

    directory = support.write_config(tmp_path, variant_config("gpt-oss, published quantisation"))
    config = AutoConfig.from_pretrained(directory)
    assert config.quantization_config is not None
    assert not hasattr(ConfigReads(directory)(config), "quantization_config")


def test_only_forward_passes_with_a_config_are_searched(tmp_path: Path) -> None:
    from transformers import AutoConfig

    directory = support.write_config(
        tmp_path, served_config("deepseek_v3") | {"llama_4_scaling": 2.0}
    )
    reads = ConfigReads(directory)
    config = reads(AutoConfig.from_pretrained(directory))
    native = type("Native", (torch.nn.Module,), {"forward": len})()
    reads.require_known(torch.nn.Sequential(Named(config), native))
    assert "llama_4_scaling" not in reads.reads
