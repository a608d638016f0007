"""The reference and the critic: models that share the actor's devices.

    models.py       `ReferenceModel`, a frozen copy of the actor, and `ValueModel`, PPO's critic;
                    their state is on the device only while they compute
    advantages.py   advantages from rewards and values, and the critic's loss, as PPO defines them

    with worker.rollout_context():     vLLM's weights
        ...
    with critic.train_context():       state IDLE: the actor and vLLM's weights are offloaded
        ...                            the critic is onloaded, and offloaded at the end
    with worker.train_context():       the actor's parameters, gradients and optimizer state

The memory of each phase is planned before anything is built (layouts/memory.py), and measured.
"""

from hybrid_engine.trainer.reference_and_critic.advantages import (
    explained_variance,
    generalized_advantages,
    value_loss,
)
from hybrid_engine.trainer.reference_and_critic.models import ReferenceModel, ValueModel

__all__ = [
    "ReferenceModel",
    "ValueModel",
    "explained_variance",
    "generalized_advantages",
    "value_loss",
]
