"""A sharded model as the switch sees it (port `Trainer`), whoever trains it.

    what is on the device                       kind        when it is offloaded
    parameters, persistent buffers              param       copy
    sums of weights and LoRA                    param       drop: computed at every switch
    gradients                                   grad        copy: accumulated ones outlive a switch
    optimizer state                             optimizer   copy
    other buffers, numbers (Adam's step)        -           stay: small

Gathered parameters are freed before anything leaves. Storages that are not elastic are resized to 0 bytes and back.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import PreTrainedConfig

from hybrid_engine.backends.fsdp.adaptor import FsdpAdaptor, LoraDelivery
from hybrid_engine.backends.fsdp.live_attention import live_attention
from hybrid_engine.backends.fsdp.model_checks import require_torch
from hybrid_engine.backends.fsdp.names import transformers_model
from hybrid_engine.backends.fsdp.sharded_tensors import local_of, reshard
from hybrid_engine.backends.training_side import GuardedState, is_frozen, stepped_by, steps_before
from hybrid_engine.errors import ModelError
from hybrid_engine.memory.offload_items import KINDS, OffloadItem
from hybrid_engine.models.table import ModelTable
from hybrid_engine.probes import Attention, ProbeAnswer, ProbeLimits, attributes_set, following_log_probs


class ShardedModel(GuardedState):
    """One rank's share of a model: its weights, and what of it can leave the device.

    Args:
        model: a transformers causal LM with `fully_shard` applied to its layers and to itself.
        table: of its architecture (`models.table_for`).
        rank: of this process in the job.
        optimizers: over its parameters; made after `fully_shard`, as FSDP2 asks. One that is made later is noticed at
            its first step.
        lora_delivery: what a switch gets of PEFT's LoRA: "merge" adds it to the weights, "adapter" leaves it apart.
        is_whole: the model is not sharded: every rank has a copy, and whoever trains keeps them alike, as DDP does.

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
        is_whole: bool = False,
    ) -> None:
        require_torch()
        _require_free(model)
        _require_own_parameters(model, optimizers)
        self.model = model
        self.optimizers = list(optimizers)
        self.table = table
        self.weights = FsdpAdaptor(model, table, rank, lora_delivery, is_whole)
        super().__init__()
        self._parameter_names: dict[torch.Tensor, str] = {
            tensor: name
            for name, tensor in self.weights.tensors.tensors.items()
            if isinstance(tensor, torch.nn.Parameter)
        }
        self._num_steps: Counter[torch.optim.Optimizer] = Counter()
        _driven[model] = weakref.ref(self)
        self._ends.callback(_driven.pop, model, None)
        # on what PEFT and torch.compile call, too
        self.watch(dict.fromkeys((model, transformers_model(model))), self.optimizers)
        self._watch_steps()

    @property
    def version(self) -> int:
        """Number of optimizer steps the weights have taken; of several optimizers, of the one that took the most."""
        return max(self._num_steps.values(), default=0)

    @property
    def unserved(self) -> list[str]:
        return [name for name in self.table.shapes if not self.table.is_served(name)]

    @property
    def frozen(self) -> list[str]:
        """Canonical tensors that are made of parameters which require no gradient now."""
        return [name for name, origins in self.weights.origins().items() if all(map(is_frozen, origins))]

    def offload_items(self) -> list[OffloadItem]:
        """Parameters, gradients and optimizer state, as they are now; gathered parameters are freed."""
        reshard(self.model)
        scratch = self.weights.scratch
        items = [
            OffloadItem(name, "param", flat, "drop" if name in scratch else "copy")
            for name, flat in self.weights.buffers().items()
        ]
        items += [OffloadItem(owner, "grad", tensor) for owner, tensor in self._gradients()]
        items += [
            OffloadItem(owner, "optimizer", tensor) for owner, tensor in self._optimizer_state() if tensor.numel() > 1
        ]
        return items

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, name in self._parameter_names.items():
            if parameter.grad is not None:
                yield f"{name}.grad", local_of(parameter.grad)

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                name = self._parameter_names.get(parameter, "a parameter of another model")
                yield from _tensors_in(f"optimizer[{index}] of {name}", state)

    def probe_limits(self) -> ProbeLimits:
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

    def attention(self) -> Mapping[int, Attention]:
        """See `probes.Probed`; as it was when this was first called, which is before vLLM is built: vLLM changes
        transformers' classes where it serves a model through them, and no copy could be made then."""
        return self._attention

    @cached_property
    def _attention(self) -> Mapping[int, Attention]:
        return live_attention(self.model)

    def computed_settings(self) -> Mapping[str, Any]:
        config: dict[str, Any] = self._transformers().config.to_dict()
        # what every architecture has decides about inputs, outputs and files
        return {name: config[name] for name in config.keys() - PreTrainedConfig().to_dict().keys()}

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
        if not any(id(parameter) in own for parameter in stepped_by(optimizer)):
            return False
        _require_own_parameters(self.model, [optimizer])
        self.optimizers.append(optimizer)
        self._num_steps[optimizer] = steps_before(optimizer, self._num_steps)
        self.watch([], [optimizer])
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
        parameters = stepped_by(optimizer)
        if others := sum(id(parameter) not in own for parameter in parameters):
            raise ModelError(
                f"optimizer {index} has {others} of {len(parameters)} parameters that are not the model's: make it "
                "after fully_shard, of model.parameters()"
            )


def _tensors_in(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a parameter's state holds, at any depth; of sharded ones the local part."""
    if isinstance(value, torch.Tensor):
        yield path, local_of(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(f"{path}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _tensors_in(f"{path}[{index}]", inner)
