"""A sharded model as the switch sees it (port `Trainer`), whoever trains it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hybrid_engine.backends.access_guards import GuardedState
from hybrid_engine.backends.flat_buffers import is_frozen
from hybrid_engine.backends.fsdp.adaptor import FsdpAdaptor, LoraDelivery
from hybrid_engine.backends.fsdp.model_checks import require_torch
from hybrid_engine.backends.fsdp.sharded_tensors import reshard
from hybrid_engine.backends.fsdp.training_state import TrainingState
from hybrid_engine.backends.fsdp.wrapped_names import transformers_model
from hybrid_engine.errors import ModelError
from hybrid_engine.memory.offload_items import KINDS, OffloadItem, Reached
from hybrid_engine.models.table import ModelTable
from hybrid_engine.probes import ProbeAnswer, ProbeLimits, attributes_set, following_log_probs


class ShardedModel(GuardedState):
    """One rank's share of a model: its weights, and what of it can leave the device.

    Args:
        model: a transformers causal LM with `fully_shard` applied to its layers and to itself.
        table: of its architecture (`models.table_for`).
        rank: of this process in the job.
        optimizers: over its parameters; made after `fully_shard`, as FSDP2 asks. One that is made later is noticed at
            its first step.
        lora_delivery: what a switch gets of PEFT's LoRA: "merge" adds it to the weights, "adapter" leaves it apart.

    Attributes:
        weights: what is resharded.

    Raises ModelError, with all faults, for a model or an optimizer that cannot be driven.
    """

    weights: FsdpAdaptor

    def __init__(
        self,
        model: torch.nn.Module,
        table: ModelTable,
        rank: int,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        lora_delivery: LoraDelivery = "merge",
    ) -> None:
        require_torch()
        _require_free(model)
        _require_own_parameters(model, optimizers)
        self.model = model
        self.optimizers = list(optimizers)
        self.table = table
        self.weights = FsdpAdaptor(model, table, rank, lora_delivery)
        super().__init__()
        self._state = TrainingState(self.weights, self.optimizers)
        self._num_steps: Counter[torch.optim.Optimizer] = Counter()
        _driven[model] = weakref.ref(self)
        self._ends.callback(_driven.pop, model, None)
        # on what PEFT and torch.compile call, too
        self._watch(dict.fromkeys((model, transformers_model(model))), self.optimizers)
        self._watch_steps()

    @property
    def version(self) -> int:
        """Number of optimizer steps the weights have taken; of several optimizers, of the one that took the most."""
        return max(self._num_steps.values(), default=0)

    @property
    def unserved(self) -> list[str]:
        """Canonical tensors that are trained and that vLLM does not read."""
        return [name for name in self.table.shapes if not self.table.is_served(name)]

    @property
    def frozen(self) -> list[str]:
        """Canonical tensors that are made of parameters which require no gradient now."""
        return [name for name, origins in self.weights.origins().items() if all(map(is_frozen, origins))]

    def offload_items(self) -> list[OffloadItem]:
        """Parameters, gradients and optimizer state, as they are now; gathered parameters are freed."""
        reshard(self.model)
        return self._state.items()

    def reachable_tensors(self) -> Iterator[Reached]:
        """Every tensor that model and optimizers refer to, for `Offloader.residual`."""
        return self._state.reachable()

    def probe_limits(self) -> ProbeLimits:
        """See `probes.Probed`."""
        longest = getattr(self._transformers().config, "max_position_embeddings", None)
        return ProbeLimits(max_length=longest, vocab_size=self.table.dims.vocab_size)

    @torch.no_grad()
    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """See `probes.Probed`; the model is in evaluation mode, with its adapters and mixed precision."""
        dtypes: list[torch.dtype] = []
        embeddings = self._transformers().get_input_embeddings()
        seen = embeddings.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
        try:
            device = next(self.model.parameters()).device
            # eager: a compilation of this length would be used once
            with attributes_set(self.model.modules(), training=False), torch.compiler.set_stance("force_eager"):
                logits = self.model(tokens.to(device), use_cache=False).logits
        finally:
            seen.remove()
            reshard(self.model)
        log_probs = following_log_probs(logits, tokens, self.table.dims.vocab_size)
        return ProbeAnswer(log_probs.cpu(), max([*dtypes, logits.dtype], key=lambda dtype: torch.finfo(dtype).eps))

    def computed_settings(self) -> Mapping[str, Any]:
        """See `probes.Probed`: the live model's own configuration."""
        config: dict[str, Any] = self._transformers().config.to_dict()
        return {name: value for name, value in config.items() if not name.startswith("_")}

    def reload_main_params(self) -> None:
        """Nothing: the optimizer steps on the parameters themselves."""

    def _transformers(self) -> Any:
        return transformers_model(self.model)

    def _watch_steps(self) -> None:
        """Hear of every step of any optimizer: one may be made after this."""
        own = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (model := own()) is not None and model._adopt(optimizer):
                model.guard(KINDS)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (model := own()) is not None and optimizer in model.optimizers:
                model._num_steps[optimizer] += 1

        self._remove_at_end(
            [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]
        )

    def _adopt(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer is one of the model's; a new one is from now on."""
        if optimizer in self.optimizers:
            return True
        own = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return False
        _require_own_parameters(self.model, [optimizer])
        self.optimizers.append(optimizer)
        self._watch([], [optimizer])
        return True


_driven: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[ShardedModel]] = weakref.WeakKeyDictionary()
"""Models, and what drives them."""


def _require_free(model: torch.nn.Module) -> None:
    driver = _driven.get(model)
    if driver is not None and driver() is not None:
        raise ModelError("an engine drives this model already: call its shutdown() before the next one is built")


def _require_own_parameters(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if others := sum(id(parameter) not in own for parameter in parameters):
            raise ModelError(
                f"optimizer {index} has {others} of {len(parameters)} parameters that are not the model's: make it "
                "after fully_shard, of model.parameters()"
            )
