"""A live Megatron model as the switch sees it (port `Trainer`), whoever built it and whoever trains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.access_guards import GuardedState
from hybrid_engine.backends.flat_buffers import is_frozen
from hybrid_engine.backends.megatron import forward_probe
from hybrid_engine.backends.megatron.adaptor import MegatronAdaptor
from hybrid_engine.backends.megatron.elastic_weights import (
    keep_expert_bias_in_float32,
    move_loose_parameters,
    move_published_buffers,
)
from hybrid_engine.backends.megatron.model_tensors import ModelTensors
from hybrid_engine.backends.megatron.training_state import TrainingState
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.memory.offload_items import KINDS, OffloadItem, Reached
from hybrid_engine.models.table import ModelTable
from hybrid_engine.probes import ProbeAnswer, ProbeLimits
from megatron_patches.applying import require_supported_version
from megatron_patches.optimizers import optimizer_members, set_weight_version, weight_version
from megatron_patches.review import live_refusals


class LiveModel(GuardedState):
    """One rank's share of a model: its weights, and what of it can leave the device. Leaves the model as it is.

    Args:
        chunks: model chunks in virtual-pipeline order, wrapped in DDP if they are trained.
        optimizer: None for a model that is only read.
        table: the model's name table.
        noop_layers: positions of layers that pass their input on.
        separate_lora: reshard LoRA beside the weights instead of added to them.

    Attributes:
        weights: what is resharded.

    Raises:
        ConfigError: for every field of Megatron's configuration that does not go with a switch.
        UnsupportedVersionError: for a megatron-core that was not tested.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        table: ModelTable,
        noop_layers: Sequence[int] = (),
        separate_lora: bool = False,
    ) -> None:
        require_supported_version()
        found = live_refusals(chunks, optimizer)
        if found:
            raise ConfigError([Violation(f"{one.section}.{one.field}", one.problem, one.remedy) for one in found])
        super().__init__()
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.weights = MegatronAdaptor(
            ModelTensors(self.chunks, table, noop_layers), "separate" if separate_lora else "merged"
        )
        self._state = TrainingState(self.weights, optimizer)
        members = [] if optimizer is None else optimizer_members(optimizer)
        self._watch(self.chunks, [member.optimizer for _, member in members])

    @property
    def unserved(self) -> list[str]:
        """Canonical tensors that are trained and that vLLM does not read (multi-token prediction)."""
        table = self.weights.model.table
        return [name for name in table.shapes if not table.is_served(name)]

    @property
    def version(self) -> int:
        """Number of optimizer steps the weights have taken."""
        return 0 if self.optimizer is None else weight_version(self.optimizer)

    @property
    def frozen(self) -> list[str]:
        """Canonical tensors of this rank that are made of parameters which require no gradient now."""
        return [name for name, origins in self.weights.origins().items() if all(map(is_frozen, origins))]

    def offload_items(self) -> list[OffloadItem]:
        """Everything of this model that can leave the device: parameters, gradients, optimizer state, caches."""
        return self._state.items()

    def reachable_tensors(self) -> Iterator[Reached]:
        """Every tensor that model and optimizer refer to, for `Offloader.residual`."""
        return self._state.reachable()

    cannot_compute = ""
    """Why the model is not asked to compute; empty where it is."""

    def probe_limits(self) -> ProbeLimits:
        """See `probes.Probed`."""
        if self.cannot_compute:
            return ProbeLimits(self.cannot_compute)
        return forward_probe.probe_limits(self.chunks, self.weights.model.table)

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """See `probes.Probed`; pending gathers finish first, and the model is in evaluation mode."""
        self.guard(["param"])
        self.weights.base.prepare()
        return forward_probe.probe(self.chunks, self.weights.model.table.dims.vocab_size, tokens)

    def computed_settings(self) -> Mapping[str, Any]:
        """See `probes.Probed`."""
        return forward_probe.own_settings(unwrap_model(self.chunks[0]).config, self.weights.model.table)

    def reload_main_params(self) -> None:
        """Copy the model's parameters into the optimizer's main parameters, after the model's were written."""
        self.guard(KINDS)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()


def live_model(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    table: ModelTable,
    *,
    num_steps: int = 0,
    noop_layers: Sequence[int] = (),
) -> LiveModel:
    """A `LiveModel` of what somebody else has built. Its weights outside of DDP's buffers move, with their values.

    `num_steps`: optimizer steps that the weights have taken. Other arguments and errors as of `LiveModel`.
    """
    move_loose_parameters([chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)])
    keep_expert_bias_in_float32(chunks)
    move_published_buffers(chunks, table)
    if optimizer is not None:
        set_weight_version(optimizer, num_steps)
    return LiveModel(chunks, optimizer, table, noop_layers)
