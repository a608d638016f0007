"""verl's whole trainer on a CPU, which counts as a GPU for Ray. See also verl_on_cpu."""

from __future__ import annotations

from functools import partial

from verl.utils import distributed

from tests.hybrid_engine.integrations import verl_on_cpu

verl_on_cpu.DEVICE.get_device_name = lambda: "cpu"
verl_on_cpu.PlatformCPU.ray_resource_name = lambda _: "GPU"  # type: ignore[method-assign]
# verl names a backend for the CPU and one for the device.
distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)
