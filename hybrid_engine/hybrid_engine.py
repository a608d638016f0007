"""`HybridEngine`: one object that trains and generates in turn with one set of weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from hybrid_engine.config import HybridConfig
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import InferenceWeights, Trainer
from hybrid_engine.records.layout import Layout
from hybrid_engine.switch.contexts import SwitchContexts
from hybrid_engine.switch.sharding_manager import ShardingManager

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import InferenceEngine

TrainerT = TypeVar("TrainerT", bound=Trainer)


class HybridEngine(SwitchContexts, Generic[TrainerT]):
    """Switches a trainer and a vLLM engine that share their devices.

    For teams that have built both. `ActorHybridWorker` builds them from a configuration and adds rollouts and updates.

    Args:
        train: whoever trains: a `TrainEngine`, a `LiveModel` where somebody else's loop trains Megatron's model, or
            another `ports.Trainer`.
        inference: an `InferenceEngine`; the switch is one of its job.
        config: the checked configuration.
        offloader: of the trainer's state; made here when there is none.
        weights: what is written at a switch; default: the inference engine's weights alone.
        training_layouts: of all ranks, where they are known (`rendezvous.gather_layouts`).

    All methods are collective. Example, as an RL loop uses it:

        with engine.rollout_context():
            completions = engine.inference.generate(prompts, sampling)
        with engine.train_context():
            engine.train.train_step(batch, loss_function)

    Training and scoring outside these contexts, on memory that was given away, raise StateError.
    """

    def __init__(
        self,
        train: TrainerT,
        inference: InferenceEngine,
        config: HybridConfig,
        *,
        offloader: Offloader | None = None,
        weights: InferenceWeights | None = None,
        training_layouts: Sequence[Layout] | None = None,
    ) -> None:
        self.train = train
        self.inference = inference
        self.sharding = ShardingManager(
            trainer=train,
            inference=weights or inference.adaptor,
            caches=inference,
            offloader=offloader or Offloader(train.offload_items, reachable=train.reachable_tensors),
            config=config.generate_config,
            job=inference.job,
            training_layouts=training_layouts,
        )
        # weak: the switch refers to the model, whose hooks in autograd Python's collector does not see through
        require_kinds = weakref.WeakMethod(self.sharding.require_kinds)
        train.guard = lambda kinds: (require := require_kinds()) and require(kinds)
