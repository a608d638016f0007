"""transformers' class of a config.json, computing with a trainer's weights, layer by layer.

vLLM is built from the same config.json. Where vLLM's log-probabilities cannot be compared with the
trainer's, those of this model can. Its weights go from all ranks to rank 0, over the host:

    part 0        embeddings, head, and all else outside of the layers
    part i + 1    layer i, which computes at once, and is dropped before the next comes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.backends.fsdp.attention import settings_left_out
from hybrid_engine.backends.fsdp.internals import allocate_modules, model_of_modules
from hybrid_engine.backends.fsdp.model_checks import set_epsilon_of_norms
from hybrid_engine.backends.fsdp.names import canonical_views, model_of_config
from hybrid_engine.backends.huggingface.safetensors_files import StoredTensor
from hybrid_engine.backends.huggingface.saving import Delivery, transfers_to_writers
from hybrid_engine.compute_check.probes import ProbeAnswer, ProbeLimits, following_log_probs
from hybrid_engine.errors import ModelError
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.layouts.sharded import Packed
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import Tensors
from hybrid_engine.switch.setup import gather_side

_PHASE = "computing with transformers' class"


class TransformersReference:
    """A transformers model with the weights of a trainer (`compute_check.probes.Probed`).

    Construction allocates no memory for weights.

    Args:
        directory: directory with the config.json.
        weights: the trainer's shards on this rank, unquantised.
        table: name table of the model.
        job: job of all trainers.
        dtype: dtype in which the trainer computes, e.g. "bfloat16".

    Raises:
        ConfigError, ParameterMismatchError: transformers has no class for the model, or one with
            other tensors.
        ModelError: it does not name the classes of its layers.
    """

    def __init__(
        self,
        directory: Path,
        weights: TrainingWeights,
        table: ModelTable,
        job: Job,
        dtype: str,
    ) -> None:
        self._directory = directory
        self._weights = weights
        self._table = table
        self._job = job
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._config = _LayeredModel(directory, self._dtype, table).model.config

    def probe_limits(self) -> ProbeLimits:
        longest = getattr(self._config, "max_position_embeddings", None)
        return ProbeLimits(max_length=longest, vocab_size=self._table.dims.vocab_size)

    def computed_settings(self) -> HfConfig:
        settings: dict[str, Any] = self._config.to_dict()
        return settings

    @torch.no_grad()
    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        """Compute log-probabilities of `tokens` [B, L] on rank 0; all ranks return them.

        Collective. Parameters must be on the device.
        """
        job = self._job
        with job.agreement.phase(_PHASE):
            model = _LayeredModel(self._directory, self._dtype, self._table)
        rows: list[list[float]] = []
        failure: Exception | None = None
        with ExitStack() as stack:
            parts = _Parts(model.parts, self._weights, self._table, job, stack)
            if job.rank == 0:
                try:
                    logits = model.compute(tokens.to(job.device), parts.bring)
                    vocab_size = self._table.dims.vocab_size
                    rows = following_log_probs(logits, tokens, vocab_size).tolist()
                except Exception as error:
                    # All ranks raise a failure to bring tensors. Any other is raised below, because
                    # the other ranks still send.
                    if parts.is_broken:
                        raise
                    failure = error
            # Also on rank 0 after a failure: the other ranks send all parts, and would wait for it.
            while parts.left:
                parts.bring()
        with job.agreement.phase(_PHASE):
            if failure is not None:
                raise failure
        # Only the first rank has an answer.
        answer, *_ = job.agreement.gather(rows, list[list[float]], _PHASE)
        return ProbeAnswer(torch.tensor(answer, dtype=torch.float32), self._dtype)


class _LayeredModel:
    """A transformers model on the meta device whose layers get memory one after another.

    Attributes:
        model: the model.
        parts: names of the canonical tensors outside of the layers, and of each layer.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, table: ModelTable) -> None:
        self.model = model_of_config(directory, dtype=dtype).eval()
        set_epsilon_of_norms(self.model)
        # Eager attention honours all settings of a model.
        if settings_left_out(self.model, self.model.config._attn_implementation):
            self.model.set_attn_implementation("eager")
        classes = set(self.model._no_split_modules or ())
        prefixes = {
            f"{name}.": module
            for name, module in self.model.named_modules()
            if type(module).__name__ in classes
        }
        if not prefixes:
            raise ModelError(
                f"{type(self.model).__name__} does not name the classes of its layers "
                "(_no_split_modules)",
                code="unknown-layer-classes",
            )
        decoder = set(self.model.get_decoder().modules())
        self._layers = [module for module in prefixes.values() if module in decoder]
        tensors = self.model.state_dict(keep_vars=True)
        self._views: Mapping[str, Packed] = canonical_views(self.model, tensors, table)
        self.parts: list[list[str]] = [[] for _ in range(len(self._layers) + 1)]
        numbers = {layer: number for number, layer in enumerate(self._layers, 1)}
        for name, packed in self._views.items():
            layers = [
                layer for prefix, layer in prefixes.items() if packed.parameter.startswith(prefix)
            ]
            # 0: outside of any layer. None: in a layer that is none of the decoder's.
            number = numbers.get(layers[0]) if layers else 0
            # Layers of a tower for images see no tokens.
            if number is not None:
                self.parts[number].append(name)

    def compute(self, tokens: torch.Tensor, bring: Callable[[], Tensors]) -> torch.Tensor:
        """Return the logits of `tokens` [B, L] on their device.

        `bring`: returns the tensors of the next of `parts`.
        """
        owners = model_of_modules(self.model)

        def fill(modules: Sequence[torch.nn.Module]) -> None:
            allocate_modules(modules, owners, tokens.device)
            for name, tensor in bring().items():
                packed = self._views[name]
                path, _, attribute = packed.parameter.rpartition(".")
                parameter = getattr(self.model.get_submodule(path), attribute)
                if parameter.is_meta:
                    raise ModelError(
                        f"{name} came before its layer: transformers runs the layers of this model "
                        "in another order",
                        code="other-order-of-layers",
                    )
                view = packed.view
                parameter.as_strided(view.shape, view.strides, view.offset).copy_(tensor)

        layered = {module for layer in self._layers for module in layer.modules()}
        fill([module for module in self.model.modules() if module not in layered])
        for layer in self._layers:
            layer.register_forward_pre_hook(lambda layer, _: fill([*layer.modules()]))
            layer.register_forward_hook(_drop)
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


