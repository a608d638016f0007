"""What makes a configuration impossible: all rules, each with what is wrong and what to do about it.

Every rule is checked before a process group exists, and all findings are reported at once. docs/constraints.md is made
from these tables (`make docs`), and every rule has a test that breaks it.
"""

from __future__ import annotations

from hybrid_engine.config.critic_rules import CRITIC, WITH_FSDP
from hybrid_engine.config.engine_argument_rules import ENGINE_ARGUMENTS
from hybrid_engine.config.fsdp_rules import FSDP
from hybrid_engine.config.inference_rules import INFERENCE
from hybrid_engine.config.override_rules import MEGATRON_TRAINS
from hybrid_engine.config.rules import Constraint, JobContext, TrainingContext
from hybrid_engine.config.step_rules import ANY_TRAINER
from hybrid_engine.errors import Violation

GENERATES = (*INFERENCE, *ENGINE_ARGUMENTS)
CONSTRAINTS = (*ANY_TRAINER, *MEGATRON_TRAINS, *FSDP, *GENERATES, *WITH_FSDP, *CRITIC)


def training_rules(context: TrainingContext) -> list[Constraint[TrainingContext]]:
    """Those of the trainer that is configured."""
    return [*ANY_TRAINER, *(MEGATRON_TRAINS if context.actor.fsdp is None else FSDP)]


def broken_rules(context: TrainingContext, *, weights_only: bool = False, own_loop: bool = False) -> list[Violation]:
    """What breaks the rules: those of training and, for a `JobContext`, those of inference.

    Args:
        context: what they look at.
        weights_only: the training model holds weights and need not compute, as for a check of the switch alone.
        own_loop: the caller's model and loop compute, as Megatron's own scripts do.
    """
    skipped = ("here", "anywhere") if weights_only else ("here",) if own_loop else ()
    rules = [rule for rule in training_rules(context) if rule.computing not in skipped]
    found = [found for rule in rules for found in rule.find(context)]
    if isinstance(context, JobContext):
        found += [found for rule in GENERATES for found in rule.find(context)]
    return found
