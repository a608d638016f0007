"""Arguments of vLLM: names passed through, derived values, and defaults on GPUs."""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
import types
import typing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.backends.vllm.arguments import _refused_settings, check_arguments, llm_arguments
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.config import GenerateConfig, inference_rules
from hybrid_engine.config.inference_rules import QUANTIZATIONS
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models.block_quantization import BLOCK_METHODS
from hybrid_engine.models.quantization_configs import block_config
from tests.harness.errors import has_violation, has_violations, violated
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo.families import served_config, write_config

pytestmark = pytest.mark.slow  # imports vLLM


@pytest.fixture
def model(tmp_path: Path) -> str:
    return support.write_config(tmp_path, support.QWEN3)


TWO = InferenceParallelism(2, tensor=2)


def settings_of(model: str, **keys: Any) -> InferenceSettings:
    """Return the settings of an engine in one rank."""
    return InferenceSettings(model, generate=GenerateConfig(**keys))


def test_experts_are_returned_by_vllm_on_gpus_alone(model: str) -> None:
    """Its runner for CPUs without Triton refuses the argument; see cpu/cpu_worker.py."""
    name = "enable_return_routed_experts"
    settings = settings_of(model, router_replay=True)
    assert llm_arguments(settings, "cuda")[name] is True
    assert name not in llm_arguments(settings, "cpu")
    assert name not in llm_arguments(settings_of(model), "cuda")


def test_latent_attention_uses_the_same_kernels_on_every_cpu(model: str) -> None:
    # vLLM prefers AMX kernels where available, which crash in float32.
    for extra, backend in (
        ({}, "CPU_MLA"),
        ({"attention_backend": "AMX_MLA"}, "AMX_MLA"),
        ({"attention_config": {"backend": "AMX_MLA"}}, None),
    ):
        assert (
            llm_arguments(settings_of(model, vllm=extra), "cpu").get("attention_backend") == backend
        )
    assert "attention_backend" not in llm_arguments(settings_of(model), "cuda")


def test_arguments_named_by_our_rules_exist_in_vllm() -> None:
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    in_files = {name.partition(".")[0] for name in inference_rules.IN_FILES}
    refused = {*inference_rules._KEYS, *inference_rules._REFUSED}
    assert refused | in_files <= known
    assert not refused & in_files


def test_arguments_allowed_in_files_take_no_free_text() -> None:
    from vllm import EngineArgs
    from vllm.config import CompilationConfig, KernelConfig, SpeculativeConfig

    parts = {"compilation_config": CompilationConfig, "kernel_config": KernelConfig}
    parts["speculative_config"] = SpeculativeConfig
    checked_by_rules = {
        "spec_method",
        "speculative_config.method",
    }  # `_speculation` allows three methods
    for name in inference_rules.IN_FILES - checked_by_rules:
        argument, _, part = name.partition(".")
        assert is_closed(
            annotation_of(parts[argument], part) if part else annotation_of(EngineArgs, name)
        ), name
    for name in (
        "worker_extension_cls",
        "logits_processors",
        "model_class_overrides",
        "additional_config",
    ):
        assert not is_closed(annotation_of(EngineArgs, name))


def annotation_of(owner: type, name: str) -> Any:
    """Return the type of a field, evaluated where vLLM declares it as text."""
    annotation = owner.__annotations__[name]
    return (
        eval(annotation, vars(sys.modules[owner.__module__]))
        if isinstance(annotation, str)
        else annotation
    )


