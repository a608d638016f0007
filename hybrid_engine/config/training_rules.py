"""Rules of `actor_config` and the model: every trainer, Megatron with its overrides, FSDP2."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import sys
from typing import TYPE_CHECKING

from hybrid_engine.config.keys import (
    ActorConfig,
    FsdpConfig,
    OptimizerConfig,
    ScheduleConfig,
    Section,
)
from hybrid_engine.config.override_rules import OVERRIDES
from hybrid_engine.config.rules import Constraint, TrainingContext, constraint, size_constraints
from hybrid_engine.errors import Violation, Violations, shortened
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.parameters import linear_modules, parameters_of
from hybrid_engine.layouts.size_rules import TRAIN_RULES
from hybrid_engine.layouts.stages import chunks_of, split_violations

if TYPE_CHECKING:
    pass

TRAINING: list[Constraint[TrainingContext]] = []
"""Rules for every trainer."""
MEGATRON: list[Constraint[TrainingContext]] = []
"""Rules for training with Megatron."""
FSDP: list[Constraint[TrainingContext]] = []
"""Rules for training with FSDP2."""


@constraint(
    MEGATRON,
    "model",
    "build_model() implements every feature that config.json enables.",
    computing="here",
)
def _model_is_built(context: TrainingContext) -> Violations:
    for feature in context.table.not_built:
        yield Violation(
            "model",
            f"{feature} is not implemented by build_model()",
            "Pass your own Megatron model",
            code="not-built",
        )


@constraint(
    MEGATRON,
    "actor_config.hybrid_layer_pattern",
    "A HybridModel consists of Megatron's own layers, without windows, soft caps and post norms.",
    computing="here",
)
def _hybrid_model_is_built(context: TrainingContext) -> Violations:
    has_pattern = context.train_sizes.hybrid_layer_pattern is not None
    if has_pattern and context.table.layer_spec != "default":
        yield Violation(
            "actor_config.hybrid_layer_pattern",
            "the model's layers have parts that Megatron's own layers lack",
            "Leave it out, or pass your own model",
            code="not-built",
        )


MEGATRON += size_constraints(
    "actor_config",
    TrainParallelism,
    TRAIN_RULES,
    lambda context: context.train_sizes,
)


@constraint(
    MEGATRON,
    "actor_config.expert_tensor_parallel_size",
    "ETP is TP where EP is 1: megatron-core before 0.19 would sum "
    "the experts' gradients over the wrong ranks.",
    computing="anywhere",
)
def _expert_tensor_alone(context: TrainingContext) -> Violations:
    sizes = context.train_sizes
    if not context.table.dims.num_experts or sizes.expert != 1:
        return
    if sizes.expert_cut == sizes.tensor:
        return
    version = _megatron_core_version()
    if version and tuple(map(int, version.split(".")[:2])) < (0, 19):
        yield Violation(
            "actor_config.expert_tensor_parallel_size",
            f"{sizes.expert_cut} with TP {sizes.tensor} and EP 1: replicas of the experts would "
            f"diverge with megatron-core {version}",
            "Leave it out, raise EP, or install megatron-core 0.19",
            code="experts-would-diverge",
        )


def _megatron_core_version() -> str:
    """Return the version of megatron-core, imported or else installed; "" without it."""
    core = sys.modules.get("megatron.core")
    if core is not None:
        return core.__version__
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


@constraint(
    MEGATRON,
    "actor_config.pipeline_model_parallel_layout",
    "With tied embeddings, MTP layers must be on the last pipeline stage: "
    "Megatron keeps only two copies equal.",
)
def _tied_mtp_layers(context: TrainingContext) -> Violations:
    sizes = context.train_sizes
    dims = context.table.dims
    if sizes.pipeline_layout is None or not dims.tied_embeddings:
        return
    if any(split_violations(sizes, dims.num_layers, dims.num_mtp_layers)):
        return  # other rules report an impossible split
    chunks = chunks_of(sizes, dims.num_layers, dims.num_mtp_layers)
    stages_with_mtp = {chunk.stage for chunk in chunks if chunk.has_mtp}
    if stages_with_mtp - {sizes.pipeline - 1}:
        yield Violation(
            "actor_config.pipeline_model_parallel_layout",
            f"{sizes.pipeline_layout}: the embedding is tied, "
            "and MTP layers are not on the last pipeline stage",
            "Move them to the last stage",
            code="mtp-not-on-last-stage",
        )


@constraint(
    MEGATRON,
    "actor_config.context_parallel_size",
    "CP is 1 where TrainEngine trains; Megatron's own training loop may use more.",
    computing="here",
)
def _context_parallel(context: TrainingContext) -> Violations:
    cp = context.train_sizes.context
    if cp > 1:
        yield Violation(
            "actor_config.context_parallel_size",
            f"{cp}: TrainEngine does not split sequences over ranks",
            "Use 1, or train with Megatron's own loop",
            code="not-supported",
        )


@constraint(MEGATRON, "actor_config.sequence_parallel", "Sequence parallelism needs TP > 1.")
def _sequence_parallel(context: TrainingContext) -> Violations:
    if context.actor.sequence_parallel and context.train_sizes.tensor == 1:
        yield Violation(
            "actor_config.sequence_parallel",
            "needs tensor parallelism",
            "Set it to false or raise TP",
            code="needs-tensor-parallelism",
        )


@constraint(
    MEGATRON,
    "actor_config.sequence_parallel",
    "Training experts with TP > 1 needs sequence parallelism.",
    computing="here",
)
def _sequence_parallel_of_experts(context: TrainingContext) -> Violations:
    tp = context.train_sizes.tensor
    if context.table.dims.num_experts and tp > 1 and not context.actor.sequence_parallel:
        yield Violation(
            "actor_config.sequence_parallel",
            f"false with TP {tp}: megatron-core needs it to train experts with tensor parallelism",
            "Set it to true, or TP to 1",
            code="needed-for-experts",
        )


@constraint(MEGATRON, "actor_config.seq_length", "With sequence parallelism, seq_length % TP == 0.")
def _sequence_length(context: TrainingContext) -> Violations:
    if not context.actor.sequence_parallel:
        return
    tp = context.train_sizes.tensor
    length = context.actor.seq_length
    if length % tp:
        yield Violation(
            "actor_config.seq_length",
            f"{tp} does not divide the sequence length {length}",
            "Use a multiple of TP",
            code="not-divisible",
        )


@constraint(
    TRAINING,
    "actor_config.seq_length",
    "seq_length is at most the number of learned positions.",
)
def _learned_positions(context: TrainingContext) -> Violations:
    positions = context.table.gpt.get("max_sequence_length")
    if positions is not None and context.actor.seq_length > positions:
        yield Violation(
            "actor_config.seq_length",
            f"{context.actor.seq_length}, but the model has {positions} positions",
            f"Use at most {positions}",
            code="above-learned-positions",
        )


@constraint(
    MEGATRON,
    "actor_config.frozen_parameters",
    "Every pattern matches a parameter, by one of its names in megatron-core's layer specs.",
)
def _frozen_parameters(context: TrainingContext) -> Violations:
    names = _parameter_names(context)
    patterns = context.actor.frozen_parameters
    unknown = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if unknown:
        yield Violation(
            "actor_config.frozen_parameters",
            f"no parameter matches {', '.join(unknown)}",
            f"Names look like {names[0]}, {names[-1]}",
            code="no-parameter-matches",
        )


@constraint(
    MEGATRON,
    "actor_config.frozen_parameters",
    "At least one trained parameter is not frozen.",
    computing="here",
)
def _frozen_all(context: TrainingContext) -> Violations:
    names = _parameter_names(context)
    patterns = context.actor.frozen_parameters
    if context.actor.lora is not None:
        names = [name for name in names if ".adapter." in name]
    if not patterns or not names:
        return
    trained = set(names)
    for pattern in patterns:
        trained.difference_update(fnmatch.filter(names, pattern))
    if not trained:
        yield Violation(
            "actor_config.frozen_parameters",
            f"{', '.join(patterns[:5])} would freeze every trained parameter",
            "Leave some out",
            code="nothing-is-trained",
        )


def _parameter_names(context: TrainingContext) -> list[str]:
    """Return all parameter names of any layer spec, with the checkpoint's layer and expert numbers.

    Empty unless parameters are to be frozen, because a model with many experts has very many names.
    """
    if not context.actor.frozen_parameters:
        return []
    table = context.table
    lora = context.actor.lora
    names = []
    for parameter in parameters_of(table):
        for name in table.rules[parameter.rule].names:
            is_of_expert = "{expert}" in name
            if name.startswith(parameter.location) and is_of_expert == parameter.is_expert:
                names.append(name.format(**parameter.indices))
    if lora is None:
        return names
    adapted = []
    for name in names:
        module = name.removesuffix(".weight")
        if module == name or module.rpartition(".")[2] not in lora.target_modules:
            adapted.append(name)
            continue
        # The adapter wraps its linear layer, so three names replace that of the weight.
        for part in ("to_wrap", "adapter.linear_in", "adapter.linear_out"):
            adapted.append(f"{module}.{part}.weight")
    return adapted


@constraint(
    MEGATRON,
    "actor_config.overlap_param_gather",
    "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce.",
)
def _overlapped_gather(context: TrainingContext) -> Violations:
    actor = context.actor
    if actor.overlap_param_gather and not actor.use_distributed_optimizer:
        yield Violation(
            "actor_config.overlap_param_gather",
            "only the distributed optimizer gathers parameters",
            "Set use_distributed_optimizer to true",
            code="needs-distributed-optimizer",
        )
    if actor.overlap_param_gather and not actor.overlap_grad_reduce:
        yield Violation(
            "actor_config.overlap_param_gather",
            "Megatron overlaps the gather only if it also overlaps the gradient reduction",
            "Set overlap_grad_reduce to true",
            code="needs-overlap-grad-reduce",
        )


@constraint(
    MEGATRON,
    "actor_config.lora",
    "target_modules are linear layers of the model.",
)
def _lora_targets(context: TrainingContext) -> Violations:
    if context.actor.lora is None:
        return
    modules = linear_modules(context.table)
    targets = context.actor.lora.target_modules
    unknown = [target for target in targets if target not in modules]
    if unknown:
        yield Violation(
            "actor_config.lora",
            f"target_modules {', '.join(unknown)}: "
            "Megatron has no linear layers of these names in this model",
            f"Use some of {', '.join(sorted(modules))}",
            code="unknown-target-modules",
        )
    if not targets:
        yield Violation(
            "actor_config.lora",
            "target_modules is empty: nothing would be trained",
            "Name some",
            code="nothing-is-trained",
        )


@constraint(
    MEGATRON,
    "actor_config.recompute_granularity",
    "recompute_granularity full needs recompute_method and recompute_num_layers; "
    "recompute_modules go with selective.",
)
def _recomputation(context: TrainingContext) -> Violations:
    actor = context.actor
    granularity = actor.recompute_granularity
    values: dict[str, object] = {
        "recompute_method": actor.recompute_method,
        "recompute_num_layers": actor.recompute_num_layers,
        "recompute_modules": actor.recompute_modules,
    }
    applicable: tuple[str, ...] = ()
    if granularity == "full":
        applicable = ("recompute_method", "recompute_num_layers")
    elif granularity == "selective":
        applicable = ("recompute_modules",)
    for key, value in values.items():
        if value is not None and key not in applicable:
            needed = "selective" if key == "recompute_modules" else "full"
            yield Violation(
                f"actor_config.{key}",
                f"has no effect with recompute_granularity {granularity or 'unset'}",
                f"Leave it out, or set recompute_granularity to {needed}",
                code="has-no-effect",
            )
    if granularity != "full":
        return
    for key in applicable:
        if values[key] is None:
            yield Violation(
                f"actor_config.{key}",
                "recompute_granularity full needs it",
                "Use uniform or block" if key == "recompute_method" else "Use 1 or more",
                code="is-needed",
            )


@constraint(
    MEGATRON,
    "actor_config.recompute_num_layers",
    "With recompute_method uniform, recompute_num_layers divides the layers of every chunk.",
)
def _uniform_groups(context: TrainingContext) -> Violations:
    group_size = context.actor.recompute_num_layers
    if context.actor.recompute_method != "uniform" or group_size is None:
        return
    sizes = context.train_sizes
    dims = context.table.dims
    if any(split_violations(sizes, dims.num_layers, dims.num_mtp_layers)):
        return  # other rules report an impossible split
    # With an incomplete last group, megatron-core would index past the last layer of the chunk.
    chunks = chunks_of(sizes, dims.num_layers, dims.num_mtp_layers)
    lengths = {len(chunk.positions) for chunk in chunks}
    uneven = sorted(length for length in lengths if length % group_size)
    if uneven:
        yield Violation(
            "actor_config.recompute_num_layers",
            f"{group_size} does not divide a chunk of {', '.join(map(str, uneven))} layers",
            "Use a divisor, or recompute_method block",
            code="not-divisible",
        )


@constraint(
    MEGATRON,
    "actor_config.recompute_modules",
    "recompute_modules are parts that the model has.",
)
def _recomputed_modules(context: TrainingContext) -> Violations:
    settings = context.table.sizes
    lacking = {}
    if not settings.get("multi_latent_attention"):
        lacking["mla_up_proj"] = "latent attention"
    if not context.table.dims.num_experts:
        lacking |= dict.fromkeys(("moe", "moe_act", "shared_experts"), "experts")
    elif not settings.get("moe_shared_expert_intermediate_size"):
        lacking["shared_experts"] = "shared experts"
    for module in context.actor.recompute_modules or ():
        if module in lacking:
            yield Violation(
                "actor_config.recompute_modules",
                f"{module}, but the model has no {lacking[module]}",
                "Leave it out",
                code="model-lacks-module",
            )


@constraint(
    TRAINING,
    "actor_config.optimizer.schedule",
    "A schedule's warm-up and decays fit into lr_decay_steps; "
    "no learning rate is above optimizer.lr; weight decay does not fall.",
)
def _schedule(context: TrainingContext) -> Violations:
    optimizer = context.actor.optimizer
    if optimizer.schedule is not None:
        yield from _learning_rate_violations(optimizer, optimizer.schedule)
        yield from _weight_decay_violations(optimizer, optimizer.schedule)


def _learning_rate_violations(optimizer: OptimizerConfig, schedule: ScheduleConfig) -> Violations:
    section = "actor_config.optimizer.schedule"
    style = schedule.lr_decay_style
    num_steps = schedule.lr_decay_steps
    num_warmup = schedule.num_warmup_steps
    for key in ("lr_warmup_init", "min_lr"):
        rate = getattr(schedule, key)
        if rate > optimizer.lr:
            yield Violation(
                f"{section}.{key}",
                f"{rate} is above the learning rate {optimizer.lr}",
                "Use at most optimizer.lr",
                code="above-learning-rate",
            )
    if style == "constant" and schedule.min_lr:
        yield Violation(
            f"{section}.min_lr",
            f"{schedule.min_lr}, but a constant learning rate does not decay",
            "Leave it out",
            code="has-no-effect",
        )
    if style != "constant" and num_steps is None:
        yield Violation(
            f"{section}.lr_decay_steps",
            f"lr_decay_style {style} needs it",
            "Set the number of updates of the whole run",
            code="is-needed",
        )
    if schedule.lr_warmup_fraction is not None:
        if schedule.lr_warmup_steps:
            yield Violation(
                f"{section}.lr_warmup_fraction",
                "lr_warmup_steps also sets the length of the warm-up",
                "Use one of them",
                code="set-twice",
            )
        if num_steps is None:
            yield Violation(
                f"{section}.lr_warmup_fraction",
                "it is a fraction of lr_decay_steps, which is not set",
                "Use lr_warmup_steps",
                code="needs-lr-decay-steps",
            )
    if num_steps is not None and num_warmup >= num_steps:
        yield Violation(
            f"{section}.lr_warmup_steps",
            f"{num_warmup} updates of warm-up leave none of {num_steps}",
            "Use fewer, or raise lr_decay_steps",
            code="longer-than-schedule",
        )
    num_wsd = schedule.lr_wsd_decay_steps
    if (style == "WSD") != (num_wsd is not None):
        yield Violation(
            f"{section}.lr_wsd_decay_steps",
            "WSD needs it" if num_wsd is None else f"{num_wsd}, but lr_decay_style is {style}",
            "Set both or neither",
            code="needs-style-wsd",
        )
    elif num_wsd and num_steps and num_wsd > num_steps - num_warmup:
        yield Violation(
            f"{section}.lr_wsd_decay_steps",
            f"{num_wsd} updates of decay and {num_warmup} of warm-up are more than {num_steps}",
            "Use fewer, or raise lr_decay_steps",
            code="longer-than-schedule",
        )


def _weight_decay_violations(optimizer: OptimizerConfig, schedule: ScheduleConfig) -> Violations:
    section = "actor_config.optimizer.schedule"
    start, end = optimizer.weight_decays
    style = schedule.weight_decay_incr_style
    if end < start:
        yield Violation(
            f"{section}.end_weight_decay",
            f"{end} is below the {start} of the first update",
            "Use at least start_weight_decay",
            code="below-start",
        )
    if style == "constant" and start != end:
        yield Violation(
            f"{section}.weight_decay_incr_style",
            f"constant, but weight decay is to grow from {start} to {end}",
            "Use linear or cosine",
            code="is-constant",
        )
    if style != "constant" and schedule.num_weight_decay_steps is None:
        yield Violation(
            f"{section}.weight_decay_incr_steps",
            f"weight_decay_incr_style {style} needs it",
            "Set it, or lr_decay_steps",
            code="is-needed",
        )


MEGATRON += OVERRIDES


# -- FSDP2 -----------------------------------------------------------------------------------------

_OF_ANY_TRAINER = frozenset(
    {
        "params_dtype",
        "micro_batch_size",
        "seq_length",
        "seed",
        "optimizer",
        "frozen_parameters",
        "fsdp",
    }
)
"""Keys of `actor_config` that FSDP2 also reads."""


@constraint(FSDP, "actor_config.fsdp", "With fsdp, keys that only Megatron reads are left out.")
def _megatron_keys(context: TrainingContext) -> Violations:
    for key, field in ActorConfig.model_fields.items():
        value = getattr(context.actor, key)
        if key in _OF_ANY_TRAINER or value == field.default:
            continue
        shown = value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value
        yield Violation(
            f"actor_config.{key}",
            f"{shortened(shown)}, but only Megatron reads this key, "
            "and actor_config.fsdp trains with FSDP2",
            "Leave one of them out",
            code="megatron-only-key",
        )


def replica_violations(fsdp: FsdpConfig, world_size: int, key: str) -> Violations:
    """Yield the violations of FSDP2's number of replicas, under `key`."""
    if world_size % fsdp.replicas:
        yield Violation(
            key,
            f"{fsdp.replicas} does not divide {world_size} ranks",
            "Use a divisor",
            code="not-divisible",
        )
    if fsdp.sharding_strategy == ("HYBRID_SHARD" if fsdp.replicas == 1 else "FULL_SHARD"):
        yield Violation(
            key,
            f"{fsdp.replicas} with sharding_strategy {fsdp.sharding_strategy}",
            "Use HYBRID_SHARD (or SHARD_GRAD_OP) and 2 or more, or neither",
            code="replicas-contradict-strategy",
        )


