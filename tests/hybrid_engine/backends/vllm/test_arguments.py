"""What vLLM is built with: arguments of its own names, and defaults on GPUs, whose platform is only named here."""

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

from hybrid_engine.assembly import inference_settings
from hybrid_engine.backends.vllm import arguments as arguments_module
from hybrid_engine.backends.vllm.arguments import _check_allocator, check_arguments, llm_arguments
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.config import GenerateConfig, HybridConfig, inference_rules, load_config
from hybrid_engine.config.inference_rules import QUANTIZATIONS
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from tests.hybrid_engine.backends.vllm import support
from tests.zoo.families import served_config, write_config

pytestmark = pytest.mark.slow  # imports vLLM


@pytest.fixture
def model(tmp_path: Path) -> str:
    return support.write_config(tmp_path, support.QWEN3)


TWO = InferenceParallelism(2, tensor=2)


def settings_of(model: str, **keys: Any) -> InferenceSettings:
    """Of an engine in one rank."""
    return InferenceSettings(model, generate=GenerateConfig(**keys))


def test_arguments_by_vllms_names_reach_it(model: str) -> None:
    generate = GenerateConfig(vllm={"attention_backend": "TRITON_ATTN", "block_size": 32})
    arguments = llm_arguments(inference_settings(HybridConfig(model=model, generate_config=generate), 1), "cuda")
    assert (arguments["attention_backend"], arguments["block_size"]) == ("TRITON_ATTN", 32)


def test_a_key_of_vllms_name_reaches_it_and_none_leaves_the_default_to_it(model: str) -> None:
    from vllm import EngineArgs

    assert {field.name for field in dataclasses.fields(EngineArgs)} >= GenerateConfig().of_vllm().keys()
    given = llm_arguments(settings_of(model, max_num_seqs=3, max_model_len=9), "cpu")
    assert (given["max_num_seqs"], given["max_model_len"]) == (3, 9)
    assert "max_model_len" not in llm_arguments(InferenceSettings(model), "cpu")


def test_prefix_caching_is_on_and_can_be_turned_off(model: str) -> None:
    assert llm_arguments(InferenceSettings(model), "cpu")["enable_prefix_caching"] is True
    off = settings_of(model, vllm={"enable_prefix_caching": False})
    assert llm_arguments(off, "cpu")["enable_prefix_caching"] is False


def test_what_goes_with_a_switch_is_taken(model: str) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    extra = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, "speculative_config": ngram}
    values = {"model": model, "random_weights": True, "generate_config": {"vllm": extra}}
    check_arguments(inference_settings(load_config(values, 1), 1), 0, "cpu")


def test_arguments_that_a_configuration_may_not_give_are_this_vllms() -> None:
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {*inference_rules._KEYS, *inference_rules._REFUSED} <= known


PROGRAMS_ALONE = {
    "import or run what is named": """
        trust_remote_code worker_extension_cls scheduler_cls logits_processors model_class_overrides
        io_processor_plugin reasoning_parser_plugin reasoning_parser structured_outputs_config
        reasoning_config logging_config log_config_file ec_transfer_config ec_manager_config
        weight_transfer_config additional_config attention_config kernel_config mamba_config ir_op_priority
        tokenizer tokenizer_mode config_format model_impl generation_config quantization_config
        model_loader_extra_config watermark_config diffusion_config spec_model
    """,
    "read, write, fetch or listen": """
        download_dir allowed_local_media_path allowed_media_domains hf_token ignore_patterns
        tokenizer_revision pt_load_map_location otlp_traces_endpoint collect_detailed_traces profiler_config
        kv_events_config default_mm_loras mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size
    """,
    "of servers and their processes": """
        served_model_name show_hidden_metrics_for_version per_request_spec_decode_metrics kv_cache_metrics
        kv_cache_metrics_sample custom_histogram_buckets enable_mfu_metrics enable_logging_iteration_details
        aggregate_engine_logging log_level jit_monitor_verbose max_num_queued_reqs max_num_queued_tokens
        max_parallel_loading_workers ray_workers_use_nsight renderer_num_workers shutdown_timeout tokens_only
        _api_process_count _api_process_rank data_parallel_multi_port_external_lb
        disable_nccl_for_dp_synchronization dp_sync_interval numa_bind numa_bind_nodes numa_bind_cpus
        fail_on_environ_validation fault_tolerance_config enable_fault_tolerance enable_trace_replay
        enable_shm_tensor_arena
    """,
    "of other models and tasks": """
        runner convert enable_prompt_embeds pooler_config override_generation_config aux_output_config
        engram_config enable_return_routed_experts return_sampling_mask language_model_only
        limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
        mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
        mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype skip_mm_profiling
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize enable_mm_processor_stats disable_chunked_mm_input enable_tower_connector_lora
        max_lora_cls_labels lora_dtype
    """,
    "nobody has looked at them beside a switch": """
        allow_deprecated_quantization enable_hc_sp enable_batch_sharded_sampling enable_ep_weight_filter
        sparse_indexer_topk_backend dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size enable_mixed_moe_lora_format enable_moe_shared_loras
        prefix_cache_retention_interval long_prefill_token_threshold_adaptive scheduler_reserve_full_isl
        prefill_schedule_interval watermark kv_cache_dtype_skip_layers prefix_match_unit
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_ssu_algorithm
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds swa_bounded_replay
        sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
        enable_nccl_comm_suspend
    """,
}
"""Why -> arguments of vLLM that no configuration file sets."""


