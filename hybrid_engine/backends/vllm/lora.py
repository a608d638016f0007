"""LoRA without merging: delivered from memory by name, and as an additional group of a switch.

vLLM's requests name a directory, which its worker reads in one place (`internals.LOAD_LORA`); that
place is patched to take the tensors kept here. Everything else is vLLM's: merging of fused
projections, slices per rank, slots, batches of several LoRAs. A LoRA that was evicted, or dropped
with the weights, returns with the next request for it.

`InferenceEngine.set_lora` delivers a LoRA at any time. With `lora_delivery: adapter` the worker
passes `WeightsWithLora` to the switch: the LoRA arrives as a group, and the group's commit delivers
it.

Memory: a copy on the host while the LoRA is known; vLLM's slots on the device, until a release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import reset_prefix_cache
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.errors import (
    StateError,
    Violation,
    Violations,
    require_none,
)
from hybrid_engine.memory.pool import Memories
from hybrid_engine.models.lora_tensors import ActorLora, LoraSettings, module_of
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Shard
from hybrid_engine.records.regions import LocalBox

GROUP = "lora"
"""Commit group of all tensors of the actor's LoRA."""

_REMEDY = "Give lora_A [rank, in] and lora_B [out, rank] under their PEFT names"


@dataclass(frozen=True)
class _ServedLora:
    number: int
    settings: LoraSettings
    tensors: Tensors


class DeliveredLoras:
    """LoRAs in host memory, from which vLLM's worker loads them by name."""

    def __init__(self, llm: Any, undo: ExitStack) -> None:
        """Make the worker of `llm`, an LLM with LoRA enabled, load LoRAs from here.

        Closing `undo` reverts this.
        """
        self._llm = llm
        self._manager = internals.model_runner_of(llm).lora_manager
        self._by_name: dict[str, _ServedLora] = {}
        self._next_number = 1
        undo.enter_context(internals.LOAD_LORA.replaced(lambda _: self._load, owner=self._manager))

    def deliver(self, name: str, settings: LoraSettings, tensors: Tensors) -> None:
        """Add a LoRA or replace it by a new version; the tensors are copied to host memory.

        Raises ConfigError with every tensor or setting that does not fit, and StateError while vLLM
        has unfinished requests. The former version stays in both cases.
        """
        require_none(self._violations(settings, tensors))
        # vLLM distinguishes cached prefixes of LoRAs by name only, not by version.
        reset_prefix_cache(self._llm)
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        before = self._by_name.get(name)
        if before is None:
            number = self._next_number
            self._next_number += 1
        else:
            number = before.number
        # vLLM identifies a LoRA by its number. Without an adapter of that number in its slots, the
        # next request loads the new version.
        self._by_name[name] = _ServedLora(number, settings, copies)
        self._manager.remove_adapter(number)

    def forget(self, name: str) -> None:
        """Remove a LoRA. Raises StateError for an unknown name or unfinished requests."""
        number = self._get(name).number
        reset_prefix_cache(self._llm)
        self._manager.remove_adapter(number)
        del self._by_name[name]

    def request(self, name: str) -> Any:
        """Return vLLM's `LoRARequest` for a LoRA. Raises StateError for an unknown name."""
        # The last argument replaces a directory, which is never read.
        return internals.LORA_REQUEST(name, self._get(name).number, "in memory")

    def drop_from_device(self) -> None:
        """Drop the device's copies; the next request for a LoRA loads it again."""
        self._manager.remove_all_adapters()

    def _get(self, name: str) -> _ServedLora:
        if name not in self._by_name:
            known = ", ".join(self._by_name) or "none"
            raise StateError(
                f"no LoRA {name!r}; known LoRAs: {known}. Deliver it with set_lora",
                code="unknown-lora",
            )
        return self._by_name[name]

    def _load(self, request: Any) -> Any:
        """Return the LoRA as vLLM's `LoRAModel`; vLLM's worker calls this."""
        lora = self._get(request.lora_name)
        manager = self._manager
        peft = internals.PEFT_HELPER(lora.settings.in_peft())
        peft.validate_legal(manager.lora_config)
        mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        return internals.LORA_MODEL(
            lora.number,
            # vLLM scales lora_B in place.
            {name: tensor.clone() for name, tensor in lora.tensors.items()},
            peft,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )

    def _violations(self, settings: LoraSettings, tensors: Tensors) -> Violations:
        limit = self._manager.lora_config.max_lora_rank
        if settings.largest_rank > limit:
            yield Violation(
                "LoRA rank",
                f"{settings.largest_rank} is more than max_lora_rank {limit}",
                "Raise max_lora_rank",
                code="lora-rank-too-large",
            )
        if not tensors:
            yield Violation(
                "LoRA", "it has no tensors", "Give its lora_A and lora_B weights", code="empty-lora"
            )
        for name, tensor in tensors.items():
            problem = self._problem_of(name, tensor, settings, tensors)
            if problem:
                yield Violation(name, problem, _REMEDY, code="invalid-lora-tensor")

    def _problem_of(
        self,
        name: str,
        tensor: torch.Tensor,
        settings: LoraSettings,
        tensors: Tensors,
    ) -> str:
        """Return the reason why a tensor does not fit; "" if it does."""
        kinds = [kind for kind in ("lora_A", "lora_B") if name.endswith(f".{kind}.weight")]
        if not kinds or not name.startswith("base_model.model."):
            return "not a base_model.model.….lora_A.weight or lora_B.weight"
        (kind,) = kinds
        path = module_of(name)
        module = path.rpartition(".")[2]
        rank = settings.ranks.get(path, settings.rank)
        if module not in settings.target_modules:
            return f"{module} is not in target_modules {', '.join(settings.target_modules)}"
        # PEFT's names of the projections that support LoRA: the parts of fused ones.
        adapters = self._manager._adapter_manager
        supported: set[str] = set()
        for name_in_vllm in adapters.supported_lora_modules:
            supported.update(adapters.packed_modules_mapping.get(name_in_vllm, [name_in_vllm]))
        supported &= set(self._manager.lora_config.target_modules)
        if module not in supported:
            return (
                f"vLLM was built for LoRA on {', '.join(sorted(supported))} (lora_target_modules)"
            )
        size = tensor.shape[0 if kind == "lora_A" else -1]
        if tensor.dim() != 2 or size != rank:
            return f"shape {tuple(tensor.shape)} is not of rank {rank}"
        other = name.replace(f".{kind}.", ".lora_B." if kind == "lora_A" else ".lora_A.")
        return "" if other in tensors else f"{other} is missing"


