"""Made-up tensors with the names, attributes and layouts of Transformer Engine 2.x's quantised
parameters.

Transformer Engine needs a GPU. These follow its sources (`pytorch/tensor`): elements in uint8,
scales padded as its kernels need, dequantisation of whatever torch computes with them. Its kernels
are not here.

    with in_megatron():                   # megatron-core takes them for Transformer Engine's
        quantise_linear_layers(model, Float8BlockwiseQTensor)
        DistributedDataParallel(config, ddp_config, model)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

E4M3 = torch.float8_e4m3fn


class DType(Enum):
    """Transformer Engine's enumeration of dtypes."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class QuantizedTensor(torch.Tensor):
    """Tensor in bfloat16 for torch, with elements in 8 bits and scales."""

    elements_name: ClassVar[str] = "_rowwise_data"
    scales_name: ClassVar[str] = "_rowwise_scale_inv"
    copies_name: ClassVar[str] = "_columnwise_data"
    block: ClassVar[tuple[int, int]]
    quantizer: ClassVar[type]

    @staticmethod
    def __new__(cls, shape: Sequence[int]) -> QuantizedTensor:
        rows, columns = shape
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, (rows, columns), strides=(columns, 1), dtype=torch.bfloat16, device="cpu"
        )
        wrapper._quantizer = cls.quantizer()
        wrapper._fp8_dtype = DType.kFloat8E4M3
        return wrapper

    @classmethod
    def of(cls, values: torch.Tensor) -> QuantizedTensor:
        wrapper = cls(values.shape)
        setattr(wrapper, cls.elements_name, torch.zeros(values.shape, dtype=torch.uint8))
        setattr(wrapper, cls.scales_name, wrapper.new_scales())
        wrapper.quantize_(values)
        return wrapper

    def new_scales(self) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def scale_of(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored scales of blocks, and their values in float32."""
        scales = torch.where(largest > 0, largest / 448, 1.0)
        return scales, scales

    def scales(self) -> torch.Tensor:
        """Return the value of each element's scale, in float32."""
        rows, columns = self.shape
        stored = getattr(self, self.scales_name)
        values = (
            torch.exp2(stored.double() - 127).float() if stored.dtype is torch.uint8 else stored
        )
        of_rows = values.view(-1, values.shape[-1]).repeat_interleave(self.block[0], 0)[:rows]
        return of_rows.repeat_interleave(self.block[1], 1)[:, :columns]

    def elements(self) -> torch.Tensor:
        return getattr(self, self.elements_name).view(E4M3)

    def dequantize(self) -> torch.Tensor:
        return (self.elements().float() * self.scales()).to(torch.bfloat16)

    def quantize_(self, values: torch.Tensor) -> None:
        """Quantise in place, with the main parameters' values rounded to bfloat16 first."""
        values = values.detach().to(torch.bfloat16).float()
        height, width = self.block
        rows, columns = values.shape
        grid = (-(-rows // height), -(-columns // width))
        padded = torch.zeros(grid[0] * height, grid[1] * width)
        padded[:rows, :columns] = values.abs()
        largest = padded.view(grid[0], height, grid[1], width).amax((1, 3))
        stored = getattr(self, self.scales_name)
        of_blocks, _ = self.scale_of(largest)
        stored.view(-1, stored.shape[-1])[: grid[0], : grid[1]].copy_(of_blocks)
        getattr(self, self.elements_name).view(E4M3).copy_((values / self.scales()).to(E4M3))
        self._transpose_elements()

    def _transpose_elements(self) -> None:
        transposed = self.elements().view(torch.uint8).T.contiguous()
        copies = getattr(self, self.copies_name, None)
        if copies is None:
            setattr(self, self.copies_name, transposed)
        else:
            copies.copy_(transposed)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            twin = type(args[0])(args[0].shape)
            vars(twin).update(vars(args[0]))
            return twin
        plain = tree_map(
            lambda value: value.dequantize() if isinstance(value, QuantizedTensor) else value, args
        )
        if function is torch.ops.aten.copy_.default and isinstance(args[0], QuantizedTensor):
            args[0].quantize_(plain[1])
            return args[0]
        assert not function._schema.is_mutable or not isinstance(args[0], QuantizedTensor), function
        return function(*plain, **(kwargs or {}))


class Float8CurrentScalingQuantizer: ...


class Float8Quantizer: ...


class Float8BlockQuantizer: ...


class MXFP8Quantizer: ...


class Float8Tensor(QuantizedTensor):
    elements_name = "_data"
    scales_name = "_scale_inv"
    copies_name = "_transpose"
    block = (1 << 30, 1 << 30)
    quantizer = Float8CurrentScalingQuantizer

    def new_scales(self) -> torch.Tensor:
        return torch.ones(1)

    def scales(self) -> torch.Tensor:
        return self._scale_inv.expand(self.shape)

    def quantize_(self, values: torch.Tensor) -> None:
        values = values.detach().to(torch.bfloat16).float()
        self._scale_inv.copy_(self.scale_of(values.abs().max())[0])
        self._data.view(E4M3).copy_((values / self._scale_inv).to(E4M3))
        self._transpose_elements()
        self._transpose_invalid = False


class Float8BlockwiseQTensor(QuantizedTensor):
    block = (128, 128)
    quantizer = Float8BlockQuantizer
    _is_2D_scaled = True

    def new_scales(self) -> torch.Tensor:
        rows, columns = self.shape
        # Columns of blocks in fours.
        return torch.full((-(-rows // 128), -(-columns // 512) * 4), 7.0)


class MXFP8Tensor(QuantizedTensor):
    block = (1, 32)
    quantizer = MXFP8Quantizer
    _with_gemm_swizzled_scales = False

    def new_scales(self) -> torch.Tensor:
        rows, columns = self.shape
        shape = (-(-rows // 128) * 128, -(-columns // 128) * 4)
        return torch.full(shape, 200, dtype=torch.uint8)

    @staticmethod
    def scale_of(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Rounded up to a power of two, so that no element is above 448.
        exponents = torch.where(largest > 0, (largest / 448).log2().ceil(), -127)
        return (exponents + 127).to(torch.uint8), torch.exp2(exponents)


def quantise_linear_layers(
    model: torch.nn.Module, kind: type[QuantizedTensor], first_layer: int = 0
) -> None:
    """Replace the weights of linear layers from a decoder layer on, as under `fp8_model_init`."""
    for name, module in model.named_modules():
        is_linear = (
            name.rpartition(".")[2].startswith("linear_")
            and getattr(module, "weight", None) is not None
        )
        if is_linear and int(name.split(".layers.")[1].split(".")[0]) >= first_layer:
            old = module.weight
            module.weight = torch.nn.Parameter(kind.of(old))
            vars(module.weight).update(
                {key: value for key, value in vars(old).items() if key != "main_grad"}
            )


@contextlib.contextmanager
def in_megatron() -> Iterator[None]:
    """Have megatron-core take these for Transformer Engine's, for the block."""
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    def move(tensor: QuantizedTensor, memory: torch.Tensor) -> None:
        if isinstance(tensor, MXFP8Tensor):
            raise NotImplementedError("replace_raw_data for MXFP8Tensor is not supported yet")
        memory.copy_(getattr(tensor, tensor.elements_name))
        setattr(tensor, tensor.elements_name, memory)

    def cast(
        weights: Sequence[QuantizedTensor],
        main_params: Sequence[torch.Tensor | None],
        starts: Sequence[int | None],
        group: dist.ProcessGroup,
        _shards: object = None,
    ) -> None:
        for weight, main, start in zip(weights, main_params, starts, strict=True):
            whole = torch.zeros(weight.numel())
            if main is not None and start is not None:
                whole[start : start + main.numel()] = main.detach()
            # Each rank quantises its shard by maxima of all; the sum of disjoint shards has the
            # same result.
            dist.all_reduce(whole, group=group)
            weight.quantize_(whole.view(weight.shape))

    replaced = {
        **{
            "HAVE_TE_FP8_TENSOR_CLASS": True,
            "FP8_TENSOR_CLASS": QuantizedTensor,
            "MXFP8Tensor": MXFP8Tensor,
        },
        **{
            "HAVE_TE_MXFP8TENSOR": True,
            "_modify_underlying_storage_impl": move,
            "_quantize_param_shard_impl": cast,
        },
        "is_te_min_version": lambda *_: True,
    }

    def separately(
        _group: object, async_ops: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        # gloo mixes up dtypes of collectives that are sent as one, and these buckets have several.
        assert not async_ops
        return contextlib.nullcontext()

    with (
        mock.patch.multiple(fp8_utils, create=True, **replaced),
        mock.patch.object(param_and_grad_buffer, "_coalescing_manager", separately),
    ):
        yield
