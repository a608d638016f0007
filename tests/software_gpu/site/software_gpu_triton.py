"""Triton's interpreter on the software GPU: changes that make it behave like a device.

Applied in memory at the import of `triton.runtime.interpreter` (with TRITON_INTERPRET=1):

1. Kernels work directly on the device's memory, which the CPU can read. The interpreter would copy
   the whole storage of every argument to the host and back, even if only read: slow, and reported
   as a race by the checker.
2. Loads and stores are declared to the checker, and addresses without memory raise CUDA's error.
3. During the capture of a CUDA graph a kernel does not run; the launch of the graph runs it.
4. bfloat16. The interpreter represents it by the bits in uint16 and computes with these integers: a
product of tiles
   (`tl.dot`) is a product of bit patterns, likewise sums and comparisons. It also truncates float32
   to bfloat16, while hardware rounds to nearest, ties to even. Triton documents the first ("the
   interpreter does not support operations on bfloat16"), but vLLM's attention kernels multiply
   bfloat16 tiles.
5. `tl.range` yields tensors, as in compiled kernels. The interpreter yields Python numbers, which
   have no `.to(tl.int64)`.
"""

import contextlib
import ctypes

import numpy as np
import torch
from software_gpu_loader import library


def register():
    """Change the interpreter, after the execution of its module."""
    from triton.runtime import interpreter

    # Several names refer to the single instance, so its class is changed instead of the instance.
    interpreter.interpreter_builder.__class__ = _make_builder(interpreter)
    interpreter.ReduceOps.sum = _make_sum(interpreter.ReduceOps.sum)
    interpreter._patch_lang_core = _make_patch(interpreter, interpreter._patch_lang_core)
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, args, args_host, kwargs, kwargs_host: None
    executor.__call__ = _make_call(executor.__call__)


# -- bfloat16
# --------------------------------------------------------------------------------------------------


def widen(bits):
    """Convert bits of bfloat16 to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """Convert numbers to bits of bfloat16, rounded to nearest with ties to even."""
    wide = np.asarray(values).astype(np.float32)
    bits = wide.view(np.uint32)
    to_nearest = np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    rounded = ((bits + to_nearest) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _make_builder(interpreter):
    """Return the interpreter's builder, extended by device memory and bfloat16 numbers."""
    tl = interpreter.tl
    handle_of = interpreter.TensorHandle

    def is_bfloat16(handle):
        # The result of a comparison is boolean, but has the type of its operands.
        return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16

    def number(handle):
        return handle_of(widen(handle.data), tl.float32) if is_bfloat16(handle) else handle

    def narrowed(handle):
        return handle_of(narrow(handle.data), tl.bfloat16)

    class Builder(interpreter.InterpreterBuilder):
        # -- numbers: operations on bfloat16 are operations on float32 whose result is rounded

        def get_bf16(self, value):
            return narrowed(self.get_fp32(value))

        def binary_op(self, lhs, rhs, op):
            if not is_bfloat16(lhs) and not is_bfloat16(rhs):
                return super().binary_op(lhs, rhs, op)
            result = super().binary_op(number(lhs), number(rhs), op)
            return result if result.data.dtype == bool else narrowed(result)

        def ternary_op(self, lhs, rhs, other, op):
            if not is_bfloat16(other):
                return super().ternary_op(lhs, rhs, other, op)
            return narrowed(super().ternary_op(number(lhs), number(rhs), number(other), op))

        def unary_op(self, arg, op):
            if not is_bfloat16(arg):
                return super().unary_op(arg, op)
            return narrowed(super().unary_op(number(arg), op))

        def create_fma(self, x, y, z):
            if not is_bfloat16(z):
                return super().create_fma(x, y, z)
            return narrowed(super().create_fma(number(x), number(y), number(z)))

        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            # The accumulator is float32, and a product of two bfloat16 numbers is exact there.
            return super().create_dot(
                number(a), number(b), d, input_precision, max_num_imprecise_acc
            )

        def cast_impl(self, src, dst_type):
            to_bfloat16 = dst_type.scalar == tl.bfloat16
            if not to_bfloat16 and not is_bfloat16(src):
                return super().cast_impl(src, dst_type)
            source = number(src)
            if to_bfloat16:
                return handle_of(narrow(source.data), tl.bfloat16)
            return handle_of(
                source.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar
            )

        def create_fp_to_fp(self, src, dst_type, rounding_mode):
            rounds_to_nearest = rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE
            if (
                dst_type.scalar == tl.bfloat16
                and src.dtype.scalar == tl.float32
                and rounds_to_nearest
            ):
                return handle_of(narrow(src.data), tl.bfloat16)
            return super().create_fp_to_fp(number(src), dst_type, rounding_mode)

        # -- memory: accesses are declared when the kernel is over

        def create_masked_load(self, ptrs, mask, other, *options):
            _note(ptrs, mask, writes=False)
            return super().create_masked_load(ptrs, mask, other, *options)

        def create_masked_store(self, ptrs, value, mask, *options):
            _note(ptrs, mask, writes=True)
            return super().create_masked_store(ptrs, value, mask, *options)

        def create_atomic_rmw(self, operation, ptr, val, mask, *options):
            _note(ptr, mask, writes=True)
            return super().create_atomic_rmw(operation, ptr, val, mask, *options)

        def create_atomic_cas(self, ptr, cmp, val, *options):
            _note(ptr, None, writes=True)
            return super().create_atomic_cas(ptr, cmp, val, *options)

    return Builder


