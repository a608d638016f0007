"""Weights as vLLM itself loads them: the ground truth for the weights that a switch brings.

# a second model in this rank's groups, freed again
expected = native_parameters(engine, checkpoint_dir)
... compare bit by bit with the tensors shown to an observer of `engine.adaptor` during a switch ...
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.arguments import engine_config
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.isolation import forget_models, register_model_class
from hybrid_engine.backends.vllm.weights.loader import configured
from hybrid_engine.backends.vllm.weights.tracing import storage_key
from hybrid_engine.ranks.torch_internals import TensorDict

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.engine import InferenceEngine


def native_parameters(engine: InferenceEngine, checkpoint_dir: str, **changes: Any) -> TensorDict:
    """Return the parameters that vLLM's own loader fills in a new model of this rank, by name.

    Post-load processing has not run, so weights that the engine quantises after loading are not
    quantised. Buffers that the loader writes are included, and so are those of a drafter, under
    "drafter.", that it does not share with the main model. Elements that no checkpoint tensor fills
    (vocabulary padding) are zero.

    Args:
        engine: provides rank, groups and settings. Its weights are not touched.
        checkpoint_dir: a Hugging Face checkpoint on disk.
        changes: arguments of vLLM's `EngineArgs` that replace the engine's.

    Memory: a second copy of this rank's weights, until the result is dropped. Not collective.
    """
    model, config = second_model(engine.settings, engine.rank, checkpoint_dir, **changes)
    written = engine.adaptor.written_buffers
    loaded = _loaded(model, config, config.model_config, written)
    del model
    if engine.settings.generate.drafts_with_mtp:
        draft_config = config.speculative_config.draft_model_config
        drafter = _constructed(config, draft_config)
        of_main = set(engine.adaptor.model.modules())
        live_drafter = internals.worker_of(engine.llm).get_draft_model()
        live = live_drafter.named_modules(remove_duplicate=False)
        shared = {name for name, module in live if module in of_main}
        loaded |= {
            f"drafter.{name}": tensor
            for name, tensor in _loaded(drafter, config, draft_config, written).items()
            if name.rpartition(".")[0] not in shared
        }
        del drafter
    gc.collect()  # a model's parameters and their loaders refer to each other
    return loaded


def _loaded(
    model: torch.nn.Module,
    config: Any,
    model_config: Any,
    written: Collection[str],
) -> TensorDict:
    """Return the parameters, buffers `written` and other buffers that vLLM's loader fills."""
    from vllm.model_executor.model_loader import DefaultModelLoader

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    buffers_before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with configured(config, config.model_config.dtype):
        DefaultModelLoader(config.load_config).load_weights(model, model_config)
    loaded = {name: parameter.data for name, parameter in model.named_parameters()}
    of_parameters = {storage_key(parameter) for parameter in model.parameters()}
    for name, buffer in model.named_buffers():
        if storage_key(buffer) in of_parameters:
            continue  # a view, as Mamba's mixers have of their convolution's weight
        if name in written or not torch.equal(buffer, buffers_before[name]):
            loaded[name] = buffer.data
    return loaded


def second_model(
    settings: InferenceSettings,
    rank: int,
    model_dir: str,
    **changes: Any,
) -> tuple[torch.nn.Module, Any]:
    """Construct another vLLM model in this rank's groups; return it and its `VllmConfig`.

    Its weights are not loaded.

    `model_dir` may hold another model than the engine's. `changes`: arguments that replace those
    from the settings.
    """
    from vllm.platforms import current_platform

    register_model_class(model_dir)
    changes = {"load_format": "safetensors", "quantization": None, **changes}
    settings = replace(settings, model_dir=model_dir)
    config = engine_config(settings, rank, current_platform.device_type, **changes)
    return _constructed(config, config.model_config), config


def _constructed(config: Any, model_config: Any) -> torch.nn.Module:
    """Return a model of this rank: the main one, or the drafter."""
    initialize_model = internals.INITIALIZE_MODEL
    with configured(config, config.model_config.dtype), torch.device(config.device_config.device):
        model = initialize_model(vllm_config=config, model_config=model_config)
    forget_models()
    return model