class WeightsWithLora:
    """vLLM's weights and the actor's LoRA together (port `InferenceWeights`).

    Every rank receives all tensors of the LoRA, in `dtype`; vLLM slices them itself.

    Memory: the whole LoRA on every rank while it arrives, and vLLM's copy of it on the host.
    """

    def __init__(
        self,
        weights: VllmAdaptor,
        loras: DeliveredLoras,
        lora: ActorLora,
        dtype: str,
    ) -> None:
        self._weights = weights
        self._loras = loras
        self._lora = lora
        self._dtype = dtype
        self._arriving: TensorDict = {}
        self._is_delivered = False

    def layout(self) -> Layout:
        """Return the weights' records and a record for each tensor of the LoRA."""
        shapes = self._lora.shapes
        buffers = {}
        shards = []
        for name, shape in shapes.items():
            buffer_id = BufferId(self._weights.rank, name)
            buffers[buffer_id] = Buffer(math.prod(shape), self._dtype, GROUP)
            shards.append(Shard.of(name, LocalBox.whole(shape), buffer_id))
        return Layout.merge([self._weights.layout(), Layout(shapes, buffers, tuple(shards))])

    def allocate(self, groups: Sequence[str]) -> Tensors:
        """See the port; the LoRA's tensors are new."""
        buffers = dict(self._weights.allocate(_without_lora(groups)))
        if GROUP in groups:
            dtype = getattr(torch, self._dtype)
            self._arriving = {
                name: torch.empty(math.prod(shape), dtype=dtype, device=self._weights.device)
                for name, shape in self._lora.shapes.items()
            }
            buffers |= self._arriving
        return buffers

    def commit(self, groups: Sequence[str]) -> None:
        """See the port; the LoRA replaces its former version."""
        self._weights.commit(_without_lora(groups))
        if GROUP in groups:
            self._is_delivered = False
            shapes = self._lora.shapes
            # A failure in `deliver` leaves the LoRA undelivered, and the next switch sends it
            # again.
            tensors = {name: flat.view(shapes[name]) for name, flat in self._arriving.items()}
            self._loras.deliver(self._lora.name, self._lora.settings, tensors)
            self._is_delivered = True
            self._arriving = {}

    def finish_fill(self) -> None:
        self._weights.finish_fill()

    def abandon(self) -> None:
        self._weights.abandon()

    def release(self, keep: Collection[str] = ()) -> None:
        """See the port; vLLM keeps its copy of the LoRA on the host."""
        self._arriving = {}
        self._is_delivered = self._is_delivered and GROUP in keep
        self._loras.drop_from_device()
        self._weights.release(_without_lora(keep))

    def committed(self) -> Collection[str]:
        """See the port; the next request for the LoRA loads it from the host."""
        lora = (GROUP,) if self._is_delivered else ()
        return [*self._weights.committed(), *lora]

    def proving(
        self,
        tensors: Collection[str],
        unproven: Callable[[str], None],
    ) -> AbstractContextManager[None]:
        """See the port; covers the weights, but not vLLM's form of a LoRA."""
        return self._weights.proving(tensors, unproven)

    def share_memory(self, memories: Memories, leave: Callable[[], object]) -> bool:
        return self._weights.share_memory(memories, leave)

    def give_back(self) -> None:
        self._weights.give_back()

    def resident_nbytes(self) -> int:
        """See the port; vLLM's copy of the LoRA on the host is not counted."""
        arriving = sum(flat.nbytes for flat in self._arriving.values())
        return self._weights.resident_nbytes() + arriving


def _without_lora(groups: Collection[str]) -> list[str]:
    return [group for group in groups if group != GROUP]