def is_closed(annotation: Any) -> bool:
    """Return whether all values are numbers, flags, enum members, Literals or lists of these."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, tuple):
        return all(map(is_closed, arguments))
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    return is_enum or annotation in (bool, int, float, type(None))


def test_unknown_and_derived_arguments_are_refused_at_once(model: str) -> None:
    refused = {"block_siz": 32, "nonsense": 1, "tensor_parallel_size": 4, "load_format": "auto"}
    codes = ["unknown-key"] * 2 + ["derived-argument"] * 2
    expected = [
        (f"generate_config.vllm.{key}", code) for key, code in zip(refused, codes, strict=True)
    ]
    with violated(ConfigError, *expected) as caught:
        check_arguments(settings_of(model, vllm={**refused, "block_size": 32}), 0, "cpu")
    assert "Did you mean block_size?" in str(caught.value)


def test_experts_keep_the_layout_of_the_loader_on_cuda_by_default(
    model: str,
) -> None:
    assert llm_arguments(InferenceSettings(model), "cuda")["moe_backend"] == "triton"
    assert (
        llm_arguments(settings_of(model, vllm={"moe_backend": "cutlass"}), "cuda")["moe_backend"]
        == "cutlass"
    )
    assert "moe_backend" not in llm_arguments(InferenceSettings(model), "cpu")
    by_arguments = settings_of(model, vllm={"quantization_config": {"moe": "mxfp4"}})
    for settings in (settings_of(model, quantization="fp8_per_block"), by_arguments):
        assert "moe_backend" not in llm_arguments(settings, "cuda")


@pytest.mark.parametrize("method", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_refusal_of_quantised_weights_names_the_devices_that_have_kernels(
    model: str, method: str
) -> None:
    chosen = block_config(support.QWEN3, method)
    settings = InferenceSettings(model, quantization_config=chosen)
    refused = has_violation(
        "generate_config.quantization", "no-kernel", method, "on this cpu", "CUDA, ROCM", "none"
    )
    with pytest.raises(ConfigError, check=refused):
        check_arguments(settings, 0, "cpu")


def test_every_online_quantization_is_available_on_cuda() -> None:
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    others = {
        "online",
        *BLOCK_METHODS,
    }  # needs `quantization_config`; are quantised before they are sent
    assert (
        {*QUANTIZATIONS["cpu"]}
        <= {*QUANTIZATIONS["cuda"]}
        == {*ONLINE_QUANT_SHORTHAND_NAMES} - others
    )


@pytest.mark.parametrize(
    ("conf", "sizes", "disabled"),
    [
        ("max_split_size_mb:64,expandable_segments:True", TWO, True),
        ("expandable_segments: 1", TWO, True),
        ("expandable_segments:False", TWO, False),
        ("expandable_segments:True", InferenceParallelism(1), False),
    ],
)
def test_custom_all_reduce_is_disabled_with_expandable_segments(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    conf: str,
    sizes: InferenceParallelism,
    disabled: bool,
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)  # takes precedence in torch
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    arguments = llm_arguments(InferenceSettings(model, sizes), "cuda")
    assert arguments.get("disable_custom_all_reduce", False) == disabled


def test_an_allocator_without_memory_pools_is_refused_with_sleep_mode(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with violated(ConfigError, ("PYTORCH_CUDA_ALLOC_CONF", "no-memory-pools")):
        check_arguments(InferenceSettings(model), 0, "cuda")
    awake = settings_of(model, vllm={"enable_sleep_mode": False})  # sleep mode is on by default
    assert not [*_refused_settings(awake, "cuda")]
    assert llm_arguments(InferenceSettings(model), "cuda")["enable_sleep_mode"] is True
    assert llm_arguments(awake, "cuda")["enable_sleep_mode"] is False
    assert not [*_refused_settings(InferenceSettings(model), "cpu")]


def test_unsupported_heads_and_a_small_cache_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The longest sequence of a rollout.
    config = {**support.QWEN3, "head_dim": 16, "max_position_embeddings": 8192}
    settings = settings_of(support.write_config(tmp_path, config), kv_cache_mb=1)
    too_small = ("generate_config.kv_cache_mb", "kv-cache-too-small")
    with violated(ConfigError, ("model", "no-kernel"), too_small) as caught:
        check_arguments(settings, 0, "cpu")
    heads, cache = caught.value.findings
    assert all(size in heads.problem for size in ("16", "32, 64"))
    assert all(size in cache.problem for size in ("1 MiB", "8,192"))
    sound = support.write_config(tmp_path, {**config, "head_dim": 32})
    with violated(ConfigError, too_small) as caught:
        check_arguments(settings_of(sound, kv_cache_mb=1), 0, "cpu")
    needed = int(re.search(r"Use (\d+) or more", str(caught.value))[1])
    for size in (needed - 1, needed):
        with violated(ConfigError, too_small) if size < needed else nullcontext():
            check_arguments(settings_of(sound, kv_cache_mb=size), 0, "cpu")
    # Four MiB for the one layer of four that has keys and values.
    hybrid = {**small_config("NemotronHForCausalLM"), "max_position_embeddings": 8192}
    check_arguments(
        settings_of(support.write_config(tmp_path / "hybrid", hybrid), kv_cache_mb=5), 0, "cpu"
    )


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("variant", "changes", "code", "value"),
    [
        ("deepseek_v2", {"kv_lora_rank": 48}, "no-kernel", "latent attention heads have 64"),
        *((family, WINDOWS, "mixed-sliding-windows", "1 of 2") for family in ("qwen2", "qwen3")),
    ],
)
def test_limits_that_vllm_only_asserts_are_refused_at_once(
    tmp_path: Path, variant: str, changes: dict[str, Any], code: str, value: str
) -> None:
    directory = str(write_config(tmp_path, served_config(variant, **changes)))
    with pytest.raises(ConfigError, check=has_violation("model", code, value)):
        check_arguments(settings_of(directory, kv_cache_mb=256), 0, "cpu")


def test_a_drafter_needs_latent_heads_that_a_cpu_decodes(tmp_path: Path) -> None:
    vllm = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    for ranks, is_refused in ((512, False), (256, True)):
        latent = {"kv_lora_rank": ranks, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1}
        directory = str(write_config(tmp_path / str(ranks), served_config("deepseek_v3", **latent)))
        check_arguments(settings_of(directory, kv_cache_mb=256), 0, "cpu")
        refusal = pytest.raises(
            ConfigError, match="320", check=has_violations(("model", "no-kernel"))
        )
        with refusal if is_refused else nullcontext():
            check_arguments(settings_of(directory, kv_cache_mb=256, vllm=vllm), 0, "cpu")


def test_a_context_longer_than_the_model_is_refused_by_vllm(model: str) -> None:
    refused = has_violation("vLLM", "refused-by-vllm", "max_model_len (1000000)")
    with pytest.raises(ConfigError, check=refused):
        check_arguments(settings_of(model, max_model_len=10**6), 0, "cpu")