def test_every_argument_of_this_vllm_has_a_verdict(model: str) -> None:
    """One that a later vLLM brings is a program's, until somebody has read what becomes of its value."""
    from vllm import EngineArgs

    of_programs = {name for names in PROGRAMS_ALONE.values() for name in names.split()}
    in_files = {name.partition(".")[0] for name in inference_rules.IN_FILES}
    refused = {*inference_rules._KEYS, *inference_rules._REFUSED}
    settings = InferenceSettings(model, generate=GenerateConfig(quantization="fp8_per_channel"), max_loras=1)
    follow = arguments_module._arguments_that_follow(settings, "cpu")
    verdicts = [in_files, refused, follow.keys(), GenerateConfig.model_fields.keys(), of_programs]
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert known - set().union(*verdicts) == set()
    assert known >= of_programs
    assert in_files <= known
    assert not in_files & (of_programs | refused)


def test_what_a_file_may_set_takes_no_text_but_vllms_own_words() -> None:
    from vllm import EngineArgs
    from vllm.config import CompilationConfig, SpeculativeConfig

    parts = {"compilation_config": CompilationConfig, "speculative_config": SpeculativeConfig}
    of_our_rules = {"spec_method", "speculative_config.method"}  # `_speculation` names the three that can be
    for name in inference_rules.IN_FILES - of_our_rules:
        argument, _, part = name.partition(".")
        assert is_closed(annotation_of(parts[argument], part) if part else annotation_of(EngineArgs, name)), name
    for name in ("worker_extension_cls", "logits_processors", "model_class_overrides", "additional_config"):
        assert not is_closed(annotation_of(EngineArgs, name))


def annotation_of(owner: type, name: str) -> Any:
    """The type of a field; vLLM writes some of them as text."""
    found = owner.__annotations__[name]
    return eval(found, vars(sys.modules[owner.__module__])) if isinstance(found, str) else found


