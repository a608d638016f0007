"""Operators of aten for CUDA only that Megatron or vLLM call.

Each function is registered as the CPU's kernel; operators.so then runs it for CUDA on the device's
memory.
"""

import torch
from software_gpu_loader import library

_kept = []  # torch.library removes kernels when their Library is freed.


def register():
    """Register all operators of this file."""
    register_kernels("aten", _KERNELS)


def register_kernels(namespace, kernels):
    """Register functions as kernels of the CPU and of CUDA, by the name of their operator.

    Skips operators that this build of the library does not define.
    """
    registrations = torch.library.Library(namespace, "IMPL")
    _kept.append(registrations)
    for name, kernel in kernels.items():
        operator, _, overload = name.partition(".")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", "CUDA"):
            continue
        registrations.impl(name, kernel, "CPU")
        library().software_gpu_adopt(f"{namespace}::{operator}".encode(), overload.encode())


# -- products whose result is wider than their factors
# --------------------------------------------------------------- CUDA multiplies 16-bit factors
# exactly and sums in float32, so casting the factors first gives the same result.


def _mm(self, mat2, out_dtype):
    return torch.mm(self.to(out_dtype), mat2.to(out_dtype))


def _mm_out(self, mat2, out_dtype, *, out):
    return out.copy_(_mm(self, mat2, out_dtype))


def _bmm(self, mat2, out_dtype):
    return torch.bmm(self.to(out_dtype), mat2.to(out_dtype))


def _bmm_out(self, mat2, out_dtype, *, out):
    return out.copy_(_bmm(self, mat2, out_dtype))


def _addmm(self, mat1, mat2, out_dtype, *, beta=1, alpha=1):
    return torch.addmm(
        self.to(out_dtype), mat1.to(out_dtype), mat2.to(out_dtype), beta=beta, alpha=alpha
    )


def _addmm_out(self, mat1, mat2, out_dtype, *, beta=1, alpha=1, out):
    return out.copy_(_addmm(self, mat1, mat2, out_dtype, beta=beta, alpha=alpha))


def _baddbmm(self, batch1, batch2, out_dtype, *, beta=1, alpha=1):
    return torch.baddbmm(
        self.to(out_dtype), batch1.to(out_dtype), batch2.to(out_dtype), beta=beta, alpha=alpha
    )


def _baddbmm_out(self, batch1, batch2, out_dtype, *, beta=1, alpha=1, out):
    return out.copy_(_baddbmm(self, batch1, batch2, out_dtype, beta=beta, alpha=alpha))


# -- root-mean-square norm
# ---------------------------------------------------------------------------------------------


def _fused_rms_norm(input, normalized_shape, weight, eps):
    """Compute in float32 and round once; the reciprocal of the root stays float32."""
    wide = input.to(_wide(input))
    if eps is None:
        eps = torch.finfo(wide.dtype).eps
    reciprocal = torch.rsqrt(
        wide.square().mean(_normalized_dims(input, normalized_shape), keepdim=True) + eps
    )
    normalized = wide * reciprocal
    if weight is not None:
        normalized = normalized * weight.to(wide.dtype)
    return normalized.to(input.dtype), reciprocal


def _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    """Return the gradients of the input and the weight that `output_mask` selects."""
    dims = _normalized_dims(input, normalized_shape)
    grad = grad_out.to(rstd.dtype)
    normalized = input.to(rstd.dtype) * rstd
    grad_input = None
    grad_weight = None
    if output_mask[0]:
        grad_normalized = grad if weight is None else grad * weight.to(rstd.dtype)
        mean = (grad_normalized * normalized).mean(dims, keepdim=True)
        grad_input = (rstd * (grad_normalized - normalized * mean)).to(input.dtype)
    if output_mask[1] and weight is not None:
        outer = tuple(range(input.dim() - len(normalized_shape)))
        grad_weight = (grad * normalized).sum(outer) if outer else grad * normalized
        grad_weight = grad_weight.to(weight.dtype)
    return grad_input, grad_weight


def _wide(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _normalized_dims(input, normalized_shape):
    return tuple(range(input.dim() - len(normalized_shape), input.dim()))


# -- histogram, which CUDA also has for integers
# ---------------------------------------------------------------------


def _histc(self, bins=100, min=0, max=0):
    """Count in equal steps from `min` to `max`, or over the range of values if these are equal."""
    values = self.flatten().to(torch.float64)
    if min == max and len(values):
        min, max = values.min(), values.max()
    if min == max:
        min, max = min - 1, max + 1
    values = values[(values >= min) & (values <= max)]
    steps = ((values - min) * bins / (max - min)).long().clamp(max=bins - 1)
    return torch.bincount(steps, minlength=bins).to(self.dtype)


_KERNELS = {
    "histc": _histc,
    "mm.dtype": _mm,
    "mm.dtype_out": _mm_out,
    "bmm.dtype": _bmm,
    "bmm.dtype_out": _bmm_out,
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _addmm_out,
    "baddbmm.dtype": _baddbmm,
    "baddbmm.dtype_out": _baddbmm_out,
    "_fused_rms_norm": _fused_rms_norm,
    "_fused_rms_norm_backward": _fused_rms_norm_backward,
}
