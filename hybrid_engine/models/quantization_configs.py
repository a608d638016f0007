"""`quantization_config` of config.json for weights in blocks, of which vLLM has serialised methods.

    quant_method          quantised by                          formats
    fp8                   DeepSeek, Qwen (weight_block_size)    fp8
    compressed-tensors    llm-compressor (format)               mxfp8, mxfp4, nvfp4
    modelopt              NVIDIA ModelOpt (quant_algo)          mxfp8, nvfp4

Scales that were calibrated on data, of activations and of the KV cache, are left out: a trainer has
no such values. vLLM then computes with activations in the weights' dtype (nvfp4), and has an
unquantised cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.models.block_quantization import (
    BLOCK_METHODS,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_OF_MODELOPT,
    BlockFormat,
    fp8,
)

_KEY = "generate_config.quantization"

_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate", "block_sparse_moe.gate", "mlp.router")
"""Modules of a layer that choose experts. vLLM quantises some of them unless they are excluded."""

Known = Mapping[str, tuple[Any, ...]]
"""Key of a configuration -> values that describe the weights of a format; None: absent."""

_FP8: Known = {
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float", "ue8m0"),
    "store_dtype": (None,),
}
_MATRICES: Known = {
    "type": ("float",),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
}
_COMPRESSED_TENSORS: Mapping[str, tuple[BlockFormat, Known]] = {
    "mxfp8-quantized": (
        MXFP8,
        # vLLM tells it from other fp8 by the dtype of its scales.
        {
            "num_bits": (8,),
            "group_size": (32,),
            "scale_dtype": ("torch.uint8",),
            "strategy": (None, "group"),
        },
    ),
    "mxfp4-pack-quantized": (
        MXFP4,
        {
            "num_bits": (4,),
            "group_size": (32,),
            "scale_dtype": (None, "torch.uint8"),
            "strategy": (None, "group"),
        },
    ),
    "nvfp4-pack-quantized": (
        NVFP4,
        {
            "num_bits": (4,),
            "group_size": (16,),
            "scale_dtype": (None, "torch.float8_e4m3fn"),
            "strategy": (None, "tensor_group"),
        },
    ),
}
_ONLY_COMPRESSED: Known = {"sparsity_config": (None, {}), "transform_config": (None, {})}
_OF_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
_MODELOPT = {"NVFP4": NVFP4_OF_MODELOPT, "W4A16_NVFP4": NVFP4_OF_MODELOPT, "MXFP8": MXFP8}


class _OtherWeights(Exception):
    """A quantization_config that describes none of the formats; the arguments are its problems."""


def block_config(hf_config: HfConfig, method: str | None) -> dict[str, Any] | None:
    """Return the quantization_config of weights that are to be sent in blocks; None if unquantised.

    Args:
        hf_config: contents of config.json.
        method: `generate_config.quantization`. Another method than those of `BLOCK_METHODS`, if
            given, takes precedence over config.json.

    Raises:
        ConfigError: one of `BLOCK_METHODS`, but config.json describes other weights.
    """
    published = hf_config.get("quantization_config")
    if method is not None and method not in BLOCK_METHODS:
        return None
    if not isinstance(published, Mapping):
        if method is None:
            return None
        if "text_config" in hf_config:
            problem = (
                f"{method}, but which layers of a model with text_config are quantised is not known"
            )
            raise ConfigError.of(
                _KEY,
                problem,
                "Use a config.json with quantization_config, or another method",
                code="other-quantization",
            )
        return _usual_config(hf_config, method)
    try:
        described = format_in(published).method
        problems = () if method in (None, described) else (f"weights in {described}",)
    except _OtherWeights as other:
        problems = other.args
    if not problems:
        return _without_calibrated(published)
    if method is None:
        return None
    raise ConfigError(
        [
            Violation(
                _KEY,
                f"{method}, but the model's quantization_config has {problem}",
                "Remove the quantization_config, or use another method",
                code="other-quantization",
            )
            for problem in problems
        ]
    )


def format_in(quantization_config: Mapping[str, Any]) -> BlockFormat:
    """Return the format that a quantization_config of `block_config` describes."""
    method = quantization_config.get("quant_method")
    problems: list[str] = []
    form: BlockFormat | None = None
    if method == "fp8":
        problems += _problems(quantization_config, _FP8)
        size = quantization_config.get("weight_block_size")
        is_pair = isinstance(size, list | tuple) and len(size) == 2
        if is_pair and all(type(part) is int and part > 0 for part in size or ()):
            is_rounded = quantization_config.get("scale_fmt") == "ue8m0"
            form = fp8(*size or (), powers_of_two=is_rounded)
        else:
            problems.append(
                f"weight_block_size {size!r}, not two positive numbers such as [128, 128]"
            )
    elif method == "compressed-tensors":
        problems += _problems(quantization_config, _ONLY_COMPRESSED)
        form = _compressed_tensors_format(quantization_config, problems)
    elif isinstance(method, str) and method.startswith("modelopt"):
        section = _section(quantization_config)
        algorithm = str(section.get("quant_algo")).upper()
        form = _MODELOPT.get(algorithm)
        if form is None:
            problems.append(f"quant_algo {algorithm!r}, not {' or '.join(_MODELOPT)}")
        # Without a known algorithm there is no group size to compare with.
        problems += _problems(section, {"group_size": (None, form and form.blocks.columns)})
    else:
        problems.append(f"quant_method {method!r}, not fp8, compressed-tensors or modelopt")
    if problems or form is None:
        raise _OtherWeights(*problems)
    return form


def calibrated_in(hf_config: HfConfig) -> list[str]:
    """Return what `block_config` leaves out of a published quantization_config."""
    published = hf_config.get("quantization_config")
    if not isinstance(published, Mapping):
        return []
    names = []
    if any(_section(published).get(key) for key in _OF_CACHE):
        names.append("scales of the KV cache")
    # What the second leaves out beyond the first are scales of activations.
    if _without_cache(published) != _without_calibrated(published):
        names.append("scales of activations")
    return names


def _without_calibrated(published: HfConfig) -> dict[str, Any]:
    config = _without_cache(published)
    # Formats without a scale of the whole tensor quantise activations as they come, by no
    # calibrated scale.
    if format_in(published).tensor_scale is None:
        return config
    groups = config.get("config_groups")
    if isinstance(groups, Mapping):
        config["config_groups"] = {
            name: {**group, "input_activations": None} for name, group in groups.items()
        }
    # ModelOpt's name for the same weights with activations of 16 bits.
    if str(_section(config).get("quant_algo")).upper() == "NVFP4":
        return _with_section(config, {"quant_algo": "W4A16_NVFP4"})
    return config


def _without_cache(config: HfConfig) -> dict[str, Any]:
    # vLLM requires the keys in ModelOpt's older form.
    present = _section(config).keys() & set(_OF_CACHE)
    return _with_section(config, dict.fromkeys(sorted(present)))


def _section(config: HfConfig) -> Mapping[str, Any]:
    """Return the part of ModelOpt's older form that describes the weights, else the whole."""
    section = config.get("quantization")
    return section if isinstance(section, Mapping) else config


