"""A mock of Transformer Engine: parameters of the right names and shapes, and nothing that computes.

    install()      before the first import of megatron, in a process of its own

Transformer Engine needs a GPU to be installed and imported. megatron-core's wrappers (`extensions/transformer_engine`)
derive from its classes and leave to them what the parameters are called and how large they are. The mock repeats that
much of `transformer_engine.pytorch` 2.x: `Linear` has weight and bias; `LayerNormLinear` has layer_norm_weight and
layer_norm_bias beside them; `GroupedLinear` has weight0, weight1, ... and bias0, bias1, ... or, after `group_weights`,
one `GroupedTensor` for all weights, as it has from 2.14 on with `single_grouped_weight`; norms have weight and bias. A
column parallel layer has its rows over `tp_size` ranks, a row parallel one its columns.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


class _Layer(torch.nn.Module):
    """Parameters only."""

    def _add(self, name: str, *shape: int, dtype: torch.dtype | None) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def set_tensor_parallel_group(self, group: Any) -> None:
        """Taken and not used."""


class Linear(_Layer):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp_size: int,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        **_unused: Any,
    ) -> None:
        super().__init__()
        rows, columns = _local_shape(in_features, out_features, parallel_mode, tp_size)
        self._add("weight", rows, columns, dtype=params_dtype)
        if bias:
            self._add("bias", rows, dtype=params_dtype)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, normalization: str, **settings: Any) -> None:
        super().__init__(in_features, out_features, **settings)
        self._add("layer_norm_weight", in_features, dtype=settings["params_dtype"])
        if normalization == "LayerNorm":
            self._add("layer_norm_bias", in_features, dtype=settings["params_dtype"])


class GroupedLinear(_Layer):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp_size: int,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        **_unused: Any,
    ) -> None:
        super().__init__()
        rows, columns = _local_shape(in_features, out_features, parallel_mode, tp_size)
        for gemm in range(num_gemms):
            self._add(f"weight{gemm}", rows, columns, dtype=params_dtype)
            if bias:
                self._add(f"bias{gemm}", rows, dtype=params_dtype)

    def group_weights(self) -> None:
        """Put one parameter in place of all weights."""
        names = [name for name, _ in self.named_parameters() if name.startswith("weight")]
        weights = [self.get_parameter(name).detach() for name in names]
        for name in names:
            delattr(self, name)
        self.weight = torch.nn.Parameter(GroupedTensor(torch.stack(weights)))


class GroupedTensor(torch.Tensor):
    """Wraps the flat tensor `rowwise_data` without memory of its own; [experts, rows, columns]."""

    rowwise_data: torch.Tensor

    @staticmethod
    def __new__(cls, stacked: torch.Tensor) -> GroupedTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, stacked.shape, strides=stacked.stride(), dtype=stacked.dtype, device=stacked.device
        )
        wrapper.rowwise_data = stacked.reshape(-1)
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].rowwise_data.view(args[0].shape))
        raise NotImplementedError(f"{function} of a mock")


class RMSNorm(_Layer):
    """Takes its size by Transformer Engine's present name or, as megatron-core used to give it, by its former one."""

    def __init__(
        self, normalized_shape: int = 0, *, hidden_size: int = 0, params_dtype: torch.dtype, **_unused: Any
    ) -> None:
        super().__init__()
        self.size = normalized_shape or hidden_size
        self._add("weight", self.size, dtype=params_dtype)


class LayerNorm(RMSNorm):
    def __init__(self, *sizes: int, params_dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(*sizes, params_dtype=params_dtype, **settings)
        self._add("bias", self.size, dtype=params_dtype)


class DotProductAttention(_Layer):
    def __init__(self, **_unused: Any) -> None:
        super().__init__()


class _HasAnything(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_HasAnything):
    """Stands for every class and function of Transformer Engine that is imported and not used."""


class _MockModule(ModuleType):
    """A module or package that has whatever is asked of it."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(MetaPathFinder, Loader):
    """Finds the mock and all its submodules."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "transformer_engine" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MockModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformer_engine.pytorch":
            layers = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)
            vars(module).update({layer.__name__: layer for layer in layers})
        if module.__name__ == "transformer_engine.pytorch.cpu_offload":
            module.get_cpu_offload_context = lambda *_args, **_kwargs: (nullcontext(), None)


def install() -> None:
    """Put the mock in place of Transformer Engine. Raises RuntimeError when the real one, or megatron, is there."""
    if present := [name for name in ("transformer_engine", "megatron.core") if name in sys.modules]:
        raise RuntimeError(f"{', '.join(present)} imported already")
    sys.meta_path.insert(0, _Finder())
    importlib.import_module("transformer_engine").__version__ = "2.6.0"
    for name in ("pytorch", "pytorch.distributed", "pytorch.ops", "common", "common.recipe"):
        importlib.import_module(f"transformer_engine.{name}")


def _local_shape(in_features: int, out_features: int, parallel_mode: str | None, tp_size: int) -> tuple[int, int]:
    """Rows and columns of one rank's weight."""
    if parallel_mode == "column":
        return out_features // tp_size, in_features
    return out_features, in_features // tp_size if parallel_mode == "row" else in_features
