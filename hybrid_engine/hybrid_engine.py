"""`HybridEngine`: one object that trains and generates in turn with one set of weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hybrid_engine.config import HybridConfig
from hybrid_engine.memory.offloader import KINDS, MegatronOffloader
from hybrid_engine.ports import InferenceWeights
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.sharding_manager import ShardingManager, State

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.live_model import LiveModel
    from hybrid_engine.backends.vllm import InferenceEngine


class HybridEngine:
    """Switches a Megatron model and a vLLM engine that share their devices.

    For teams that have built both. `ActorHybridWorker` builds them from a configuration and adds rollouts and updates.

    Args:
        train: the model that is trained; a `TrainEngine`, or a `LiveModel` where somebody else's loop trains.
        inference: an `InferenceEngine`.
        config: the checked configuration.
        offloader: of the training engine's state; made here when there is none.
        agreement: of all ranks; made here when there is none.
        weights: what is written at a switch; default: the inference engine's weights alone.

    All methods are collective. Example, as an RL loop uses it:

        with engine.rollout_context():
            completions = engine.inference.generate(prompts, sampling)
        with engine.train_context():
            engine.train.train_step(batch, loss_function)

    Training and scoring outside these contexts, on memory that was given away, raise StateError.
    """

    def __init__(
        self,
        train: LiveModel,
        inference: InferenceEngine,
        config: HybridConfig,
        offloader: MegatronOffloader | None = None,
        agreement: Agreement | None = None,
        weights: InferenceWeights | None = None,
    ) -> None:
        self.train = train
        self.inference = inference
        self.sharding = ShardingManager(
            training=train.weights,
            inference=weights or inference.adaptor,
            caches=inference,
            offloader=offloader or MegatronOffloader(train.offload_items, reachable=train.reachable_tensors),
            version=lambda: train.version,
            config=config.generate_config,
            agreement=agreement,
            unserved=train.unserved,
        )
        # weak: the switch refers to the model, whose hooks in autograd Python's collector does not see through
        require_kinds = weakref.WeakMethod(self.sharding.require_kinds)
        train.guard = lambda kinds: (require := require_kinds()) and require(kinds)

    def rollout_context(self) -> AbstractContextManager[None]:
        """Generate inside: weights are resharded into vLLM, training state is off the device as configured."""
        return self.sharding.entered(State.INFER)

    def train_context(self) -> AbstractContextManager[None]:
        """Train inside: parameters, gradients and optimizer state are on the device, vLLM's weights are released."""
        return self.sharding.entered(State.TRAIN)

    def forward_context(self) -> AbstractContextManager[None]:
        """Score inside: only parameters need to be on the device."""
        return self.sharding.entered(State.FORWARD)

    def prefetch(self, kinds: Iterable[str] = KINDS) -> None:
        """In a rollout: begin to bring training state back; see `ShardingManager.prefetch`."""
        self.sharding.prefetch(kinds)

    def on_reshard_start(self, hook: Callable[[State, State], None]) -> Callable[[State, State], None]:
        """Decorator: call `hook(from_state, to_state)` before every switch."""
        return self.sharding.on_reshard_start(hook)

    def on_reshard_end(self, hook: Callable[[ReshardReport], None]) -> Callable[[ReshardReport], None]:
        """Decorator: call `hook(report)` after every successful switch."""
        return self.sharding.on_reshard_end(hook)
