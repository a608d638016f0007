"""A sharded model as the switch sees it (port `Trainer`), with any training loop.

    state on the device                         kind        when it is offloaded
    parameters, persistent buffers              param       copied
    sums of weights and LoRA                    param       dropped: computed at every switch
    gradients                                   grad        copied: they may accumulate
    optimizer state                             optimizer   copied
    other buffers, numbers (Adam's step)        -           stay: small

Gathered parameters are freed before anything is offloaded. Storages that are not elastic are
resized to 0 bytes and back.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from transformers import PreTrainedConfig

from hybrid_engine.backends.computed_sources import ModelTrainer
from hybrid_engine.backends.fsdp.adaptor import FsdpAdaptor, LoraDelivery
from hybrid_engine.backends.fsdp.attention import Recorded, live_attention, recorded
from hybrid_engine.backends.fsdp.model_checks import require_torch
from hybrid_engine.backends.fsdp.names import transformers_model
from hybrid_engine.backends.fsdp.sharded_tensors import local_of, reshard
from hybrid_engine.backends.training_side import (
    stepped_by,
    steps_before,
)
from hybrid_engine.compute_check.attention import POSITIONS, Attentions
from hybrid_engine.compute_check.config_reads import Reads
from hybrid_engine.compute_check.probes import (
    ProbeAnswer,
    ProbeImage,
    ProbeLimits,
    attributes_set,
    following_log_probs,
)
from hybrid_engine.compute_check.routes import RouteWatch
from hybrid_engine.errors import ModelError
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.memory.offload_items import KINDS, OffloadItem, tensors_in
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.torch_internals import Tensors

_driven: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[ShardedModel]] = (
    weakref.WeakKeyDictionary()
)
"""Model -> the `ShardedModel` that drives it."""

_KINDS = {"image": 1, "video": 2, "audio": 3}
"""Kind of a token -> its number among transformers' kinds of tokens."""
_NAMES_OF_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Names of the kinds of tokens in the forward of models of images; each model has one or none."""


class ShardedModel(ModelTrainer):
    """Weights of a model on this rank, and state of its training that can leave the device.

    Args:
        model: a transformers causal LM with `fully_shard` applied to its layers and to the model.
        table: name table of the model (`models.table_for`).
        rank: rank of this process in the job.
        optimizers: optimizers of the model's parameters, created after `fully_shard`, as FSDP2
            requires. An optimizer that is created later is adopted at its first step.
        lora_delivery: delivery of PEFT's LoRA: "merge" adds it to the weights, "adapter" delivers
            it separately.
        is_whole: the model is not sharded. Every rank has a copy, and the training loop keeps the
            copies equal, as DDP does.

    Attributes:
        weights: the weights that a switch reshards.

    Raises:
        DependencyError: torch is older than the tested version.
        ModelError: listing every reason why the model or an optimizer cannot be driven.
        ParameterMismatchError: tensors of the model and of a checkpoint differ.
        ConfigError: LoRA cannot be delivered separately.
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
        driver = _driven.get(model)
        if driver is not None and driver() is not None:
            raise ModelError(
                "an engine drives this model already: call its shutdown() before another engine "
                "is built",
                code="already-driven",
            )
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
        self._cleanup.callback(_driven.pop, model, None)
        # Guard both: a user may call the model inside the wrappers of PEFT and torch.compile.
        self.watch(dict.fromkeys((model, transformers_model(model))), self.optimizers)
        self._watch_steps()

    @property
    def version(self) -> int:
        """Number of optimizer steps of the weights: the maximum over several optimizers."""
        return max(self._num_steps.values(), default=0)

    def resume_version(self, optimizer: torch.optim.Optimizer, version: int) -> None:
        """Set the number of steps that `optimizer` has taken, from a checkpoint."""
        self._num_steps[optimizer] = version

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Groups of the meshes over which parameters are sharded."""
        parameters = self.model.parameters()
        meshes = [tensor.device_mesh for tensor in parameters if isinstance(tensor, DTensor)]
        return [group for mesh in dict.fromkeys(meshes) for group in mesh.get_all_groups()]

    def offload_items(self) -> list[OffloadItem]:
        """Return the present parameters, gradients and optimizer state.

        Frees gathered parameters.
        """
        reshard(self.model)
        items = [*self.weights.offload_items()]
        for parameter, name in self._parameter_names.items():
            if parameter.grad is not None:
                items.append(OffloadItem(f"{name}.grad", "grad", local_of(parameter.grad)))
        for index, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                name = self._parameter_names.get(parameter, "a parameter of another model")
                for path, tensor in tensors_in(f"optimizer[{index}] of {name}", state):
                    local = local_of(tensor)
                    # Numbers, such as Adam's step, stay on the device.
                    if local.numel() > 1:
                        items.append(OffloadItem(path, "optimizer", local))
        return items

    def probe_limits(self) -> ProbeLimits:
        longest = getattr(transformers_model(self.model).config, "max_position_embeddings", None)
        return ProbeLimits(max_length=longest, vocab_size=self.table.dims.vocab_size)

    def image_inputs(self, tokens: torch.Tensor, images: Tensors) -> dict[str, torch.Tensor]:
        """Return what the model takes beside `tokens` [B, L]: the images, and where they are.

        `images`: tensors of a processor of transformers, such as `pixel_values`.
        """
        # 0 for text; positions, or attention within an image, follow from it.
        kinds = torch.zeros_like(tokens)
        for kind, token in self.table.placeholders.items():
            kinds[tokens == token] = _KINDS[kind]
        inputs = {**images, **dict.fromkeys(_NAMES_OF_KINDS, kinds)}
        # Processors also return counts that only vLLM reads.
        taken = inspect.signature(transformers_model(self.model).forward).parameters
        return {name: inputs[name] for name in inputs if name in taken}

    def probe_image(self, image: ProbeImage) -> ProbeAnswer:
        """Compute log-probabilities of a prompt with an image; see `probes.ProbedWithImages`."""
        device = next(self.model.parameters()).device
        images = {name: tensor.to(device) for name, tensor in image.inputs.items()}
        return self.probe(image.tokens, self.image_inputs(image.tokens.to(device), images))

    @torch.no_grad()
    def probe(self, tokens: torch.Tensor, inputs: Tensors | None = None) -> ProbeAnswer:
        """Compute log-probabilities of `tokens` [B, L]; see `probes.Probed`.

        `inputs`: further arguments of the model's forward pass.

        The model computes in evaluation mode, with its adapters and mixed precision.
        """
        dtypes: list[torch.dtype] = []
        inner: Any = transformers_model(self.model)
        hook = inner.get_input_embeddings().register_forward_hook(
            lambda _module, _inputs, output: dtypes.append(output.dtype)
        )
        watch = RouteWatch(self.table.dims.num_experts)
        try:
            device = next(self.model.parameters()).device
            # Eager, because a compilation for this length would be used once.
            with (
                attributes_set(self.model.modules(), training=False),
                torch.compiler.set_stance("force_eager"),
                watch,
            ):
                logits = self.model(tokens.to(device), use_cache=False, **inputs or {}).logits
        finally:
            hook.remove()
            reshard(self.model)
        log_probs = following_log_probs(logits, tokens, self.table.dims.vocab_size)
        # Hidden states may have a coarser dtype than the logits.
        # bfloat16 has an eps of 2**-7, float32 of 2**-23.
        coarsest = max([*dtypes, logits.dtype], key=lambda dtype: torch.finfo(dtype).eps)
        return ProbeAnswer(log_probs.cpu(), coarsest, watch.routes)

    def attention(self, positions: Sequence[int] = POSITIONS) -> Attentions:
        """Return the attention of every decoder layer; see `probes.WithAttention`.

        The first call must precede the construction of vLLM: vLLM changes transformers' classes if
        it serves a model through them, and such a model cannot be copied.
        """
        return live_attention(self.model, self._recorded.calls, positions)

    def config_reads(self) -> Reads:
        return self._recorded.reads

    @cached_property
    def _recorded(self) -> Recorded:
        return recorded(self.model)

    def computed_settings(self) -> HfConfig:
        inner: Any = transformers_model(self.model)
        config: dict[str, Any] = inner.config.to_dict()
        # Settings of every architecture concern inputs, outputs and files.
        return {name: config[name] for name in config.keys() - PreTrainedConfig().to_dict().keys()}

    def _watch_steps(self) -> None:
        """Observe every step of any optimizer, because the loop may create one later."""
        # torch keeps the hooks; a strong reference there would keep the model alive.
        reference = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (model := reference()) is not None and model._adopt(optimizer):
                model.guard(KINDS)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (model := reference()) is not None and optimizer in model.optimizers:
                model._num_steps[optimizer] += 1

        before = register_optimizer_step_pre_hook(before_step)
        after = register_optimizer_step_post_hook(after_step)
        self._remove_at_end([before, after])

    def _adopt(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps this model's parameters, and watch it from then on."""
        if optimizer in self.optimizers:
            return True
        parameter_ids = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(parameter) in parameter_ids for parameter in stepped_by(optimizer)):
            return False
        _require_own_parameters(self.model, [optimizer])
        self.optimizers.append(optimizer)
        self._num_steps[optimizer] = steps_before(optimizer, self._num_steps)
        self.watch([], [optimizer])
        return True


def _require_own_parameters(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Raise ModelError if an optimizer steps parameters that are not the model's."""
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        parameters = stepped_by(optimizer)
        num_foreign = sum(id(parameter) not in parameter_ids for parameter in parameters)
        if num_foreign:
            raise ModelError(
                f"optimizer {index} has {num_foreign} of {len(parameters)} parameters that are "
                "not the model's: create it after fully_shard, from model.parameters()",
                code="foreign-parameters",
            )
