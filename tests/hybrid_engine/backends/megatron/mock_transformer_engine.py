"""Mock of Transformer Engine: parameters with the right names and shapes, no computation.

    install()                 before the first import of megatron, in a separate process
    with importable(): ...    after it; megatron-core then computes with its own layers

Transformer Engine can be installed and imported only with a GPU. megatron-core's wrappers
(`extensions/transformer_engine`) derive from its classes, which decide the names and sizes of the
parameters. The mock repeats that part of `transformer_engine.pytorch` 2.x:

    Linear            weight, bias; in_features and out_features, of this rank
    LayerNormLinear   also layer_norm_weight, layer_norm_bias
    GroupedLinear     weight0, weight1, ... and bias0, bias1, ...; after `group_weights` one
                      `GroupedTensor` for all weights (`single_grouped_weight` since 2.14)
    norms             weight, bias
    attention         softmax_offset, one for each head, if it is learnable

A column parallel layer splits its rows over `tp_size` ranks, a row parallel layer its columns.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


class _Layer(torch.nn.Module):
    """Base of the layers; has parameters only."""

    def _add(self, name: str, *shape: int, dtype: torch.dtype | None) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def set_tensor_parallel_group(self, group: Any) -> None:
        """Do nothing."""


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
        suffixes: Sequence[object] = ("",),
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        rows, columns = _local_shape(in_features, out_features, parallel_mode, tp_size)
        self.out_features, self.in_features = rows, columns
        for suffix in suffixes:
            self._add(f"weight{suffix}", rows, columns, dtype=params_dtype)
            if bias:
                self._add(f"bias{suffix}", rows, dtype=params_dtype)


class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, *, normalization: str, **settings: Any
    ) -> None:
        super().__init__(in_features, out_features, **settings)
        self._add("layer_norm_weight", in_features, dtype=settings["params_dtype"])
        if normalization == "LayerNorm":
            self._add("layer_norm_bias", in_features, dtype=settings["params_dtype"])


class GroupedLinear(Linear):
    def __init__(self, num_gemms: int, *sizes: int, **settings: Any) -> None:
        super().__init__(*sizes, suffixes=range(num_gemms), **settings)
        self.num_gemms = num_gemms

    def group_weights(self) -> None:
        """Replace all weights by one parameter."""
        names = [name for name, _ in self.named_parameters() if name.startswith("weight")]
        weights = [self.get_parameter(name).detach() for name in names]
        for name in names:
            delattr(self, name)
        self.weight = torch.nn.Parameter(GroupedTensor(torch.stack(weights)))


class GroupedTensor(torch.Tensor):
    """Tensor [experts, rows, columns] over the flat `rowwise_data`, without memory of its own."""

    rowwise_data: torch.Tensor

    @staticmethod
    def __new__(cls, stacked: torch.Tensor) -> GroupedTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, stacked.shape, strides=stacked.stride(), dtype=stacked.dtype, device=stacked.device
        )
        wrapper.rowwise_data = stacked.reshape(-1)
        return wrapper

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Any, args: Any = (), _kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].rowwise_data.view(args[0].shape))
        raise NotImplementedError(f"the mock does not implement {function}")


class RMSNorm(_Layer):
    """Accepts `normalized_shape` and the name used by older megatron-core, `hidden_size`."""

    def __init__(
        self,
        normalized_shape: int = 0,
        *,
        hidden_size: int = 0,
        params_dtype: torch.dtype,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.size = normalized_shape or hidden_size
        self._add("weight", self.size, dtype=params_dtype)


class LayerNorm(RMSNorm):
    def __init__(self, *sizes: int, params_dtype: torch.dtype, **settings: Any) -> None:
        super().__init__(*sizes, params_dtype=params_dtype, **settings)
        self._add("bias", self.size, dtype=params_dtype)


class DotProductAttention(_Layer):
    def __init__(
        self,
        num_attention_heads: int,
        *,
        tp_size: int,
        softmax_type: str = "vanilla",
        **_unused: Any,
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self._add("softmax_offset", num_attention_heads // tp_size, dtype=torch.float32)


class _HasAnything(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_HasAnything):
    """Placeholder for every class and function of Transformer Engine that is only imported."""


class _MockModule(ModuleType):
    """Module or package that has every attribute."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(MetaPathFinder, Loader):
    """Import hook for the mock and all its submodules."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "transformer_engine":
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MockModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformer_engine.pytorch":
            layers = (
                Linear,
                LayerNormLinear,
                GroupedLinear,
                RMSNorm,
                LayerNorm,
                DotProductAttention,
            )
            vars(module).update({layer.__name__: layer for layer in layers})
        if module.__name__ == "transformer_engine.pytorch.cpu_offload":
            module.get_cpu_offload_context = lambda *_args, **_kwargs: (nullcontext(), None)


def install() -> None:
    """Install the mock; RuntimeError if Transformer Engine or megatron was imported before."""
    present = [name for name in ("transformer_engine", "megatron.core") if name in sys.modules]
    if present:
        raise RuntimeError(
            f"the mock must be installed first, but {', '.join(present)} is imported"
        )
    _insert()


@contextmanager
def importable() -> Iterator[None]:
    """Make the mock importable in the block, for modules that are imported after megatron's."""
    finder = _insert()
    yield
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def _insert() -> _Finder:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    importlib.import_module("transformer_engine").__version__ = "2.6.0"
    for name in ("pytorch", "pytorch.distributed", "pytorch.ops", "common", "common.recipe"):
        importlib.import_module(f"transformer_engine.{name}")
    return finder


def _local_shape(
    in_features: int, out_features: int, parallel_mode: str | None, tp_size: int
) -> tuple[int, int]:
    """Rows and columns of one rank's part of a weight."""
    if parallel_mode == "column":
        return out_features // tp_size, in_features
    return out_features, in_features // tp_size if parallel_mode == "row" else in_features
