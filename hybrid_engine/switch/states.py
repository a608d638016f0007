"""The states of the devices, and what each needs there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS, Kind


class State(StrEnum):
    """What the devices are ready for."""

    TRAIN = "train"
    FORWARD = "forward"
    INFER = "infer"
    IDLE = "idle"
    INTERRUPTED = "interrupted"
    """A switch is under way, or did not end: where things are is known to the next one alone."""

    @property
    def context(self) -> str:
        """What a user enters to be in it."""
        return {"infer": "rollout_context", "idle": "the context of a model beside the actor"}.get(
            self, f"{self.value}_context"
        )


NEEDED_KINDS: Mapping[State, frozenset[Kind]] = {
    State.TRAIN: frozenset(KINDS),
    State.FORWARD: frozenset({"param"}),
    State.INFER: frozenset(),
    State.IDLE: frozenset(),
    State.INTERRUPTED: frozenset(),
}
"""State -> kinds of training state that are on the device in it, whatever the configuration offloads."""


def resident_kinds(state: State, config: GenerateConfig) -> set[Kind]:
    """Kinds of training state on the device in `state`: those it needs, and those never offloaded."""
    flags: dict[Kind, bool] = {
        "param": config.offload_train_param,
        "grad": config.offload_train_grad,
        "optimizer": config.offload_train_optimizer,
    }
    return {kind for kind, offloads in flags.items() if kind in NEEDED_KINDS[state] or not offloads}


def require(present: State, wanted: Collection[State]) -> None:
    """Raise StateError unless the present state is one of these."""
    if present not in wanted:
        contexts = " or ".join(state.context for state in wanted)
        # neither is only of a context: they are what a failure leaves, too
        here = "" if present in (State.IDLE, State.INTERRUPTED) else f" ({present.context})"
        raise StateError(f"the engine is in state {present.value}{here}; call this in {contexts}")