def _drop(layer: torch.nn.Module, *_: object) -> None:
    """Free a layer's memory (a forward hook)."""
    layer.to("meta")


class _Parts:
    """Canonical tensors of one part of a model after another, brought to rank 0.

    Args:
        parts: names of the tensors of each part.
        weights: this rank's shards.
        table: name table of the model.
        job: job of all ranks.
        stack: ends the connections.

    Attributes:
        left: the parts that have not been brought.
        is_broken: the last part could not be brought, on all ranks.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[str]],
        weights: TrainingWeights,
        table: ModelTable,
        job: Job,
        stack: ExitStack,
    ) -> None:
        self.left = list(parts)
        self.is_broken = False
        self._job = job
        with job.agreement.phase(_PHASE):
            weights.prepare()
        source = gather_side(job, weights)
        with job.agreement.phase(_PHASE):
            dtypes = source.holdings.dtypes
            stored = {
                name: StoredTensor("", table.shapes[name], dtypes[name])
                for part in parts
                for name in part
            }
            # transformers' classes have no layers for multi-token prediction.
            transfers = transfers_to_writers(
                source, stored, dict.fromkeys(stored, 0), {}, job, may_stay_unread=table.shapes
            )
            buffers = weights.buffers()
        self._delivery = Delivery(stored, transfers, buffers, job, stack)

    def bring(self) -> Tensors:
        """Return the tensors of the next part on rank 0, on the host. Collective."""
        names = self.left.pop(0)
        self.is_broken = True
        with self._job.agreement.phase(_PHASE, SHORT_PATIENCE):
            tensors = {name: self._delivery.bring(name) for name in names}
        self.is_broken = False
        return tensors