@constraint(
    FSDP,
    "actor_config.fsdp.replicas",
    "replicas divides the number of ranks, "
    "is more than 1 with HYBRID_SHARD, and 1 with FULL_SHARD.",
)
def _replicas(context: TrainingContext) -> Violations:
    fsdp = context.actor.fsdp
    if fsdp is not None:
        yield from replica_violations(fsdp, context.world_size, "actor_config.fsdp.replicas")


@constraint(
    FSDP,
    "actor_config.params_dtype",
    "With fsdp, params_dtype is float32: the optimizer steps on the parameters themselves.",
    computing="here",
)
def _params_dtype(context: TrainingContext) -> Violations:
    if context.actor.params_dtype != "float32":
        yield Violation(
            "actor_config.params_dtype",
            f"{context.actor.params_dtype} would round small updates away: "
            "FSDP2 keeps no other copy",
            "Set float32; fsdp.mixed_precision sets the dtype of computation, "
            "compress_reshard that of the wire",
            code="not-float32",
        )


@constraint(
    FSDP,
    "actor_config.fsdp.mixed_precision",
    "mixed_precision is not fp16: losses are not scaled.",
    computing="here",
)
def _mixed_precision(context: TrainingContext) -> Violations:
    fsdp = context.actor.fsdp
    if fsdp is not None and fsdp.mixed_precision == "fp16":
        yield Violation(
            "actor_config.fsdp.mixed_precision",
            "fp16: gradients would underflow, because losses are not scaled",
            "Use bf16",
            code="not-supported",
        )
