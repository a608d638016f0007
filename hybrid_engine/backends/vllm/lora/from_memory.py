"""LoRA adapters for vLLM, delivered from memory.

vLLM's requests name a directory, and its worker reads it in one place, `_load_adapter`; there the tensors that are kept
here are taken instead. All else is vLLM's: merging of fused projections, slices per rank, slots, batches of several
adapters. An adapter that was evicted, or dropped with the weights, comes back with the next request for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.backends.vllm.engine_settings import AdapterConfig
from hybrid_engine.backends.vllm.requests import reset_prefix_cache
from hybrid_engine.errors import ConfigError, StateError, Violation


@dataclass(frozen=True)
class _Adapter:
    number: int
    config: AdapterConfig
    tensors: Mapping[str, torch.Tensor]


class Adapters:
    """The adapters of one rank's engine, by name."""

    def __init__(self, llm: Any) -> None:
        """Make the worker of `llm`, an LLM with LoRA enabled, read adapters from here."""
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._llm = llm
        self._manager = runner.lora_manager
        self._manager._load_adapter = self._load  # in place of reading a directory
        self._by_name: dict[str, _Adapter] = {}
        self._next_number = 1

    def set(self, name: str, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take up an adapter or a new version of one; the tensors are copied to host memory.

        Raises ConfigError with everything that does not fit, and StateError while vLLM has unfinished requests; both
        keep the version before.
        """
        if violations := self._violations(config, tensors):
            raise ConfigError(violations)
        reset_prefix_cache(self._llm)  # vLLM tells cached prefixes of adapters apart by name only
        held = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        before = self._by_name.get(name)
        number = before.number if before else self._next_number
        self._next_number += before is None
        self._by_name[name] = _Adapter(number, config, held)
        self._manager.remove_adapter(number)

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises StateError when there is none of this name, or unfinished requests."""
        number = self._get(name).number
        reset_prefix_cache(self._llm)
        self._manager.remove_adapter(number)
        del self._by_name[name]

    def request(self, name: str) -> Any:
        """What a vLLM request carries to use an adapter. Raises StateError for an unknown one."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, self._get(name).number, "in memory")

    def drop_from_device(self) -> None:
        """The device's copies are gone or will be; the next request brings its adapter back."""
        self._manager.remove_all_adapters()

    def _get(self, name: str) -> _Adapter:
        if name not in self._by_name:
            known = ", ".join(self._by_name) or "none"
            raise StateError(f"no adapter {name!r}; there are: {known}. Deliver it with set_adapter")
        return self._by_name[name]

    def _load(self, request: Any) -> Any:
        """Called by vLLM's worker: the adapter as vLLM's own `LoRAModel`."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapter = self._get(request.lora_name)
        manager, config = self._manager, adapter.config
        peft = PEFTHelper.from_dict(
            {"r": config.rank, "lora_alpha": config.alpha, "target_modules": list(config.target_modules)}
        )
        peft.validate_legal(manager.lora_config)
        return LoRAModel.from_lora_tensors(
            adapter.number,
            {name: tensor.clone() for name, tensor in adapter.tensors.items()},  # vLLM scales lora_B in place
            peft,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=self._mapper(),
        )

    def _mapper(self) -> Any:
        mapper = getattr(self._manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def _violations(self, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> list[Violation]:
        limit, violations = self._manager.lora_config.max_lora_rank, []
        if config.rank > limit:
            problem = f"{config.rank} is more than max_lora_rank {limit}"
            violations.append(Violation("adapter rank", problem, "Raise max_lora_rank"))
        if not tensors:
            violations.append(Violation("adapter", "it has no tensors", "Give its lora_A and lora_B weights"))
        for name, tensor in tensors.items():
            if problem := self._problem_of(name, tensor, config, tensors):
                remedy = "Give lora_A [rank, in] and lora_B [out, rank] under their PEFT names"
                violations.append(Violation(name, problem, remedy))
        return violations

    def _problem_of(
        self, name: str, tensor: torch.Tensor, config: AdapterConfig, tensors: Mapping[str, torch.Tensor]
    ) -> str | None:
        kinds = [kind for kind in ("lora_A", "lora_B") if name.endswith(f".{kind}.weight")]
        if not kinds or not name.startswith("base_model.model."):
            return "it is no base_model.model.….lora_A.weight or lora_B.weight"
        module = name.removesuffix(f".{kinds[0]}.weight").rpartition(".")[2]
        if module not in config.target_modules:
            return f"{module} is none of target_modules {', '.join(config.target_modules)}"
        if module not in self._supported():
            return f"vLLM was built for adapters of {', '.join(sorted(self._supported()))} (lora_target_modules)"
        size = tensor.shape[0 if kinds[0] == "lora_A" else -1]
        if tensor.dim() != 2 or size != config.rank:
            return f"shape {tuple(tensor.shape)} has not rank {config.rank}"
        other = name.replace(f".{kinds[0]}.", ".lora_B." if kinds[0] == "lora_A" else ".lora_A.")
        return None if other in tensors else f"{other} is missing"

    def _supported(self) -> set[str]:
        """Names of projections as PEFT knows them: those that vLLM fuses, by their parts."""
        manager = self._manager._adapter_manager
        packed = manager.packed_modules_mapping
        parts = {part for module in manager.supported_lora_modules for part in packed.get(module, [module])}
        return parts & set(self._manager.lora_config.target_modules)
