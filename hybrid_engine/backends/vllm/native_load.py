"""What vLLM itself would load: the ground truth for the weights that a switch brings.

expected = native_parameters(engine, checkpoint_dir)      # a second model in this rank's groups, freed again
... compare with what an observer of `engine.adaptor` was shown during a switch of the same weights, bit by bit
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.arguments import engine_config
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.isolation import forget_models, register_model_class

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.engine import InferenceEngine


def native_parameters(engine: InferenceEngine, checkpoint_dir: str, **changes: Any) -> dict[str, torch.Tensor]:
    """What vLLM's own loader puts into a fresh model of this rank, before post-load processing; by parameter name.

    Buffers that the loader writes are among them. What no checkpoint tensor reaches (vocabulary padding) is zero, and
    what the engine quantises after loading is as before.

    Args:
        engine: gives rank, groups and settings. Its own weights are not touched.
        checkpoint_dir: a Hugging Face checkpoint on disk.
        changes: arguments of vLLM's `EngineArgs` in place of the engine's.

    Memory: a second copy of this rank's weights, until the result is dropped. Not collective.
    """
    from vllm.model_executor.model_loader import DefaultModelLoader

    model, config = second_model(engine.settings, engine.rank, checkpoint_dir, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    buffers_before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with _building(config):
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    loaded = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name in engine.adaptor.written_buffers or not torch.equal(buffer, buffers_before[name]):
            loaded[name] = buffer.data
    del model
    gc.collect()  # a model's parameters and their loaders refer to each other
    return loaded


def second_model(settings: InferenceSettings, rank: int, model_dir: str, **changes: Any) -> tuple[torch.nn.Module, Any]:
    """Another vLLM model in this rank's groups, constructed but not loaded: the model and its `VllmConfig`.

    `model_dir` may be another model's than the engine's; `changes`: arguments in place of those from the settings.
    """
    from vllm.platforms import current_platform

    register_model_class(model_dir)
    changes = {"load_format": "safetensors", "quantization": None, **changes}
    config = engine_config(replace(settings, model_dir=model_dir), rank, current_platform.device_type, **changes)
    with _building(config), torch.device(config.device_config.device):
        model = internals.INITIALIZE_MODEL.load()(vllm_config=config, model_config=config.model_config)
    forget_models()
    return model, config


@contextlib.contextmanager
def _building(config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    dtype = internals.DEFAULT_DTYPE.load()(config.model_config.dtype)
    with dtype, set_current_vllm_config(config):
        yield
