"""Training state of an FSDP2 trainer, as checkpoints have it (trainer/training_checkpoint.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from hybrid_engine.layouts.sharded import held_boxes
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import Tensors
from hybrid_engine.records.layout import BufferId, Place, Shard
from hybrid_engine.records.regions import Region, Shapes, StridedView, contiguous_strides
from hybrid_engine.trainer.canonical_state import Weight
from hybrid_engine.trainer.checkpoint_directory import generator_states, restore_generators
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine


class FsdpState:
    """State of an FSDP2 trainer on this rank (port `CheckpointedState`).

    Args:
        engine: of the trainer.
        job: of all ranks.
    """

    def __init__(self, engine: FsdpTrainEngine, job: Job) -> None:
        self._engine = engine
        self._job = job

    @cached_property
    def _views(self) -> Mapping[str, Mapping[str, StridedView]]:
        """Name of a parameter or buffer -> canonical tensors in it, as views of the whole.

        A tensor that no checkpoint of Hugging Face has, such as LoRA's, has its own name.
        """
        weights = self._engine.model.weights
        views: defaultdict[str, dict[str, StridedView]] = defaultdict(dict)
        for name, packed in weights.packed.items():
            views[packed.parameter][name] = packed.view
        tensors = weights.tensors.tensors
        # Of names that share a tensor the first stays: reversed, it is written last.
        first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
        for name in first_names.values():
            shape = tuple(tensors[name].shape)
            whole = StridedView(0, shape, contiguous_strides(shape))
            views.setdefault(name, {name: whole})
        return views

    @cached_property
    def shapes(self) -> Shapes:
        return {name: view.shape for views in self._views.values() for name, view in views.items()}

    @property
    def version(self) -> int:
        return self._engine.model.version

    def settle(self) -> None:
        self._engine.model.guard(KINDS)
        self._engine.model.weights.finish_pending()

    def weights(self) -> list[Weight]:
        tensors = self._engine.model.weights.tensors
        optimizer = self._engine.optimizer.inner
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        weights = []
        for name, views in self._views.items():
            tensor = tensors.tensors[name]
            part = tensors.parts[name]
            shards = []
            for canonical, view in views.items():
                for box in held_boxes(view, tuple(tensor.shape), part):
                    region = Region(canonical, box.offsets, box.lengths)
                    place = Place(BufferId(0, ""), box.start - part.start, box.strides)
                    shards.append(Shard(region, place))
            is_stepped = id(tensor) in stepped
            weights.append(
                Weight(
                    name,
                    tensor,
                    list(views),
                    shards,
                    tensor if is_stepped else None,
                    optimizer=optimizer if is_stepped else None,
                )
            )
        return weights

    def layout(self) -> dict[str, int | str]:
        return {"trainer": "FSDP2", "world_size": self._job.world_size}

    def generators(self) -> dict[str, torch.Tensor]:
        return generator_states()

    def values(self) -> dict[str, Any]:
        return {
            "adapters": self._engine.model.weights.scalings,
            "grad_scaler": None,
            "norms_minus_one": False,
            "num_scheduled_updates": self._engine.optimizer.num_scheduled_updates,
        }

    def restore(self, values: Mapping[str, Any], generators: Tensors) -> None:
        engine = self._engine
        restore_generators(generators)
        engine.model.resume_version(engine.optimizer.inner, values["weight_version"])
        engine.optimizer.resume_schedule(values["num_scheduled_updates"])
