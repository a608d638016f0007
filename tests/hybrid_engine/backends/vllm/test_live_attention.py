"""Attention of live layers in vLLM, transformers and Megatron for the same config.json."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm import InferenceSettings, arguments, isolation
from hybrid_engine.backends.vllm.live_layers import live_attention, require_positions
from hybrid_engine.backends.vllm.positions import (
    _at_position,
    _forget_layers,
    _model,
    _position_of,
    _rotary_embeddings_kept,
)
from hybrid_engine.backends.vllm.process_state import process_settings_kept
from hybrid_engine.compute_check.attention import (
    POSITIONS,
    Attention,
    attention_differences,
    grouped,
    unread_layers,
)
from hybrid_engine.compute_check.config_reads import Read
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ModelError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import torch_defaults
from tests.harness.errors import refused
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo import sharded_models
from tests.zoo.families import FAMILIES, SERVED_SIZES, write_config
from tests.zoo.megatron_models import running

# Longer than the sequences of `check_compute`, so log-probabilities would not show windows.
WINDOW = {"use_sliding_window": True, "sliding_window": 100}
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
SAME: dict[str, tuple[str, Values]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama 3.1": (
        "llama",
        {
            "rope_scaling": {
                **{
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "deepseek_v3 with YaRN": (
        "deepseek_v3",
        {
            "rope_scaling": {
                **YARN,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "qwen2 with windows": ("qwen2", {**WINDOW, "max_window_layers": 0}),
    "qwen3_moe with windows": ("qwen3_moe", WINDOW),
    "mixtral with windows": ("mixtral", {"sliding_window": 100}),
    "mixtral with a loss of its router": ("mixtral", {"output_router_logits": True}),
}
ONLY_VLLM = "the sliding window is none for the trainer and 100 tokens for vLLM"
ONLY_TRAINER = "the sliding window is 100 tokens for the trainer and none for vLLM"
DIFFERENT: dict[str, tuple[str, Values, str]] = {
    "llama, a foreign key": ("llama", {"sliding_window": 100}, f"in layers 0 to 1, {ONLY_VLLM}"),
    "llama, foreign keys": ("llama", {"sliding_window": 100, **MIXED}, f"in layer 1, {ONLY_VLLM}"),
    "glm4, a foreign key": ("glm4", {"sliding_window": 100}, f"in layers 0 to 1, {ONLY_VLLM}"),
    "qwen3, one layer": (
        "qwen3",
        {**WINDOW, **MIXED, "max_window_layers": 2},
        f"in layer 1, {ONLY_TRAINER}",
    ),
    "qwen2_moe with windows": ("qwen2_moe", WINDOW, f"in layer 0, {ONLY_TRAINER}"),
    "qwen3_moe, one layer": ("qwen3_moe", {**WINDOW, **MIXED}, f"in layers 0 to 1, {ONLY_TRAINER}"),
}


def config_of(family: str, changes: Mapping[str, Any]) -> Values:
    """Same as `served_config` for every family."""
    sizes = {**SERVED_SIZES, **FAMILIES[family].served}
    return FAMILIES[family].config(sizes, {"torch_dtype": "float32", **changes})


def read_vllm(directory: Path) -> dict[int, Attention]:
    return vllm_readings(directory)[0]


def vllm_readings(
    directory: Path, max_model_len: int = 128, positions: Sequence[int] = POSITIONS
) -> tuple[dict[int, Attention], Mapping[str, Read]]:
    """Read a model on one rank, without memory for weights: its layers, and keys of config.json."""
    settings = InferenceSettings(
        str(directory),
        InferenceParallelism(1),
        GenerateConfig(max_model_len=max_model_len, max_num_seqs=8, kv_cache_mb=16),
        dtype="float32",
    )
    with contextlib.ExitStack() as undo:
        for context in (torch_defaults(), process_settings_kept(), _rotary_embeddings_kept()):
            undo.enter_context(context)
        patch = undo.enter_context(pytest.MonkeyPatch.context())
        # Otherwise keys read only by vLLM are refused before layers exist.
        patch.setattr(
            "hybrid_engine.backends.vllm.config_reads.ConfigReads.require_known",
            lambda self, **_: None,
        )
        job = undo.enter_context(contextlib.closing(Job.join(60)))
        device_type = arguments.check_without_job(settings, job.rank)
        config = arguments.engine_config(
            settings, 0, device_type, load_format="dummy", enforce_eager=True
        )
        undo.callback(gc.collect)
        undo.callback(isolation.destroy_groups)
        undo.enter_context(_at_position(_position_of(job), settings, config))
        model = _model(config)
        undo.callback(_forget_layers, model)
        reads = arguments.reads_of(config)
        reads._recorder.scan(model)
        reads.stop()
        return live_attention(
            model, config.compilation_config.static_forward_context, positions
        ), reads.reads


def read_transformers(directory: Path, change: Change = lambda model: None) -> dict[int, Attention]:
    from hybrid_engine.backends.fsdp.attention import live_attention as of_model
    from hybrid_engine.backends.fsdp.attention import recorded

    model = sharded_models.from_config(directory)
    change(model)
    return of_model(model, recorded(model).calls)


def read_megatron(directory: Path, change: Change = lambda model: None) -> dict[int, Attention]:
    from megatron.core.utils import unwrap_model

    with running(directory) as run:
        change(unwrap_model(run.actor.chunks[0]))
        return dict(run.engine.model.attention())


def changed_in_transformers(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2
    model.model.rotary_emb.sliding_attention_inv_freq /= 8


def changed_in_megatron(model: Any) -> None:
    model.decoder.layers[1].self_attention.core_attention.softmax_scale *= 2
    model.decoder.layers[0].self_attention.rotary_pos_emb.inv_freq /= 8


Change = Callable[[Any], None]
READERS = {"transformers": read_transformers, "Megatron": read_megatron}
# Changes of Gemma 3: the scale of a layer, and the rotary frequencies of the layer with a window.
CHANGES = {"transformers": changed_in_transformers, "Megatron": changed_in_megatron}


def compared(trainer: Mapping[int, Attention], inference: Mapping[int, Attention]) -> list[str]:
    first, second = grouped(trainer), grouped(inference)
    assert unread_layers(first, second) == []
    unreached, _ = attention_differences(first, second, 127)
    return unreached


@on_engines(1)
@pytest.mark.parametrize("trainer", READERS)
def test_changed_layers_are_found(tmp_path: Path, trainer: str) -> None:
    write_config(tmp_path, config_of("gemma3", {}))
    texts = compared(READERS[trainer](tmp_path, CHANGES[trainer]), read_vllm(tmp_path))
    values = "0.353553 for the trainer and 0.176777 for vLLM"
    assert f"in layer 1, the scale of attention scores is {values}" in texts
    assert any(text.startswith("in layer 0, rotary frequency 15 is ") for text in texts)
    assert len(texts) == 2


@on_engines(1)
@pytest.mark.parametrize("name", [*SAME, *DIFFERENT])
def test_both_trainers_read_the_attention_of_vllm_and_find_a_window_of_one_side(
    tmp_path: Path, name: str
) -> None:
    family, changes, *differences = SAME.get(name) or DIFFERENT[name]
    write_config(tmp_path, config_of(family, changes))
    served = read_vllm(tmp_path)
    for read in READERS.values():
        read_by_trainer = read(tmp_path)
        assert compared(read_by_trainer, served) == differences
        assert len(served) == len(read_by_trainer) >= 2


@pytest.mark.slow  # imports vLLM's and transformers' models
def test_rotary_tables_shorter_than_a_sequence_are_named() -> None:
    model = torch.nn.Module()
    for name, length in {"whole": 201, "short": 128, "shorter": 64}.items():
        rotary = torch.nn.Module()
        rotary.register_buffer("cos_sin_cache", torch.empty(length, 32, device="meta"))
        model.add_module(name, rotary)
    require_positions(model, 64)
    with refused(ModelError, "rotary-table-too-short", "short, shorter", "128", "201", "64"):
        require_positions(model, 201)
