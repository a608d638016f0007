"""How filled weights of a group become those that vLLM computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.groups import CommitGroup
from hybrid_engine.backends.vllm.weights.traced_layout import STAGED
from hybrid_engine.backends.vllm.weights.traced_model import ProcessedModel
from hybrid_engine.backends.vllm.weights.tracing import LoadWeights

Observer = Callable[[str, torch.Tensor], None]
"""Called with a parameter's full name and its loader-layout tensor, filled, before vLLM processes it."""


class GroupCommit(Protocol):
    """What is done with one group; chosen when the adaptor is built, by a look at the group."""

    def commit(self, tensors: dict[str, torch.Tensor], observe: Observer) -> None:
        """Make filled tensors the live ones, by buffer name; remove each from `tensors` once it is not needed."""
        ...

    def drop(self) -> None:
        """Forget what the group holds beside live weights, so that its memory is free."""
        ...


class Reprocessing:
    """Tensors bound as at load, then vLLM's own post-load processing of the modules that repack; live ones have none.

    Memory: loader layout and what is made of it, module by module.
    """

    def __init__(self, group: CommitGroup, model: ProcessedModel) -> None:
        self._group, self._model = group, model
        self._storages = {name: model.traced.storages[name] for name in group.storages}

    def commit(self, tensors: dict[str, torch.Tensor], observe: Observer) -> None:
        """As the protocol says."""
        self.bind(tensors)
        if self._group.staged:
            staged = [(name, tensors.pop(STAGED + name)) for name in self._group.staged]
            cast(LoadWeights, self._model.traced.model.load_weights)(iter(staged))
            del staged
        for name in self._group.storages:
            observe(name, tensors.pop(name))
        for name in self._group.repacked:
            postload.process(self._model.modules[name])
        for name in self._group.attention:
            process = cast(Callable[[torch.dtype], None], self._model.modules[name].process_weights_after_loading)
            process(self._model.act_dtype)

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Let the modules hold these tensors, as at load."""
        for name, storage in self._storages.items():
            for binding in storage.bindings:
                binding.put(self._model.modules, tensors[name])

    def drop(self) -> None:
        """As the protocol says: what vLLM derived from a repacked module's weights, and those weights."""
        for name in self._group.repacked:
            module = self._model.modules[name]
            for attribute in self._model.derived[name]:
                for table in (module.__dict__, module._parameters, module._buffers):
                    table.pop(attribute, None)
            postload.forget_kernel(postload.post_load_method(module))
        for storage in self._storages.values():
            if storage.name not in self._model.live:
                placeholder = storage.placeholder()
                for binding in storage.bindings:
                    binding.put(self._model.modules, placeholder)
