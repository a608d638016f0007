"""Which configurations of Megatron a switch was reviewed for, and what becomes of those that nobody has looked at.

    reviewed.yaml ──> verdicts ──> guard: what of a live configuration is refused, and why
                          │          └── settings: every field of the live objects, with value and default
                          └─────> comparison: what a version has that the list lacks
                                     └── sources: the fields that a version declares; it need not be importable

A field that is not in the list is refused unless it has Megatron's own default. Fields of the verdict "function" are
accepted here; who knows what the model should compute compares them (`function_fields`).
`python -m megatron_patches review` prints what has to be added for a new version.
"""

from megatron_patches.review.guard import ALLOW, Refusal, function_fields, refusals
from megatron_patches.review.settings import Setting, argument_settings, live_settings

__all__ = ["ALLOW", "Refusal", "Setting", "argument_settings", "function_fields", "live_settings", "refusals"]
