"""The quantization_config of weights in blocks: published ones, and those of models without one."""

from __future__ import annotations

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.block_quantization import MXFP8, NVFP4, NVFP4_OF_MODELOPT, fp8
from hybrid_engine.models.quantization_configs import block_config, calibrated_in, format_in
from tests.harness.errors import has_violation
from tests.harness.values import Values
from tests.hybrid_engine.backends.test_block_arithmetic import FORMATS
from tests.zoo.block_formats import MODELOPT, PUBLISHED_FP8, published


@pytest.mark.parametrize("method", FORMATS)
def test_a_published_config_is_honoured(method: str) -> None:
    config = {"quantization_config": published(method, ["lm_head"])}
    assert (
        block_config(config, None) == block_config(config, method) == config["quantization_config"]
    )
    assert format_in(config["quantization_config"]) == FORMATS[method]
    assert calibrated_in(config) == []


@pytest.mark.parametrize("method", FORMATS)
def test_models_without_one_are_quantised_on_request_only(method: str) -> None:
    assert block_config({}, None) is None
    chosen = block_config({"num_hidden_layers": 1}, method)
    assert chosen is not None
    assert format_in(chosen) == FORMATS[method]
    excluded = chosen.get("ignore", chosen.get("modules_to_not_convert"))
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(excluded)
    for config in ({}, {"quantization_config": PUBLISHED_FP8}):
        assert block_config(config, "none") is None
        assert block_config(config, "fp8_per_channel") is None
    refused = has_violation(
        "generate_config.quantization", "other-quantization", method, "text_config"
    )
    with pytest.raises(ConfigError, check=refused):
        block_config({"text_config": {}}, method)


def test_scales_that_were_calibrated_on_data_are_left_out() -> None:
    """Activations of nvfp4 stay in the weights' dtype; those of the other formats need no
    calibration.
    """
    config = {"quantization_config": published("nvfp4", scheme="NVFP4")}
    chosen = block_config(config, "nvfp4")
    assert chosen == published("nvfp4", scheme="NVFP4A16")
    assert calibrated_in(config) == ["scales of activations"]
    config = {"quantization_config": MODELOPT}
    chosen = block_config(config, None)
    assert chosen is not None
    assert format_in(chosen) == NVFP4_OF_MODELOPT
    assert chosen["quant_algo"] == "W4A16_NVFP4"
    assert chosen["config_groups"]["group_0"]["input_activations"] is None
    assert chosen["kv_cache_scheme"] is None
    assert calibrated_in(config) == ["scales of the KV cache", "scales of activations"]


def test_other_forms_of_modelopt() -> None:
    older = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    config = {"quantization_config": {"quant_method": "modelopt", "quantization": older}}
    chosen = block_config(config, "nvfp4")
    assert chosen is not None
    expected = {**older, "quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None}
    assert chosen["quantization"] == expected
    assert calibrated_in(config) == ["scales of the KV cache", "scales of activations"]
    mxfp8 = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}
    assert block_config({"quantization_config": mxfp8}, None) == mxfp8
    assert format_in(mxfp8) == MXFP8


# A config, or the method of one that compressed-tensors makes; it imports transformers.
CHANGES: list[tuple[Values | str, Values]] = [
    (PUBLISHED_FP8, {"quant_method": "gptq"}),
    (PUBLISHED_FP8, {"quant_method": "mxfp4"}),  # gpt-oss's own
    (PUBLISHED_FP8, {"fmt": "e5m2"}),
    (PUBLISHED_FP8, {"activation_scheme": "static"}),
    (PUBLISHED_FP8, {"scale_fmt": "e4m3"}),
    (PUBLISHED_FP8, {"weight_block_size": None}),
    (PUBLISHED_FP8, {"weight_block_size": [128]}),
    (PUBLISHED_FP8, {"weight_block_size": [128, 0]}),
    ("nvfp4", {"format": "pack-quantized"}),
    ("nvfp4", {"transform_config": {"config_groups": {"u": {}}}}),
    ("nvfp4", {"sparsity_config": {"format": "dense"}}),
    (MODELOPT, {"quant_algo": "FP8"}),
    (MODELOPT, {"group_size": 32}),
]


@pytest.mark.parametrize(
    ("described", "change"), CHANGES, ids=[str(change) for _, change in CHANGES]
)
def test_other_weights_are_left_unquantised_or_refused(
    described: Values | str, change: Values
) -> None:
    original = published(described) if isinstance(described, str) else described
    config = {"quantization_config": {**original, **change}}
    assert block_config(config, None) is None
    (key,) = change
    with pytest.raises(
        ConfigError, check=has_violation("generate_config.quantization", "other-quantization", key)
    ):
        block_config(config, "fp8" if described is PUBLISHED_FP8 else "nvfp4")


@pytest.mark.parametrize(
    "key", ["num_bits", "group_size", "type", "symmetric", "actorder", "scale_dtype", "dynamic"]
)
def test_each_property_of_a_group_counts(key: str) -> None:
    config = published("mxfp8")
    config["config_groups"]["group_0"]["weights"][key] = "other"
    refused = has_violation("generate_config.quantization", "other-quantization", f"{key} 'other'")
    with pytest.raises(ConfigError, check=refused):
        block_config({"quantization_config": config}, "mxfp8")


def test_a_config_of_another_format_is_refused() -> None:
    refused = has_violation(
        "generate_config.quantization", "other-quantization", "mxfp8", "weights in nvfp4"
    )
    with pytest.raises(ConfigError, check=refused):
        block_config({"quantization_config": published("nvfp4")}, "mxfp8")
    assert format_in(published("nvfp4")) == NVFP4
    assert format_in({**PUBLISHED_FP8, "weight_block_size": [64, 32]}) == fp8(64, 32)
    assert format_in(published("ue8m0")) == fp8(128, 128, powers_of_two=True)
