"""Models beside the actor, on the same devices.

    companion.py    how such a model takes the device to itself, and leaves it: `ReferenceModel`, a frozen copy of the
                    actor, and `ValueModel`, the critic of PPO
    advantages.py   what PPO makes of rewards and values: advantages, and the critic's loss

    with worker.rollout_context():     vLLM's weights
        ...
    with critic.train_context():       state IDLE: the actor and vLLM's weights leave; the critic comes, and leaves
        ...
    with worker.train_context():       the actor's parameters, gradients and optimizer state

What that takes in each phase is planned before anything is built (layouts/memory.py), and measured.
"""

from hybrid_engine.trainer.companions.advantages import explained_variance, generalized_advantages, value_loss
from hybrid_engine.trainer.companions.companion import ReferenceModel, ValueModel

__all__ = ["ReferenceModel", "ValueModel", "explained_variance", "generalized_advantages", "value_loss"]
