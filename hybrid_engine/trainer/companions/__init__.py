"""Models beside the actor, on the same devices.

    reference_model.py   `ReferenceModel`: a frozen copy of the actor, off the device except while it scores
    value_model.py       `ValueModel`: the critic of PPO
    advantages.py        what PPO makes of rewards and values: advantages, and the critic's loss
    companion.py         how such a model takes the device to itself, and leaves it

    with worker.rollout_context():     vLLM's weights
        ...
    with critic.train_context():       state IDLE: the actor and vLLM's weights leave; the critic comes, and leaves
        ...
    with worker.train_context():       the actor's parameters, gradients and optimizer state

What that takes in each phase is planned before anything is built (layouts/memory_plan.py), and measured.
"""

from hybrid_engine.trainer.companions.advantages import explained_variance, generalized_advantages, value_loss
from hybrid_engine.trainer.companions.reference_model import ReferenceModel
from hybrid_engine.trainer.companions.value_model import ValueModel

__all__ = ["ReferenceModel", "ValueModel", "explained_variance", "generalized_advantages", "value_loss"]
