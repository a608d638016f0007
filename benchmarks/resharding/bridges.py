"""Bridges as contenders: whole tensors under Hugging Face names, one at a time, into vLLM's `load_weights`.

mbridge 0.15.1: `export_weights`, as verl runs it. Real: mbridge's bridge with its own constructor, its collectives,
joins and conversions; vLLM's loader. Two things stand in for what a CPU does not have:

- The CUDA redirect: mbridge asks `torch.cuda` for the device of what it receives. Its modules see the CPU there, as
  megatron-core's do by `megatron_patches`; torch itself stays as it is.
- The names: mbridge knows Transformer Engine's layers. On a CPU the same parameters are in megatron-core's own layers
  under other names, and are called by Transformer Engine's from the start.

Megatron-Bridge: `export_hf_weights`, as verl 0.9 runs it. Optional (`--bridge`), for it needs a newer megatron-core
than the locked environment has. Real: the bridge for the model's config, its conversion tasks, kept between exports as
verl keeps them, its collectives, joins and conversions; vLLM's loader. One thing stands in for what a CPU does not
have: Bridge imports Transformer Engine, whether a model uses it or not. Where that is not installed, empty classes are
in its place during the import, and gone afterwards.

verl fills a bucket with exported tensors and hands it to a server process. Here each tensor goes straight into
`load_weights`, which is faster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.resharding.loading import IntoLoader, timed
from benchmarks.resharding.measuring import Clock
from hybrid_engine.errors import DependencyError
from hybrid_engine.trainer.worker import ActorHybridWorker
from megatron_patches.cpu.cuda_names import torch_on_cpu

_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_TRANSFORMER_ENGINE = "transformer_engine"
_HINT = "pip install 'megatron-bridge>=0.6' 'megatron-core>=0.19' (for Python 3.12)"


class Export(IntoLoader, ABC):
    """Training weights to vLLM's parameters, tensor by tensor through `load_weights`, as a bridge exports them."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        self._chunks = worker.train.chunks

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names in the checkpoint, and whole tensors; makes one at a time. Collective."""

    def run(self, clock: Clock) -> None:
        self._target.allocate(clock)
        started = time.perf_counter()
        with torch.no_grad():
            self._target.load(timed(iter(self._weights()), clock, "export"))
        clock.add("load", time.perf_counter() - started - clock.seconds["export"])
        self._target.commit(clock)


class MbridgeExport(Export):
    """Training weights to vLLM's parameters by mbridge 0.15.1."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        _redirect_cuda()
        config = AutoConfig.from_pretrained(worker.config.model)
        self._bridge = _bridge_class(config)(
            config, dtype=getattr(torch, worker.config.actor_config.params_dtype)
        )

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._bridge.export_weights(self._chunks)


def _bridge_class(config: Any) -> type:
    """mbridge's class for a model, reading the local layers' names as Transformer Engine's."""
    import mbridge  # noqa: F401  (registers its models)
    from mbridge.core.bridge import _MODEL_REGISTRY

    base = _MODEL_REGISTRY[config.model_type]
    has_experts = bool(getattr(config, "num_experts", 0))

    class OfLocalLayers(base):
        def _weight_name_mapping_mcore_local_to_global(
            self, model: torch.nn.Module, consider_ep: bool = True
        ) -> Any:
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
            assert not consider_ep, "export_weights numbers experts itself"
            return {
                local: transformer_engine_name(name, has_experts) for local, name in names.items()
            }

    OfLocalLayers._DIRECT_MAPPING = dict(
        base._DIRECT_MAPPING
    )  # mbridge changes its class for tied embeddings
    return OfLocalLayers


def transformer_engine_name(name: str, has_experts: bool) -> str:
    """Return the name in Transformer Engine's layers of a parameter of megatron-core's local layers."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not has_experts:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return _EXPERT.sub(r".experts.\2.weight\1", name)


def _redirect_cuda() -> None:
    """Without a GPU, mbridge's modules see a `torch.cuda` that names the CPU; nobody else does."""
    if torch.cuda.is_available():
        return
    from mbridge.core import bridge, util

    for module in (bridge, util):
        module.torch = torch_on_cpu(torch)


class MegatronBridgeExport(Export):
    """Training weights to vLLM's parameters by Megatron-Bridge."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        self._bridge = _auto_bridge().from_hf_config(
            AutoConfig.from_pretrained(worker.config.model)
        )
        # its own way to them, `get_conversion_tasks`, wants a checkpoint, which is not needed for an export
        self._tasks = self._bridge._model_bridge.build_conversion_tasks(
            self._bridge.hf_pretrained, self._chunks
        )

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights = self._bridge.export_hf_weights(
            self._chunks, show_progress=False, conversion_tasks=self._tasks
        )
        return ((name, tensor) for name, tensor in weights)


def _auto_bridge() -> Any:
    """Bridge's `AutoBridge`. Raises DependencyError with what to install."""
    try:
        with _importable_transformer_engine():
            from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    except ImportError as error:
        raise DependencyError(f"Megatron-Bridge cannot be imported ({error}): {_HINT}") from error
    return AutoBridge


@contextlib.contextmanager
def _importable_transformer_engine() -> Iterator[None]:
    """Within this context Transformer Engine can be imported: what is installed, else one of empty classes."""
    import megatron.core.extensions.transformer_engine  # noqa: F401  (finds out by itself that there is none)

    if importlib.util.find_spec(_TRANSFORMER_ENGINE) is not None:
        yield
        return
    finder = _EmptyModules()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == _TRANSFORMER_ENGINE]:
            del sys.modules[name]


class _Empty(type):
    """A class whose attributes are empty classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Empty(name, (torch.nn.Module,), {})


class _EmptyModule(ModuleType):
    """A module of empty classes."""

    __version__ = "0"
    __path__: list[str] = []  # noqa: RUF012  (a package's, as the import system wants it)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (torch.nn.Module,), {})


class _EmptyModules(MetaPathFinder, Loader):
    """Finds and makes them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_wanted = fullname.partition(".")[0] == _TRANSFORMER_ENGINE
        return ModuleSpec(fullname, self, is_package=True) if is_wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
