"""Rules of how a training step is computed: Megatron's recomputation, and the learning-rate schedule of any trainer."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_engine.config.optimizer_keys import OptimizerConfig
from hybrid_engine.config.rules import Constraint, TrainingContext
from hybrid_engine.config.training_rules import TRAINING
from hybrid_engine.errors import Violation
from hybrid_engine.layouts.stages import chunks_of, split_violations

_GRANULARITY = "actor_config.recompute_granularity"
_OF_EXPERTS = ("moe", "moe_act", "shared_experts")


def _recomputation(context: TrainingContext) -> Iterator[Violation]:
    actor = context.actor
    method, num_layers, modules = actor.recompute_method, actor.recompute_num_layers, actor.recompute_modules
    given = {"recompute_method": method, "recompute_num_layers": num_layers, "recompute_modules": modules}
    goes_with = {
        None: (),
        "full": ("recompute_method", "recompute_num_layers"),
        "selective": ("recompute_modules",),
    }[actor.recompute_granularity]
    for key, value in given.items():
        if value is not None and key not in goes_with:
            problem = f"it has no meaning where recompute_granularity is {actor.recompute_granularity or 'left out'}"
            wanted = "selective" if key == "recompute_modules" else "full"
            yield Violation(f"actor_config.{key}", problem, f"Leave it out, or set recompute_granularity to {wanted}")
    if actor.recompute_granularity == "full":
        for key in goes_with:
            if given[key] is None:
                remedy = "Use uniform or block" if key == "recompute_method" else "Use 1 or more"
                yield Violation(f"actor_config.{key}", "recompute_granularity full needs it", remedy)


def _uniform_groups(context: TrainingContext) -> Iterator[Violation]:
    """Megatron-core runs past the last layer of a chunk otherwise."""
    actor, sizes, dims = context.actor, context.train_sizes, context.table.dims
    if actor.recompute_method != "uniform" or actor.recompute_num_layers is None:
        return
    if any(split_violations(sizes, dims.num_layers, dims.num_mtp_layers)):
        return
    chunks = chunks_of(sizes, dims.num_layers, dims.num_mtp_layers)
    uneven = sorted({length for chunk in chunks if (length := len(chunk.positions)) % actor.recompute_num_layers})
    if uneven:
        problem = f"{actor.recompute_num_layers} does not divide a chunk of {', '.join(map(str, uneven))} layers"
        yield Violation("actor_config.recompute_num_layers", problem, "Use a divisor, or recompute_method block")


def _recomputed_modules(context: TrainingContext) -> Iterator[Violation]:
    settings, lacking = context.table.transformer, {}
    if not settings.get("multi_latent_attention"):
        lacking["mla_up_proj"] = "latent attention"
    if not context.table.dims.num_experts:
        lacking |= dict.fromkeys(_OF_EXPERTS, "experts")
    elif not settings.get("moe_shared_expert_intermediate_size"):
        lacking["shared_experts"] = "shared experts"
    for module in context.actor.recompute_modules or ():
        if module in lacking:
            problem = f"{module}, but the model has no {lacking[module]}"
            yield Violation("actor_config.recompute_modules", problem, "Leave it out")


RECOMPUTATION: list[Constraint[TrainingContext]] = [
    Constraint(
        _GRANULARITY,
        "recompute_granularity full needs recompute_method and recompute_num_layers; recompute_modules go with "
        "selective.",
        _recomputation,
    ),
    Constraint(
        "actor_config.recompute_num_layers",
        "With recompute_method uniform, recompute_num_layers divides the layers of every chunk.",
        _uniform_groups,
    ),
    Constraint(
        "actor_config.recompute_modules", "recompute_modules are parts that the model has.", _recomputed_modules
    ),
]


def _schedule(context: TrainingContext) -> Iterator[Violation]:
    optimizer = context.actor.optimizer
    if optimizer.schedule is not None:
        for key, problem, remedy in (*_learning_rate_findings(optimizer), *_weight_decay_findings(optimizer)):
            yield Violation(f"actor_config.optimizer.schedule.{key}", problem, remedy)


_Finding = tuple[str, str, str]
"""Key, what is wrong, and what to do about it."""


def _learning_rate_findings(optimizer: OptimizerConfig) -> Iterator[_Finding]:
    schedule = optimizer.schedule
    assert schedule is not None
    style, num_steps = schedule.lr_decay_style, schedule.lr_decay_steps
    for key in ("lr_warmup_init", "min_lr"):
        if (rate := getattr(schedule, key)) > optimizer.lr:
            yield key, f"{rate} is above the learning rate {optimizer.lr}", "Use at most optimizer.lr"
    if style == "constant" and schedule.min_lr:
        yield "min_lr", f"{schedule.min_lr}, but a constant learning rate does not come down", "Leave it out"
    if style != "constant" and num_steps is None:
        yield "lr_decay_steps", f"lr_decay_style {style} needs it", "Set the number of updates of the whole run"
    if schedule.lr_warmup_fraction is not None:
        if schedule.lr_warmup_steps:
            yield "lr_warmup_fraction", "lr_warmup_steps says it, too", "Use one of them"
        if num_steps is None:
            yield "lr_warmup_fraction", "it is a share of lr_decay_steps, which is not set", "Use lr_warmup_steps"
    if num_steps is not None and schedule.num_warmup_steps >= num_steps:
        problem = f"{schedule.num_warmup_steps} updates of warm-up leave none of {num_steps}"
        yield "lr_warmup_steps", problem, "Use fewer, or raise lr_decay_steps"
    num_wsd = schedule.lr_wsd_decay_steps
    if (style == "WSD") != (num_wsd is not None):
        problem = "WSD needs it" if num_wsd is None else f"{num_wsd}, but lr_decay_style is {style}"
        yield "lr_wsd_decay_steps", problem, "Set both or neither"
    elif num_wsd and num_steps and num_wsd > num_steps - schedule.num_warmup_steps:
        problem = f"{num_wsd} updates of decay and {schedule.num_warmup_steps} of warm-up are more than {num_steps}"
        yield "lr_wsd_decay_steps", problem, "Use fewer, or raise lr_decay_steps"


def _weight_decay_findings(optimizer: OptimizerConfig) -> Iterator[_Finding]:
    schedule = optimizer.schedule
    assert schedule is not None
    start, end, style = *optimizer.weight_decays, schedule.weight_decay_incr_style
    if end < start:
        yield "end_weight_decay", f"{end} is below the {start} of the first update", "Use at least start_weight_decay"
    if style == "constant" and start != end:
        problem = f"constant, but weight decay is to grow from {start} to {end}"
        yield "weight_decay_incr_style", problem, "Use linear or cosine"
    if style != "constant" and schedule.num_weight_decay_steps is None:
        yield "weight_decay_incr_steps", f"weight_decay_incr_style {style} needs it", "Set it, or lr_decay_steps"


SCHEDULE: list[Constraint[TrainingContext]] = [
    Constraint(
        "actor_config.optimizer.schedule",
        "A schedule's warm-up and decays fit into lr_decay_steps; no learning rate is above optimizer.lr; weight decay "
        "does not fall.",
        _schedule,
    ),
]
ANY_TRAINER = (*TRAINING, *SCHEDULE)
"""All rules of `actor_config` that are any trainer's."""
