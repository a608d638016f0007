"""What a switch needs of a live Megatron model, whoever built it and whoever trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer

from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.training_state import MegatronInventory
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offloader import KINDS, OffloadItem, Reached
from hybrid_engine.models.table import ModelTable
from megatron_patches.applying import hooks_applied
from megatron_patches.optimizers import weight_version


class LiveModel:
    """One rank's share of a model: its weights, and what of it can leave the device. Leaves the model as it is.

    Args:
        chunks: model chunks in virtual-pipeline order, wrapped in DDP if they are trained.
        optimizer: None for a model that is only read.
        table: the model's name table.
        noop_layers: positions of layers that do nothing.
        adapters_apart: deliver adapters beside the weights instead of added to them.

    Attributes:
        guard: called with the kinds of state that a call is about to use; raises StateError where they may be off the
            device. Set by who moves them (`HybridEngine`); by itself a model stays where it is.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        table: ModelTable,
        noop_layers: Sequence[int] = (),
        adapters_apart: bool = False,
    ) -> None:
        if optimizer is not None and not hooks_applied():
            raise StateError("call megatron_patches.apply() first: without its hooks nobody counts optimizer steps")
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.weights = MegatronAdaptor(self.chunks, table, noop_layers, adapters_apart)
        self._inventory = MegatronInventory(self.weights, optimizer)
        self.guard: Callable[[Iterable[str]], None] = lambda kinds: None

    @property
    def unserved(self) -> list[str]:
        """Canonical tensors that the model trains and vLLM's does not read (multi-token prediction)."""
        return [name for name in self.weights.table.shapes if not self.weights.table.is_served(name)]

    @property
    def version(self) -> int:
        """Number of optimizer steps the weights have taken."""
        return 0 if self.optimizer is None else weight_version(self.optimizer)

    def offload_items(self) -> list[OffloadItem]:
        """Everything of this model that can leave the device: parameters, gradients, optimizer state, caches."""
        return self._inventory.items()

    def reachable_tensors(self) -> Iterator[Reached]:
        """Every tensor that model and optimizer refer to, for `Offloader.residual`."""
        return self._inventory.reachable()

    def take_up_weights(self) -> None:
        """Make the optimizer's main parameters those of the model, after somebody wrote the model's."""
        self.guard(KINDS)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
