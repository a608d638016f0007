"""Megatron-Bridge: `export_hf_weights`, tensor by tensor, into vLLM's `load_weights`, as verl 0.9 runs it.

Optional (`--bridge`), for it needs a newer megatron-core than the locked environment has. Real: the bridge for the
model's config, its conversion tasks, kept between exports as verl keeps them, its collectives, joins and conversions;
vLLM's loader. One thing stands in for what a CPU does not have: Bridge imports Transformer Engine, whether a model uses
it or not. Where that is not installed, empty classes are in its place during the import, and gone afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.resharding.loading import Export
from hybrid_engine.errors import DependencyError
from hybrid_engine.trainer.worker import ActorHybridWorker

_TRANSFORMER_ENGINE = "transformer_engine"
_HINT = "pip install 'megatron-bridge>=0.6' 'megatron-core>=0.19' (for Python 3.12)"


class MegatronBridgeExport(Export):
    """Training weights to vLLM's parameters by Megatron-Bridge."""

    def __init__(self, worker: ActorHybridWorker) -> None:
        super().__init__(worker)
        self._bridge = _auto_bridge().from_hf_config(AutoConfig.from_pretrained(worker.config.model))
        # its own way to them, `get_conversion_tasks`, wants a checkpoint, which is not needed for an export
        self._tasks = self._bridge._model_bridge.build_conversion_tasks(self._bridge.hf_pretrained, self._chunks)

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights = self._bridge.export_hf_weights(self._chunks, show_progress=False, conversion_tasks=self._tasks)
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
