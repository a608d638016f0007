"""Quantised inference weights, made by vLLM from the canonical ones at every switch.

Only methods that quantise while loading can be fed: a checkpoint that is already quantised has other tensors than
training does. vLLM leaves the weights of such a layer on the meta device until the loader comes. Here they are made
real in the layout of the unquantised layer, so tracing, planning and writing are those of any other layer, and the
quantisation is its post-load processing, run again at every commit.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.version import TESTED_VERSION
from hybrid_engine.config.inference_rules import QUANTIZATIONS
from hybrid_engine.errors import ConfigError, Violation

logger = logging.getLogger(__name__)


_IMPLIED = {"DeepseekV3ForCausalLM": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""Architecture -> what it means of routing. Without these keys vLLM takes softmax and has no bias for the router."""


def check_quantization(chosen: str | None, device_type: str) -> None:
    """Raise ConfigError for a method that cannot be fed on this platform, naming those that can."""
    known = QUANTIZATIONS.get(device_type, ())
    if chosen is not None and chosen not in known:
        problem = (
            f"{chosen!r} on {device_type}: vLLM {TESTED_VERSION} has no kernels for it there, or it needs weights that "
            "are quantised already"
        )
        remedy = f"Use {' or '.join(map(repr, known))}, or leave it out" if known else "Leave it out"
        raise ConfigError([Violation("quantization", problem, remedy)])


def config_overrides(model_dir: str) -> dict[str, Any]:
    """Values that vLLM takes in place of config.json's: no quantization, for training's weights come unquantised, and
    what vLLM reads there but transformers 5 does not write, for its class computes nothing else."""
    config = json.loads(Path(model_dir, "config.json").read_text())
    implied = {
        key: value for name in config.get("architectures") or () for key, value in _IMPLIED.get(name, {}).items()
    }
    if not config.get("quantization_config"):
        return implied
    logger.info("%s: its quantization_config is not followed: the weights come unquantised", model_dir)
    return {"quantization_config": None, **implied}


def materialize(model: torch.nn.Module) -> None:
    """Make the weights of online quantised layers real, in the layout in which they are loaded; their values are not.

    From then on vLLM takes these layers for loaded ones that wait for their post-load processing.
    """
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
            info = internals.LAYERWISE_INFO.load()(module)
            internals.MATERIALIZE_LAYER.load()(module, info)
            parameter: Any  # vLLM looks for the loader as an attribute of the parameter
            for parameter in module.parameters(recurse=False):
                parameter.weight_loader = internals.ORIGINAL_LOADER.load()(parameter)
            info.reset()