def _with_section(config: HfConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    if _section(config) is config:
        return {**config, **changes}
    return {**config, "quantization": {**_section(config), **changes}}


def _compressed_tensors_format(
    config: Mapping[str, Any],
    problems: list[str],
) -> BlockFormat | None:
    groups = _groups_of(config)
    # A group may have a format of its own. Several formats are one problem, named together.
    names = {group.get("format") or config.get("format") for group in groups}
    (name,) = names if len(names) == 1 else (sorted(map(str, names)),)
    if not isinstance(name, str) or name not in _COMPRESSED_TENSORS:
        problems.append(f"format {name!r}, not {' or '.join(_COMPRESSED_TENSORS)}")
        return None
    form, known = _COMPRESSED_TENSORS[name]
    known = {**known, **_MATRICES}
    for group in groups:
        weights = group.get("weights")
        problems += _problems(weights if isinstance(weights, Mapping) else {}, known)
        if group.get("output_activations"):
            problems.append("output_activations")
    return form


def _groups_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        return []
    return [group for group in groups.values() if isinstance(group, Mapping)]


def _usual_config(hf_config: HfConfig, method: str) -> dict[str, Any]:
    """Return the quantization_config that a model without one would be published with."""
    num_layers = int(hf_config.get("num_hidden_layers") or 0)
    routers = [f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in _ROUTERS]
    excluded = ["lm_head", *routers]
    if method == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": excluded,
        }
    ((name, (form, known)),) = (
        item for item in _COMPRESSED_TENSORS.items() if item[1][0].method == method
    )
    # The last of a key's values is the explicit one; None stands for a key that is left out.
    weights = {key: values[-1] for key, values in known.items()} | {
        "type": "float",
        "symmetric": True,
        "dynamic": False,
    }
    activations = None if form.tensor_scale is not None else {**weights, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": excluded,
    }


def _problems(config: Mapping[str, Any], known: Known) -> Iterator[str]:
    """Yield the properties of a configuration that are not those of a format's weights."""
    for key, values in known.items():
        value = config.get(key)
        if value not in values:
            names = " or ".join(str(name) for name in values if name not in (None, {}))
            yield f"{key} {value!r}, not {names or 'absent'}"
