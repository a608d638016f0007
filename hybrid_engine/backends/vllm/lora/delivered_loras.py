"""LoRAs for vLLM, delivered from memory.

vLLM's requests name a directory, and its worker reads it in one place (`internals.LOAD_LORA`); there the tensors kept
here are taken instead. All else is vLLM's: merging of fused projections, slices per rank, slots, batches of several
LoRAs. A LoRA that was evicted, or dropped with the weights, comes back with the next request for it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import reset_prefix_cache
from hybrid_engine.errors import ConfigError, StateError, Violation
from hybrid_engine.models.lora_tensors import LoraSettings, module_of


@dataclass(frozen=True)
class _Lora:
    number: int
    settings: LoraSettings
    tensors: Mapping[str, torch.Tensor]


class DeliveredLoras:
    """The LoRAs of one rank's engine, by name."""

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