def is_closed(annotation: Any) -> bool:
    """Whether its values are numbers, flags, members of enums and of Literals, and lists of these."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, tuple):
        return all(map(is_closed, arguments))
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    return is_enum or annotation in (bool, int, float, type(None))


@pytest.mark.parametrize("allowed", [True, False])
def test_the_key_for_unknown_versions_reaches_the_engine(model: str, allowed: bool) -> None:
    config = HybridConfig(model=model, generate_config=GenerateConfig(allow_version=allowed))
    assert inference_settings(config, 1).generate.allow_version is allowed


def test_unknown_ones_and_those_that_follow_from_other_keys_are_refused_at_once(model: str) -> None:
    extra = {"block_siz": 32, "nonsense": 1, "tensor_parallel_size": 4, "load_format": "auto", "block_size": 32}
    with pytest.raises(ConfigError) as caught:
        check_arguments(settings_of(model, vllm=extra), 0, "cpu")
    found = {finding.key.removeprefix("generate_config.vllm."): finding for finding in caught.value.findings}
    assert found.keys() == extra.keys() - {"block_size"}
    assert found["block_siz"].remedy == "Did you mean block_size?"
    assert "no such argument" in found["nonsense"].problem
    assert found["tensor_parallel_size"].problem == "it follows from other keys: 1"


def test_experts_are_computed_in_the_loaders_layout_on_cuda_unless_asked_otherwise(model: str) -> None:
    assert llm_arguments(InferenceSettings(model), "cuda")["moe_backend"] == "triton"
    assert llm_arguments(settings_of(model, vllm={"moe_backend": "cutlass"}), "cuda")["moe_backend"] == "cutlass"
    assert "moe_backend" not in llm_arguments(InferenceSettings(model), "cpu")
    by_arguments = settings_of(model, vllm={"quantization_config": {"moe": "mxfp4"}})
    for settings in (settings_of(model, quantization="fp8_per_block"), by_arguments):
        assert "moe_backend" not in llm_arguments(settings, "cuda")


def test_all_methods_that_quantise_while_loading_can_be_asked_for_on_cuda() -> None:
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    by_arguments = {"online"}  # means that `quantization_config` says how, which can be passed by itself
    assert {*QUANTIZATIONS["cpu"]} <= {*QUANTIZATIONS["cuda"]} == {*ONLINE_QUANT_SHORTHAND_NAMES} - by_arguments


@pytest.mark.parametrize(
    ("conf", "sizes", "disabled"),
    [
        ("max_split_size_mb:64,expandable_segments:True", TWO, True),
        ("expandable_segments: 1", TWO, True),
        ("expandable_segments:False", TWO, False),
        ("expandable_segments:True", InferenceParallelism(1), False),
    ],
)
def test_graphs_of_expandable_segments_are_not_shared(
    monkeypatch: pytest.MonkeyPatch, model: str, conf: str, sizes: InferenceParallelism, disabled: bool
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    arguments = llm_arguments(InferenceSettings(model, sizes), "cuda")
    assert arguments.get("disable_custom_all_reduce", False) == disabled


def test_an_allocator_without_memory_pools_is_refused_where_vllm_sleeps(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF: backend:cudaMallocAsync has no memory pools"):
        check_arguments(InferenceSettings(model), 0, "cuda")
    awake = settings_of(model, vllm={"enable_sleep_mode": False})
    _check_allocator(awake, "cuda")
    assert [llm_arguments(each, "cuda")["enable_sleep_mode"] for each in (InferenceSettings(model), awake)] == [
        True,
        False,
    ]
    _check_allocator(InferenceSettings(model), "cpu")


def test_what_cannot_generate_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model's own longest sequence, as vLLM would count it."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")  # vLLM prefers it to every setting
    config = {**support.QWEN3, "head_dim": 16, "max_position_embeddings": 8192}
    settings = settings_of(support.write_config(tmp_path, config), kv_cache_mb=1)
    with pytest.raises(ConfigError) as caught:
        check_arguments(settings, 0, "cpu")
    heads, cache = caught.value.findings
    assert (heads.key, cache.key) == ("model", "generate_config.kv_cache_mb")
    assert "16 elements, and vLLM's attention on CPU computes 32, 64" in heads.problem
    assert "1 MiB hold" in cache.problem
    assert "8,192" in cache.problem
    sound = support.write_config(tmp_path, {**config, "head_dim": 32})
    with pytest.raises(ConfigError) as caught:
        check_arguments(settings_of(sound, kv_cache_mb=1), 0, "cpu")
    needed = int(re.search(r"Use (\d+) or more", str(caught.value))[1])
    for size, is_enough in ((needed - 1, False), (needed, True)):
        with nullcontext() if is_enough else pytest.raises(ConfigError, match="kv_cache_mb"):
            check_arguments(settings_of(sound, kv_cache_mb=size), 0, "cpu")


@pytest.mark.parametrize(
    ("variant", "changes", "problem"),
    [
        ("deepseek_v2", {"kv_lora_rank": 48}, "its latent attention heads have 64 elements, and vLLM's"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layers from 1 of 2 on"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layers from 1 of 2 on"),
    ],
)
def test_what_vllm_would_only_assert_is_refused_at_once(
    tmp_path: Path, variant: str, changes: dict[str, Any], problem: str
) -> None:
    directory = str(write_config(tmp_path, served_config(variant, **changes)))
    with pytest.raises(ConfigError) as caught:
        check_arguments(settings_of(directory, kv_cache_mb=256), 0, "cpu")
    (finding,) = caught.value.findings
    assert finding.key == "model"
    assert problem in finding.problem


@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3", "qwen2", "qwen3"])
def test_the_same_within_vllms_limits_is_let_through(tmp_path: Path, variant: str) -> None:
    whole = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0} if "qwen" in variant else {}
    directory = str(write_config(tmp_path, served_config(variant, **whole)))
    check_arguments(settings_of(directory, kv_cache_mb=256), 0, "cpu")


def test_a_longer_context_than_the_models_is_refused_in_vllms_words(model: str) -> None:
    with pytest.raises(ConfigError, match=r"vLLM: User-specified max_model_len \(1000000\) is greater than"):
        check_arguments(settings_of(model, max_model_len=10**6), 0, "cpu")
