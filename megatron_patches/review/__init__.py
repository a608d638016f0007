"""Fields of Megatron's configuration that move weights or memory, or change what is computed; every other field passes.

    fields.py   the list: REFUSED, FUNCTION_FIELDS, READ_OFF_THE_MODEL; and `declared_fields` of the imported version
    guard.py    what of live objects, or of a script's arguments, is refused, and why

Fields of FUNCTION_FIELDS are accepted here; who knows what the model should compute compares them.
"""

from megatron_patches.review.fields import FUNCTION_FIELDS, READ_OFF_THE_MODEL, REFUSED, Refused, declared_fields
from megatron_patches.review.guard import Refusal, argument_refusals, live_refusals, refusal

__all__ = [
    "FUNCTION_FIELDS",
    "READ_OFF_THE_MODEL",
    "REFUSED",
    "Refusal",
    "Refused",
    "argument_refusals",
    "declared_fields",
    "live_refusals",
    "refusal",
]
