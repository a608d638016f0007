"""Loader of the software GPU: makes torch's operators for CUDA run on the CPU, in each process at
`import torch`.

torch calls `load` by the entry point in software_gpu-0.dist-info, because this folder is on
PYTHONPATH. Without SOFTWARE_GPU_LIBRARIES, the folder of the libraries, it does nothing. Modules
that are imported later (vLLM's operators, Triton's interpreter) are completed after their import:
see `_COMPLETED`.
"""

import ctypes
import importlib
import importlib.machinery
import os
import sys
from pathlib import Path

_ENVIRONMENT = "SOFTWARE_GPU_LIBRARIES"

# Our module for each of these modules, whose `register()` is called after its execution.
_COMPLETED = {
    "vllm._C_stable_libtorch": "software_gpu_vllm",
    "vllm._moe_C_stable_libtorch": "software_gpu_vllm",
    "triton.runtime.interpreter": "software_gpu_triton",
}

_library = None


def load():
    """Give the operators of aten their CPU kernels, and install the import hook."""
    if _ENVIRONMENT not in os.environ:
        return
    library().software_gpu_adopt_aten()
    importlib.import_module("software_gpu_operators").register()
    sys.meta_path.insert(0, _Completer())


def library():
    """Return operators.so, which provides all functions of interface.h."""
    global _library
    if _library is None:
        path = Path(os.environ[_ENVIRONMENT]) / "operators.so"
        _library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        _declare(_library)
    return _library


def _declare(functions):
    """Declare the parameters of functions that Python calls."""
    address = ctypes.c_uint64
    nbytes = ctypes.c_size_t
    flag = ctypes.c_int
    text = ctypes.c_char_p
    pointer = ctypes.c_void_p
    functions.software_gpu_adopt_aten.restype = ctypes.c_int64
    functions.software_gpu_adopt.argtypes = [text, text]
    functions.software_gpu_begin_kernel.argtypes = [pointer, text]
    functions.software_gpu_end_kernel.argtypes = [pointer]
    functions.software_gpu_end_kernel.restype = None
    functions.software_gpu_access.argtypes = [pointer, address, nbytes, flag, text]
    functions.software_gpu_access.restype = None
    functions.software_gpu_is_accessible.argtypes = [address, nbytes]
    functions.software_gpu_is_capturing.argtypes = [pointer]
    functions.software_gpu_capture.argtypes = [pointer, pointer, pointer, pointer]
    functions.software_gpu_report.argtypes = [text, text]
    functions.software_gpu_report.restype = None


class _Completer:
    """Import hook that completes modules of `_COMPLETED` after their execution."""

    def find_spec(self, name, path=None, target=None):
        if name not in _COMPLETED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _CompletingLoader(spec.loader, _COMPLETED[name])
        return spec


class _CompletingLoader:
    """Loader of a module that then registers our module."""

    def __init__(self, loader, completion):
        self._loader = loader
        self._completion = completion

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        importlib.import_module(self._completion).register()
