"""The last that the server of ranks imports: what each rank would do alike before its first engine is done here, and
what is there by now no rank's garbage collector looks at again."""

import gc
import importlib.util

if importlib.util.find_spec("vllm"):
    from vllm.platforms import current_platform

    # vLLM's stand-ins for Triton's kernels: it looks through all modules for their names, once for each engine.
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None  # type: ignore[method-assign]

gc.collect()
gc.freeze()
