"""Last import of the fork server of ranks: does the set-up that all ranks share, then freezes all
objects.

Garbage collectors of the ranks skip frozen objects.
"""

import gc
import importlib.util

if importlib.util.find_spec("vllm"):
    from vllm.platforms import current_platform

    # vLLM searches all modules for Triton kernels to replace, once per engine; do so only once.
    # vLLM 0.24 has none.
    if current_platform.register_triton_kernel_overrides is not None:
        current_platform.register_triton_kernel_overrides()
        current_platform.register_triton_kernel_overrides = lambda: None  # type: ignore[method-assign]

gc.collect()
gc.freeze()
