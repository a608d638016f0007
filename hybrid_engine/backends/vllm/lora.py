"""LoRA beside weights that are not merged: delivered from memory by name, and as one more group of a switch.

vLLM's requests name a directory, and its worker reads it in one place (`internals.LOAD_LORA`); there the tensors kept
here are taken instead. All else is vLLM's: merging of fused projections, slices per rank, slots, batches of several
LoRAs. A LoRA that was evicted, or dropped with the weights, comes back with the next request for it.

`InferenceEngine.set_lora` delivers one at any time. With `lora_delivery: adapter` the worker hands `WeightsWithLora` to
the switch: the LoRA arrives as a group, and its commit delivers it. Memory: a copy on the host for as long as it is
known; on the device what vLLM's slots hold, until a release.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import reset_prefix_cache
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.errors import ConfigError, StateError, Violation
from hybrid_engine.models.lora_tensors import ActorLora, LoraSettings, module_of
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides

GROUP = "lora"
"""The commit group of all tensors of the actor's LoRA."""


@dataclass(frozen=True)
class _Lora:
    number: int
    settings: LoraSettings
    tensors: Mapping[str, torch.Tensor]


class DeliveredLoras:
    def __init__(self, llm: Any, undo: contextlib.ExitStack) -> None:
        """Make the worker of `llm`, an LLM with LoRA enabled, take LoRAs from here until `undo` is closed."""
        self._llm = llm
        self._manager = internals.model_runner_of(llm).lora_manager
        self._by_name: dict[str, _Lora] = {}
        self._next_number = 1
        undo.enter_context(internals.LOAD_LORA.replaced(lambda _: self._load, owner=self._manager))

    def deliver(self, name: str, settings: LoraSettings, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take up a LoRA or a new version of one; the tensors are copied to host memory.

        Raises ConfigError with everything that does not fit, and StateError while vLLM has unfinished requests; both
        keep the version before.
        """
        if violations := self._violations(settings, tensors):
            raise ConfigError(violations)
        reset_prefix_cache(self._llm)  # vLLM tells cached prefixes of LoRAs apart by name only
        held = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        before = self._by_name.get(name)
        number = before.number if before else self._next_number
        self._next_number += before is None
        self._by_name[name] = _Lora(number, settings, held)
        self._manager.remove_adapter(number)

    def forget(self, name: str) -> None:
        """Forget a LoRA. Raises StateError when there is none of this name, or unfinished requests."""
        number = self._get(name).number
        reset_prefix_cache(self._llm)
        self._manager.remove_adapter(number)
        del self._by_name[name]

    def request(self, name: str) -> Any:
        """What a vLLM request carries to use a LoRA. Raises StateError for an unknown one."""
        return internals.LORA_REQUEST.load()(name, self._get(name).number, "in memory")

    def drop_from_device(self) -> None:
        """The device's copies are gone or will be; the next request brings its LoRA back."""
        self._manager.remove_all_adapters()

    def reset_device(self) -> None:
        """The weights' memory is back, with anything in it: what vLLM itself keeps there for LoRAs is written anew."""
        internals.model_runner_of(self._llm).reset_lora_state()

    def _get(self, name: str) -> _Lora:
        if name not in self._by_name:
            known = ", ".join(self._by_name) or "none"
            raise StateError(f"no LoRA {name!r}; there are: {known}. Deliver it with set_lora")
        return self._by_name[name]

    def _load(self, request: Any) -> Any:
        """Called by vLLM's worker: the LoRA as vLLM's own `LoRAModel`."""
        lora = self._get(request.lora_name)
        manager, settings = self._manager, lora.settings
        peft = internals.PEFT_HELPER.load()(
            {
                "r": settings.rank,
                "lora_alpha": settings.alpha,
                "target_modules": list(settings.target_modules),
                "rank_pattern": _as_patterns(settings.ranks),
                "alpha_pattern": _as_patterns(settings.alphas),
            }
        )
        peft.validate_legal(manager.lora_config)
        return internals.LORA_MODEL.load()(
            lora.number,
            {name: tensor.clone() for name, tensor in lora.tensors.items()},  # vLLM scales lora_B in place
            peft,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=self._mapper(),
        )

    def _mapper(self) -> Any:
        mapper = getattr(self._manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def _violations(self, settings: LoraSettings, tensors: Mapping[str, torch.Tensor]) -> list[Violation]:
        limit, violations = self._manager.lora_config.max_lora_rank, []
        if settings.largest_rank > limit:
            problem = f"{settings.largest_rank} is more than max_lora_rank {limit}"
            violations.append(Violation("LoRA rank", problem, "Raise max_lora_rank"))
        if not tensors:
            violations.append(Violation("LoRA", "it has no tensors", "Give its lora_A and lora_B weights"))
        for name, tensor in tensors.items():
            if fault := self._problem_of(name, tensor, settings, tensors):
                remedy = "Give lora_A [rank, in] and lora_B [out, rank] under their PEFT names"
                violations.append(Violation(name, fault, remedy))
        return violations

    def _problem_of(
        self, name: str, tensor: torch.Tensor, settings: LoraSettings, tensors: Mapping[str, torch.Tensor]
    ) -> str | None:
        kinds = [kind for kind in ("lora_A", "lora_B") if name.endswith(f".{kind}.weight")]
        if not kinds or not name.startswith("base_model.model."):
            return "not a base_model.model.….lora_A.weight or lora_B.weight"
        path = module_of(name)
        module, rank = path.rpartition(".")[2], settings.ranks.get(path, settings.rank)
        if module not in settings.target_modules:
            return f"{module} is not in target_modules {', '.join(settings.target_modules)}"
        if module not in self._supported():
            return f"vLLM was built for LoRA on {', '.join(sorted(self._supported()))} (lora_target_modules)"
        size = tensor.shape[0 if kinds[0] == "lora_A" else -1]
        if tensor.dim() != 2 or size != rank:
            return f"shape {tuple(tensor.shape)} is not of rank {rank}"
        other = name.replace(f".{kinds[0]}.", ".lora_B." if kinds[0] == "lora_A" else ".lora_A.")
        return None if other in tensors else f"{other} is missing"

    def _supported(self) -> set[str]:
        """Names of projections as PEFT knows them: those that vLLM fuses, by their parts."""
        manager = self._manager._adapter_manager
        packed = manager.packed_modules_mapping
        parts = {part for module in manager.supported_lora_modules for part in packed.get(module, [module])}
        return parts & set(self._manager.lora_config.target_modules)


def _as_patterns(by_module: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM takes its keys, as PEFT does, for regular expressions of the end of a module's name."""
    return {re.escape(module): value for module, value in by_module.items()}


class WeightsWithLora:
    """vLLM's weights and, beside them, the actor's LoRA (port `InferenceWeights`).

    Every rank takes all tensors of it, in `dtype`; vLLM cuts them itself.

    Memory: the whole LoRA on every rank while it arrives, and vLLM's copy of it on the host.
    """

    def __init__(self, weights: VllmAdaptor, loras: DeliveredLoras, lora: ActorLora, dtype: str) -> None:
        self._weights, self._loras = weights, loras
        self._lora, self._dtype = lora, dtype
        self._arriving: dict[str, torch.Tensor] = {}
        self._is_delivered = False

    def layout(self) -> Layout:
        """The weights' records and one for each tensor of the LoRA."""
        rank, shapes = self._weights.rank, self._lora.shapes
        buffers = {BufferId(rank, name): Buffer(math.prod(shape), self._dtype, GROUP) for name, shape in shapes.items()}
        shards = tuple(
            Shard(Region(name, (0,) * len(shape), shape), Place(BufferId(rank, name), 0, contiguous_strides(shape)))
            for name, shape in shapes.items()
        )
        return Layout.merge([self._weights.layout(), Layout(shapes, buffers, shards)])

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """As the port says; the LoRA's tensors are new."""
        buffers = dict(self._weights.allocate([group for group in groups if group != GROUP]))
        if GROUP in groups:
            self._arriving = {
                name: torch.empty(math.prod(shape), dtype=getattr(torch, self._dtype), device=self._weights.device)
                for name, shape in self._lora.shapes.items()
            }
            buffers |= self._arriving
        return buffers

    def commit(self, groups: Sequence[str]) -> None:
        """As the port says; the LoRA takes the place of the version before."""
        self._weights.commit([group for group in groups if group != GROUP])
        if GROUP in groups:
            self._is_delivered = False
            tensors = {name: flat.view(self._lora.shapes[name]) for name, flat in self._arriving.items()}
            self._loras.deliver(self._lora.name, self._lora.settings, tensors)
            self._is_delivered = True
            self._arriving = {}

    def finish_fill(self) -> None:
        self._weights.finish_fill()

    def abandon(self) -> None:
        self._weights.abandon()

    def release(self, keep: Collection[str] = ()) -> None:
        """As the port says; vLLM keeps its copy of the LoRA on the host."""
        self._arriving = {}
        self._is_delivered = self._is_delivered and GROUP in keep
        self._loras.drop_from_device()
        self._weights.release([group for group in keep if group != GROUP])

    def committed(self) -> Collection[str]:
        """As the port says; the LoRA's next request brings it from the host."""
        return [*self._weights.committed(), *([GROUP] if self._is_delivered else ())]

    def proving(
        self, tensors: Collection[str], unproven: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[None]:
        """As the port says, of the weights; what vLLM makes of a LoRA is not looked at."""
        return self._weights.proving(tensors, unproven)

    def resident_nbytes(self) -> int:
        """As the port says; vLLM's copy of the LoRA on the host is not counted."""
        return self._weights.resident_nbytes() + sum(flat.nbytes for flat in self._arriving.values())
