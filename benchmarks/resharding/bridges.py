"""Bridges as contenders: whole Hugging Face tensors, one at a time, into vLLM's `load_weights`.

mbridge 0.15.1 runs `export_weights`, as in verl, with its own constructor, collectives, joins and
conversions, and vLLM's loader. Two substitutes make it run on a CPU:

- CUDA redirect: mbridge takes the device of received tensors from `torch.cuda`. Its modules get the
  CPU there, like those of megatron-core by `megatron_patches`; torch itself is unchanged.
- Names: mbridge supports the layers of Transformer Engine. On a CPU the same parameters are in
  megatron-core's local layers under other names, which are mapped to those of Transformer Engine.

Megatron-Bridge runs `export_hf_weights`, as in verl 0.9, with its bridge for the model's config,
its collectives, joins and conversions, conversion tasks that are kept between exports as in verl,
and vLLM's loader. It is optional (`--bridge`), because it needs a newer megatron-core than the
locked environment has. Bridge imports Transformer Engine even if a model does not use it. If that
is not installed, empty classes replace it during the import.

verl fills a bucket with exported tensors and hands it to a server process. Here each tensor goes
straight into `load_weights`, which is faster.
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
    """Loads the tensors that a bridge exports into vLLM, one at a time, by `load_weights`."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        self._chunks = worker.train.chunks

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield checkpoint names and whole tensors, one at a time. Collective."""

    def run(self, clock: Clock) -> None:
        self._target.allocate(clock)
        started = time.perf_counter()
        with torch.no_grad():
            self._target.load(timed(iter(self._weights()), clock, "export"))
        clock.add("load", time.perf_counter() - started - clock.seconds["export"])
        self._target.commit(clock)


class MbridgeExport(Export):
    """Writes training weights to vLLM's parameters by mbridge 0.15.1."""

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
    """Return mbridge's class for a model, with names of local layers mapped."""
    import mbridge  # noqa: F401  (registers its models)
    from mbridge.core.bridge import _MODEL_REGISTRY

    base = _MODEL_REGISTRY[config.model_type]
    has_experts = bool(getattr(config, "num_experts", 0))

    class LocalLayersBridge(base):
        def _weight_name_mapping_mcore_local_to_global(
            self, model: torch.nn.Module, consider_ep: bool = True
        ) -> Any:
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
            assert not consider_ep, "export_weights numbers experts itself"
            return {
                local: transformer_engine_name(name, has_experts) for local, name in names.items()
            }

    # a copy, because mbridge changes the mapping of its class for tied embeddings
    LocalLayersBridge._DIRECT_MAPPING = dict(base._DIRECT_MAPPING)
    return LocalLayersBridge


def transformer_engine_name(name: str, has_experts: bool) -> str:
    """Map a parameter name of megatron-core's local layers to that of Transformer Engine."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not has_experts:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return _EXPERT.sub(r".experts.\2.weight\1", name)


def _redirect_cuda() -> None:
    """Without a GPU, let `torch.cuda` in mbridge's modules return the CPU."""
    if torch.cuda.is_available():
        return
    from mbridge.core import bridge, util

    for module in (bridge, util):
        module.torch = torch_on_cpu(torch)


class MegatronBridgeExport(Export):
    """Writes training weights to vLLM's parameters by Megatron-Bridge."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        self._bridge = _auto_bridge().from_hf_config(
            AutoConfig.from_pretrained(worker.config.model)
        )
        # the public `get_conversion_tasks` requires a checkpoint, which an export does not need
        self._tasks = self._bridge._model_bridge.build_conversion_tasks(
            self._bridge.hf_pretrained, self._chunks
        )

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights = self._bridge.export_hf_weights(
            self._chunks, show_progress=False, conversion_tasks=self._tasks
        )
        return ((name, tensor) for name, tensor in weights)


def _auto_bridge() -> Any:
    """Import `AutoBridge`. Raises DependencyError with an install hint."""
    try:
        with _importable_transformer_engine():
            from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    except ImportError as error:
        raise DependencyError(f"Megatron-Bridge cannot be imported ({error}): {_HINT}") from error
    return AutoBridge


@contextlib.contextmanager
def _importable_transformer_engine() -> Iterator[None]:
    """Make Transformer Engine importable: the installed one, else modules of empty classes."""
    # imported first, because it must not see the empty classes
    import megatron.core.extensions.transformer_engine  # noqa: F401

    if importlib.util.find_spec(_TRANSFORMER_ENGINE) is not None:
        yield
        return
    finder = _EmptyModules()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        # later imports must not find the empty classes
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
    __path__: list[str] = []  # noqa: RUF012  (marks a package for the import system)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (torch.nn.Module,), {})


class _EmptyModules(MetaPathFinder, Loader):
    """Finds and creates the modules of empty classes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_wanted = fullname.partition(".")[0] == _TRANSFORMER_ENGINE
        return ModuleSpec(fullname, self, is_package=True) if is_wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