def _make_sum(original):
    def sum_of_any_type(self, input):
        is_bfloat16 = input.dtype.name == "bf16"
        if not is_bfloat16:
            return original(self, input)
        total = np.sum(widen(input.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(narrow(total), input.dtype)

    return sum_of_any_type


# -- loops
# --------------------------------------------------------------------------------------------------


def _make_patch(interpreter, original):
    """Return a function that gives a Triton module the interpreter's operations."""
    tl = interpreter.tl
    semantic = interpreter.interpreter_semantic

    def range_of_tensors(first, second=None, step=None, **options):
        start, end = (0, first) if second is None else (first, second)
        step = 1 if step is None else step
        is_long = any(
            isinstance(bound, tl.tensor) and bound.dtype == tl.int64 for bound in (start, end, step)
        )
        for number in range(start, end, step):
            counter = semantic.to_tensor(number)
            yield semantic.cast(counter, tl.int64) if is_long else counter

    def patch(lang, scope):
        original(lang, scope)
        scope.set_attr(lang, "range", range_of_tensors)

    return patch


# -- memory
# --------------------------------------------------------------------------------------------------


class Accesses:
    """Bytes that a kernel has read or written, as runs [start, end)."""

    _MOST_KEPT = 4096  # Number of runs after which adjacent ones are merged.

    def __init__(self):
        self._runs = {False: [], True: []}
        self._num_new = {False: 0, True: 0}

    def add(self, starts, ends, writes):
        self._runs[writes].append((starts, ends))
        self._num_new[writes] += len(starts)
        if self._num_new[writes] > self._MOST_KEPT:
            self._runs[writes] = [self._merged(writes)]
            self._num_new[writes] = 0

    def declare(self, stream, name):
        """Declare the runs to the checker, as accesses of the last operation on the stream."""
        for writes in (False, True):
            if not self._runs[writes]:
                continue
            starts, ends = self._merged(writes)
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                library().software_gpu_access(stream, start, end - start, writes, name)

    def _merged(self, writes):
        starts = np.concatenate([starts for starts, _ in self._runs[writes]])
        ends = np.concatenate([ends for _, ends in self._runs[writes]])
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        ends = np.maximum.accumulate(ends[order])
        begins_run = np.ones(len(starts), dtype=bool)
        begins_run[1:] = starts[1:] > ends[:-1]
        ends_run = np.roll(begins_run, -1)
        return starts[begins_run], ends[ends_run]


_current = None  # Accesses of the running kernel.


def _note(ptrs, mask, writes):
    """Record the bytes of a load or store; raise for addresses without memory."""
    addresses = ptrs.data.reshape(-1)
    if mask is not None:
        mask_data = getattr(mask, "data", mask)  # Block pointers give arrays.
        addresses = addresses[np.broadcast_to(mask_data, ptrs.data.shape).reshape(-1)]
    if addresses.size == 0 or _current is None:
        return
    nbytes = np.uint64(max(1, ptrs.get_element_ty().primitive_bitwidth // 8))
    is_first = np.ones(addresses.size, dtype=bool)
    is_first[1:] = addresses[1:] != addresses[:-1] + nbytes
    starts = addresses[is_first]
    ends = addresses[np.roll(is_first, -1)] + nbytes
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if not library().software_gpu_is_accessible(start, end - start):
            library().software_gpu_access(
                None, start, end - start, writes, b"a kernel of Triton"
            )  # Reports it.
            raise RuntimeError(
                f"CUDA error: an illegal memory access was encountered (Triton, at {start:#x})"
            )
    _current.add(starts, ends, writes)


# -- launches
# --------------------------------------------------------------------------------------------------


def _make_call(original):
    def call(executor, *args, **kwargs):
        if not torch.cuda.is_initialized():
            return original(executor, *args, **kwargs)
        stream = torch.cuda.current_stream().cuda_stream
        name = _lasting_name(executor.fn.__name__)
        if library().software_gpu_is_capturing(stream):
            _capture(stream, name, original, executor, args, kwargs)
        else:
            with _launch(stream, name):
                _run(stream, name, original, executor, args, kwargs)

    return call


_names = {}


def _lasting_name(name):
    """Return the name as bytes that are never freed: the checker keeps pointers to them."""
    return _names.setdefault(name, name.encode())


def _check(error, name):
    if error:
        raise RuntimeError(f"CUDA error {error}: the launch of {name.decode()}")


@contextlib.contextmanager
def _launch(stream, name):
    _check(library().software_gpu_begin_kernel(stream, name), name)
    try:
        yield
    finally:
        library().software_gpu_end_kernel(stream)


def _run(stream, name, original, executor, args, kwargs):
    with _noting() as accesses:
        original(executor, *args, **kwargs)
    accesses.declare(stream, name)


@contextlib.contextmanager
def _noting():
    global _current
    before, _current = _current, Accesses()
    try:
        yield _current
    finally:
        _current = before


# Kernels of CUDA graphs by number: (name, original, executor, args, kwargs).
_captured = {}


def _capture(stream, name, original, executor, args, kwargs):
    number = max(_captured, default=0) + 1
    # CPU tensors over the same bytes, because a graph does not keep its arguments alive.
    args = tuple(_without_owning(arg) for arg in args)
    kwargs = {key: _without_owning(arg) for key, arg in kwargs.items()}
    _captured[number] = (name, original, executor, args, kwargs)
    _check(library().software_gpu_capture(stream, _run_captured, number, _release_captured), name)


def _without_owning(arg):
    if isinstance(arg, torch.Tensor):
        return torch.ops.software_gpu.over_same_bytes(arg) if arg.is_cuda else arg
    if isinstance(arg, tuple):
        parts = [_without_owning(part) for part in arg]
        return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
    return arg


def _lasting_callback(function):
    """Return a C callback that is never freed, because graphs may outlive this module."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    return ctypes.cast(callback, ctypes.c_void_p)


def _launch_captured(number):
    name, original, executor, args, kwargs = _captured[number]
    # A graph is launched on the current stream and runs in the launching thread.
    stream = torch.cuda.current_stream().cuda_stream
    try:
        _run(stream, name, original, executor, args, kwargs)
    except Exception as error:
        library().software_gpu_report(b"GRAPH", f"{name.decode()} in a graph: {error}".encode())


_run_captured = _lasting_callback(_launch_captured)
_release_captured = _lasting_callback(lambda number: _captured.pop(number, None))
