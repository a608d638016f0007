"""Models beside the actor, on the same devices.

reference_model.py   `ReferenceModel`: a frozen copy of the actor, off the device except while it scores
"""

from hybrid_engine.companions.reference_model import ReferenceModel

__all__ = ["ReferenceModel"]
