"""Weights in blocks: quantised by the libraries that write checkpoints, and kernels of torch for
vLLM on a CPU.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.values import Values
from tests.zoo.families import read_config, write_config

BLOCK = 128
PUBLISHED_FP8 = {
    **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    "weight_block_size": [BLOCK, BLOCK],
}
"""quantization_config of published checkpoints, without their `modules_to_not_convert`."""

MODELOPT: Values = {
    **{
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt"},
    },
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    "config_groups": {
        "group_0": {
            **{
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "group_size": 16},
            },
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
                "dynamic": False,
            },
        }
    },
}
"""The `quantization_config` of NVIDIA's NVFP4 checkpoints."""

SCHEMES = {"mxfp8": "MXFP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4A16"}
"""Presets of compressed-tensors."""
FORMATS = {
    "mxfp8": "mxfp8-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


def published(method: str, excluded: Collection[str] = (), scheme: str = "") -> Values:
    """Return the quantization_config of a published checkpoint."""
    if method == "fp8":
        return {**PUBLISHED_FP8, "modules_to_not_convert": list(excluded)}
    if method == "ue8m0":
        return {**published("fp8", excluded), "scale_fmt": "ue8m0"}
    if method == "modelopt":
        return {**MODELOPT, "ignore": list(excluded)}
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    groups = {"group_0": preset_name_to_scheme(scheme or SCHEMES[method], ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=list(excluded), format=FORMATS[method])
    return json.loads(
        json.dumps({**config.to_dict(), "quantization_status": "compressed"}, default=str)
    )


def quantised(method: str, weight: torch.Tensor, largest: float | None = None) -> TensorDict:
    """Return the tensors of a published checkpoint for a weight, by the ends of their names.

    `largest`: largest magnitude of the weights that vLLM fuses with this one, for nvfp4.
    """
    if method in ("fp8", "ue8m0"):
        return _in_fp8(weight, powers_of_two=method == "ue8m0")
    if method == "modelopt":
        return _by_modelopt(weight.float(), largest)
    return _by_compressed_tensors(method, weight.float(), largest)


def _in_fp8(weight: torch.Tensor, powers_of_two: bool) -> TensorDict:
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.ones(-(-rows // BLOCK), -(-columns // BLOCK))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            box = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            block = weight[box].float()
            if powers_of_two:
                # As DeepGEMM, which quantises DeepSeek-V3.1's.
                scales[row, column] = 2.0 ** (block.abs().max().clamp(1e-4) / 448).log2().ceil()
            elif block.abs().max() > 0:
                scales[row, column] = block.abs().max() / 448
            values[box] = (block / scales[row, column]).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scales}


def _by_compressed_tensors(method: str, weight: torch.Tensor, largest: float | None) -> TensorDict:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(SCHEMES[method], ["Linear"])
    blocks = weight.unflatten(-1, (-1, scheme.weights.group_size))
    tensors = {"weight": weight}
    of_tensor = None
    if method == "nvfp4":
        most = weight.abs().max() if largest is None else torch.tensor(largest)
        of_tensor = generate_gparam(-most, most)
        tensors["weight_global_scale"] = of_tensor
    with torch.compiler.set_stance("force_eager"):
        tensors["weight_scale"], _ = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=of_tensor
        )
        return dict(
            BaseCompressor.get_value_from_registry(FORMATS[method]).compress(tensors, scheme)
        )


def _by_modelopt(weight: torch.Tensor, largest: float | None) -> TensorDict:
    """Quantise by the formulas of NVFP4QTensor, ModelOpt 0.47."""
    most = weight.abs().max() if largest is None else torch.tensor(largest)
    of_tensor = most / (6.0 * 448.0)
    scales = weight.abs().unflatten(-1, (-1, 16)).amax(-1) / (6.0 * of_tensor)
    scales[scales == 0] = 1.0
    scales = scales.clamp(2**-9, 448).to(torch.float8_e4m3fn)
    quotients = weight / (scales.float() * of_tensor).repeat_interleave(16, 1)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    # In the middle of two values, the even one.
    odd = torch.isin(quotients.abs(), bounds[1::2])
    codes = torch.searchsorted(bounds, quotients.abs()) + odd + 8 * (quotients < 0)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": of_tensor.view(1)}


def dequantised(method: str, tensors: Batch) -> torch.Tensor:
    """Return the weight, in float32, that a kernel computes with."""
    if method in ("fp8", "ue8m0"):
        return _spread(tensors["weight"].float(), tensors["weight_scale_inv"])
    scales = tensors["weight_scale"]
    if method == "nvfp4":
        factors = scales.float() / tensors["weight_global_scale"]
    elif method == "modelopt":
        factors = scales.float() * tensors["weight_scale_2"]
    else:
        factors = torch.exp2(scales.float() - 127)
    packed = tensors["weight_packed" if method in ("nvfp4", "mxfp4") else "weight"]
    values = packed.float() if method == "mxfp8" else _unpacked(packed)
    return values * factors.repeat_interleave(values.shape[1] // scales.shape[1], 1)


def _spread(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    return (
        values * scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    )


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return torch.where(codes > 7, -1.0, 1.0) * magnitudes[(codes & 7).int()]


FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Modules that vLLM fuses, for which llm-compressor writes one tensor-wide scale."""


def quantised_checkpoint(method: str, weights: Batch, names: Collection[str]) -> TensorDict:
    """Return the tensors of a published checkpoint, in which the weights `names` are quantised."""
    tensors = {name: tensor for name, tensor in weights.items() if name not in names}
    for name in names:
        parent, _, module = name.removesuffix(".weight").rpartition(".")
        fused = next((modules for modules in FUSED if module in modules), {module})
        together = [
            weights[f"{parent}.{other}.weight"] if parent else weights[name] for other in fused
        ]
        largest = max(float(weight.abs().max()) for weight in together)
        for end, tensor in quantised(method, weights[name], largest).items():
            tensors[name.removesuffix("weight") + end] = tensor
    return tensors


def dequantised_checkpoint(method: str, tensors: Batch) -> TensorDict:
    """Return the weights, in float32, of a published checkpoint."""
    ends = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_global_scale",
        "weight_scale_2",
    )
    weights = {}
    for name in tensors:
        module, _, end = name.rpartition(".")
        of_module = {
            key: tensors[f"{module}.{key}"] for key in ends if f"{module}.{key}" in tensors
        }
        if len(of_module) == 1:
            weights[name] = tensors[name].float()
        elif end in ends:
            weights[f"{module}.weight"] = dequantised(method, of_module)
    return weights


def write_checkpoint(path: Path, tensors: Batch) -> None:
    """Write a checkpoint beside its config.json."""
    from safetensors.torch import save_file

    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        str(path / "model.safetensors"),
    )


def publish(path: Path, quantization_config: Mapping[str, Any]) -> None:
    """Add a quantization_config to a config.json."""
    config = read_config(path)
    config["quantization_config"] = quantization_config
    write_config(path, config)


@contextlib.contextmanager
def kernels_in_torch() -> Iterator[None]:
    """Let vLLM compute with such weights on a CPU.

    It dequantises them, and activations stay in bf16.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        dequantize_to_dtype,
    )
    from vllm.platforms import current_platform

    from hybrid_engine.backends.vllm import internals

    class Anywhere:
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...

    class BlockKernelInTorch(Anywhere, Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False
        process_weights_after_loading = Fp8BlockScaledMMLinearKernel.process_weights_after_loading
        can_implement = Fp8BlockScaledMMLinearKernel.can_implement

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return (A.float() @ _spread(B.float(), Bs).T).to(A.dtype)

    class Mxfp4KernelInTorch(Anywhere, MxFp4LinearKernel):
        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            weight = dequantised(
                "mxfp4", {"weight_packed": layer.weight, "weight_scale": layer.weight_scale}
            )
            return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    class Nvfp4KernelInTorch(Anywhere, NvFp4LinearKernel):
        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            weight = dequantize_to_dtype(
                layer.weight, layer.weight_scale, layer.weight_global_scale, x.dtype, swizzle=False
            )
            return torch.nn.functional.linear(x, weight, bias)

    kernels = {
        "fp8": BlockKernelInTorch,
        "mxfp8": EmulationMxfp8LinearKernel,
        "mxfp4": Mxfp4KernelInTorch,
        "nvfp4": Nvfp4KernelInTorch,
    }
    with contextlib.ExitStack() as undo:
        for method, kernel in kernels.items():
            of_platform = {current_platform._enum: [kernel]}
            undo.enter_context(mock.patch.dict(internals.BLOCK_KERNELS[method].load(), of_platform))
        # vLLM forces this one for weights alone.
        undo.enter_context(mock.patch.object(linear, "MarlinNvFp4LinearKernel", Nvfp4KernelInTorch))
        yield


@contextlib.contextmanager
def experts_in_torch() -> Iterator[None]:
    """Let vLLM compute with experts in blocks on a CPU, whose kernels need AMX or a GPU.

    It dequantises them.
    """
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import fp8, modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_mxfp4 as mxfp4,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as nvfp4,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_mxfp8 as mxfp8,
    )

    def apply_of(method: str) -> Any:
        def apply(
            self: Any,
            layer: torch.nn.Module,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: object,
            shared_experts_input: object,
        ) -> torch.Tensor:
            summed = torch.zeros_like(x, dtype=torch.float32)
            for expert in topk_ids.unique().tolist():
                rows, places = (topk_ids == expert).nonzero(as_tuple=True)
                gate, up = (x[rows].float() @ _expert(method, layer, "w13", expert).T).chunk(2, -1)
                result = (torch.nn.functional.silu(gate) * up) @ _expert(
                    method, layer, "w2", expert
                ).T
                summed.index_add_(0, rows, result * topk_weights[rows, places, None])
            return summed.to(x.dtype)

        return apply

    methods = {
        "fp8": fp8.Fp8MoEMethod,
        "mxfp8": mxfp8.CompressedTensorsW8A8Mxfp8MoEMethod,
        "mxfp4": mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod,
        "nvfp4": nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod,
        "modelopt": modelopt.ModelOptNvFp4FusedMoE,
    }
    backends = (
        ("select_fp8_moe_backend", fp8, Fp8MoeBackend.CPU),
        ("select_mxfp8_moe_backend", mxfp8, Fp8MoeBackend.EMULATION),
        ("select_nvfp4_moe_backend", nvfp4, NvFp4MoeBackend.EMULATION),
        ("select_nvfp4_moe_backend", modelopt, NvFp4MoeBackend.EMULATION),
    )
    with contextlib.ExitStack() as undo:
        for name, module, backend in backends:
            undo.enter_context(mock.patch.object(module, name, return_value=(backend, None)))
        for method, kind in methods.items():
            replaced = {
                "is_monolithic": False,
                "process_weights_after_loading": lambda self, layer: None,
                "get_fused_moe_quant_config": lambda self, layer: None,
                "apply": apply_of(method),
            }
            undo.enter_context(mock.patch.multiple(kind, **replaced))
        # It refuses them.
        undo.enter_context(mock.patch("hybrid_engine.backends.vllm.arguments.check_arguments"))
        yield


def _expert(method: str, layer: torch.nn.Module, name: str, number: int) -> torch.Tensor:
    """Return a matrix of one expert in float32."""
    tensors = {
        key.removeprefix(f"{name}_"): parameter[number]
        for key, parameter in layer.named_parameters(recurse=False)
        if key.startswith(f"{name}_weight")
    }
    for end in ("weight_global_scale", "weight_scale_2"):
        if end in tensors:
            tensors[end] = tensors[end].flatten()[:1]
    return dequantised(method, tensors)
