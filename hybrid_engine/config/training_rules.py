"""Rules of `actor_config` and the model: every trainer, Megatron with its overrides, FSDP2."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import sys
from collections.abc import Iterator

from hybrid_engine.config.keys import ALL_LINEAR, ActorConfig, FsdpConfig, LoraConfig
from hybrid_engine.config.override_rules import OVERRIDES
from hybrid_engine.config.rules import Constraint, TrainingContext, size_constraints
from hybrid_engine.errors import Violation, Violations, shortened
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.parameters import linear_modules, parameters_of
from hybrid_engine.layouts.size_rules import TRAIN_RULES

# -- every trainer ---------------------------------------------------------------------------------


def _lengths_above_positions(context: TrainingContext) -> Iterator[str]:
    length = context.actor.seq_length
    positions = context.table.gpt.get("max_sequence_length")
    if positions is not None and length > positions:
        yield f"{length}, but the model has {positions} positions"


def _weight_decay_falls(context: TrainingContext) -> bool:
    start, end = context.actor.optimizer.weight_decays
    return end < start


def _wsd_is_too_long(context: TrainingContext) -> bool:
    schedule = context.schedule
    num_steps = schedule.lr_decay_steps
    num_wsd = schedule.lr_wsd_decay_steps
    if schedule.lr_decay_style != "WSD" or num_steps is None or num_wsd is None:
        return False
    return schedule.num_warmup_steps + num_wsd > num_steps


def _unknown_targets(context: TrainingContext) -> Iterator[str]:
    if context.actor.lora is None:
        return
    modules = {*linear_modules(context.table)}
    if context.actor.fsdp is not None:
        matrices = (name for name, shape in context.table.shapes.items() if len(shape) > 1)
        modules = {name.removesuffix(".weight").split(".")[-1] for name in matrices} | {ALL_LINEAR}
    unknown = [target for target in context.actor.lora.target_modules if target not in modules]
    if unknown:
        yield f"{', '.join(unknown)}, but the model has {', '.join(sorted(modules))}"


TRAINING: list[Constraint[TrainingContext]] = [
    Constraint(
        "actor_config.seq_length",
        "seq_length is at most the number of learned positions.",
        _lengths_above_positions,
        code="above-learned-positions",
    ),
    Constraint(
        "actor_config.optimizer.schedule.lr_warmup_init",
        "lr_warmup_init is at most lr.",
        lambda context: context.schedule.lr_warmup_init > context.actor.optimizer.lr,
        code="above-learning-rate",
    ),
    Constraint(
        "actor_config.optimizer.schedule.min_lr",
        "min_lr is at most lr.",
        lambda context: context.schedule.min_lr > context.actor.optimizer.lr,
        code="above-learning-rate",
    ),
    Constraint(
        "actor_config.optimizer.schedule.min_lr",
        "A learning rate of lr_decay_style constant does not decay to min_lr.",
        lambda context: (
            context.schedule.lr_decay_style == "constant" and context.schedule.min_lr > 0
        ),
        code="has-no-effect",
    ),
    Constraint(
        "actor_config.optimizer.schedule.lr_decay_steps",
        "Every lr_decay_style but constant needs lr_decay_steps, the updates of the whole run.",
        lambda context: (
            context.schedule.lr_decay_style != "constant"
            and context.schedule.lr_decay_steps is None
        ),
        code="is-needed",
    ),
    Constraint(
        "actor_config.optimizer.schedule.lr_warmup_fraction",
        "Either lr_warmup_fraction or lr_warmup_steps sets the length of the warm-up.",
        lambda context: (
            context.schedule.lr_warmup_fraction is not None and context.schedule.lr_warmup_steps > 0
        ),
        code="set-twice",
    ),
    Constraint(
        "actor_config.optimizer.schedule.lr_warmup_fraction",
        "lr_warmup_fraction is a fraction of lr_decay_steps; without these, use lr_warmup_steps.",
        lambda context: (
            context.schedule.lr_warmup_fraction is not None
            and context.schedule.lr_decay_steps is None
        ),
        code="needs-lr-decay-steps",
    ),
    Constraint(
        "actor_config.optimizer.schedule.lr_warmup_steps",
        "lr_warmup_steps is less than lr_decay_steps.",
        lambda context: (
            context.schedule.lr_decay_steps is not None
            and context.schedule.num_warmup_steps >= context.schedule.lr_decay_steps
        ),
        code="longer-than-schedule",
    ),
    Constraint(
        "actor_config.optimizer.schedule.lr_wsd_decay_steps",
        "lr_decay_style WSD needs lr_wsd_decay_steps, and no other style has them.",
        lambda context: (
            (context.schedule.lr_decay_style == "WSD")
            != (context.schedule.lr_wsd_decay_steps is not None)
        ),
        code="needs-style-wsd",
    ),
    Constraint(
        "actor_config.optimizer.schedule.lr_wsd_decay_steps",
        "lr_warmup_steps and lr_wsd_decay_steps fit into lr_decay_steps.",
        _wsd_is_too_long,
        code="longer-than-schedule",
    ),
    Constraint(
        "actor_config.optimizer.schedule.end_weight_decay",
        "end_weight_decay is at least start_weight_decay; both are weight_decay by default.",
        _weight_decay_falls,
        code="below-start",
    ),
    Constraint(
        "actor_config.optimizer.schedule.weight_decay_incr_style",
        "With weight_decay_incr_style constant, start_weight_decay is end_weight_decay; "
        "both are weight_decay by default.",
        lambda context: (
            context.schedule.weight_decay_incr_style == "constant"
            and len({*context.actor.optimizer.weight_decays}) > 1
        ),
        code="is-constant",
    ),
    Constraint(
        "actor_config.optimizer.schedule.weight_decay_incr_steps",
        "weight_decay_incr_style linear or cosine needs weight_decay_incr_steps or lr_decay_steps.",
        lambda context: (
            context.schedule.weight_decay_incr_style != "constant"
            and context.schedule.num_weight_decay_steps is None
        ),
        code="is-needed",
    ),
    Constraint(
        "actor_config.lora",
        "target_modules are linear layers of the model.",
        _unknown_targets,
        code="unknown-target-modules",
    ),
    Constraint(
        "actor_config.lora",
        "target_modules is not empty, so that something is trained.",
        lambda context: context.actor.lora is not None and not context.actor.lora.target_modules,
        code="nothing-is-trained",
    ),
]
"""Rules for every trainer."""

# -- Megatron --------------------------------------------------------------------------------------


def _experts_would_diverge(context: TrainingContext) -> bool:
    sizes = context.train_sizes
    if not context.dims.num_experts or sizes.expert > 1 or sizes.expert_cut == sizes.tensor:
        return False
    version = _megatron_core_version()
    return bool(version) and tuple(map(int, version.split(".")[:2])) < (0, 19)


def _megatron_core_version() -> str:
    """Return the version of megatron-core, imported or else installed; "" without it."""
    core = sys.modules.get("megatron.core")
    if core is not None:
        return core.__version__
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _copies_would_differ(context: TrainingContext) -> bool:
    sizes = context.train_sizes
    if sizes.pipeline_layout is None or not context.dims.tied_embeddings:
        return False
    stages_with_mtp = {chunk.stage for chunk in context.chunks if chunk.has_mtp}
    return bool(stages_with_mtp - {sizes.pipeline - 1})


def _unmatched_patterns(context: TrainingContext) -> Iterator[str]:
    names = _parameter_names(context)
    patterns = context.actor.frozen_parameters
    unknown = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if unknown:
        yield f"{', '.join(unknown)}, but names look like {names[0]}, {names[-1]}"


def _freezes_everything(context: TrainingContext) -> bool:
    names = _parameter_names(context)
    if context.actor.lora is not None:
        names = [name for name in names if ".adapter." in name]
    frozen = [fnmatch.filter(names, pattern) for pattern in context.actor.frozen_parameters]
    # Without patterns there are no names, and nothing is frozen.
    return bool(names) and not set(names).difference(*frozen)


def _parameter_names(context: TrainingContext) -> list[str]:
    """Return all parameter names of any layer spec, with the checkpoint's layer and expert numbers.

    Empty unless parameters are to be frozen, because a model with many experts has very many names.
    """
    if not context.actor.frozen_parameters:
        return []
    names = []
    for parameter in parameters_of(context.table):
        for name in context.table.rules[parameter.rule].names:
            is_of_expert = "{expert}" in name
            if name.startswith(parameter.location) and is_of_expert == parameter.is_expert:
                names += _with_adapter(name.format(**parameter.indices), context.actor.lora)
    return names


def _with_adapter(name: str, lora: LoraConfig | None) -> list[str]:
    """Return the names of a parameter with its adapter, if it has one."""
    module = name.removesuffix(".weight")
    if lora is None or module == name or module.rpartition(".")[2] not in lora.target_modules:
        return [name]
    # The adapter wraps its linear layer, so three names replace that of the weight.
    parts = ("to_wrap", "adapter.linear_in", "adapter.linear_out")
    return [f"{module}.{part}.weight" for part in parts]


_GRANULARITIES = {
    "recompute_method": "full",
    "recompute_num_layers": "full",
    "recompute_modules": "selective",
}
"""Key -> value of recompute_granularity that it goes with."""


def _unused_recomputation(context: TrainingContext) -> dict[str, str]:
    actor = context.actor
    granularity = actor.recompute_granularity
    return {
        f"actor_config.{key}": f"has no effect with recompute_granularity {granularity or 'unset'}"
        for key, needed in _GRANULARITIES.items()
        if getattr(actor, key) is not None and granularity != needed
    }


def _groups_are_uneven(context: TrainingContext) -> bool:
    group_size = context.actor.recompute_num_layers
    if context.actor.recompute_method != "uniform" or group_size is None:
        return False
    # With an incomplete last group, megatron-core would index past the last layer of the chunk.
    return any(len(chunk.positions) % group_size for chunk in context.chunks)


def _absent_modules(context: TrainingContext) -> list[str]:
    sizes = context.table.sizes
    has_experts = context.dims.num_experts > 0
    is_present = {
        "mla_up_proj": sizes.get("multi_latent_attention"),
        "moe": has_experts,
        "moe_act": has_experts,
        "shared_experts": has_experts and sizes.get("moe_shared_expert_intermediate_size"),
    }
    modules = context.actor.recompute_modules or ()
    # Parts that every model has are not in the table above.
    return [module for module in modules if not is_present.get(module, True)]


MEGATRON: list[Constraint[TrainingContext]] = [
    Constraint(
        "model",
        "build_model() implements every feature that config.json enables; for others, "
        "pass your own Megatron model.",
        lambda context: context.table.not_built,
        code="not-built",
        computing="here",
    ),
    Constraint(
        "actor_config.hybrid_layer_pattern",
        "hybrid_layer_pattern consists of Megatron's own layers, without windows, soft caps and "
        "post norms; for others, leave it out or pass your own model.",
        lambda context: (
            context.train_sizes.hybrid_layer_pattern is not None and context.table.extends_layers
        ),
        code="not-built",
        computing="here",
    ),
    *size_constraints(
        "actor_config",
        TrainParallelism,
        TRAIN_RULES,
        lambda context: context.train_sizes,
    ),
    Constraint(
        "actor_config.expert_tensor_parallel_size",
        "expert_tensor_parallel_size is tensor_model_parallel_size where EP is 1: megatron-core "
        "before 0.19 would sum the experts' gradients over the wrong ranks.",
        _experts_would_diverge,
        code="experts-would-diverge",
        computing="anywhere",
    ),
    Constraint(
        "actor_config.pipeline_model_parallel_layout",
        "With tied embeddings, pipeline_model_parallel_layout has MTP layers on the last stage: "
        "Megatron keeps only two copies equal.",
        _copies_would_differ,
        code="mtp-not-on-last-stage",
    ),
    Constraint(
        "actor_config.context_parallel_size",
        "context_parallel_size is 1 where TrainEngine trains; Megatron's own loop may use more.",
        lambda context: context.train_sizes.context > 1,
        code="not-supported",
        computing="here",
    ),
    Constraint(
        "actor_config.sequence_parallel",
        "sequence_parallel needs tensor_model_parallel_size > 1.",
        lambda context: context.actor.sequence_parallel and context.train_sizes.tensor == 1,
        code="needs-tensor-parallelism",
    ),
    Constraint(
        "actor_config.sequence_parallel",
        "Training experts with tensor_model_parallel_size > 1 needs sequence_parallel.",
        lambda context: (
            context.dims.num_experts > 0
            and context.train_sizes.tensor > 1
            and not context.actor.sequence_parallel
        ),
        code="needed-for-experts",
        computing="here",
    ),
    Constraint(
        "actor_config.seq_length",
        "With sequence_parallel, seq_length % tensor_model_parallel_size == 0.",
        lambda context: (
            context.actor.sequence_parallel
            and context.actor.seq_length % context.train_sizes.tensor > 0
        ),
        code="not-divisible",
    ),
    Constraint(
        "actor_config.frozen_parameters",
        "Every pattern matches a parameter, by one of its names in megatron-core's layer specs.",
        _unmatched_patterns,
        code="no-parameter-matches",
    ),
    Constraint(
        "actor_config.frozen_parameters",
        "At least one trained parameter is not in frozen_parameters.",
        _freezes_everything,
        code="nothing-is-trained",
        computing="here",
    ),
    Constraint(
        "actor_config.overlap_param_gather",
        "overlap_param_gather needs use_distributed_optimizer, which gathers the parameters.",
        lambda context: (
            context.actor.overlap_param_gather and not context.actor.use_distributed_optimizer
        ),
        code="needs-distributed-optimizer",
    ),
    Constraint(
        "actor_config.overlap_param_gather",
        "overlap_param_gather needs overlap_grad_reduce.",
        lambda context: (
            context.actor.overlap_param_gather and not context.actor.overlap_grad_reduce
        ),
        code="needs-overlap-grad-reduce",
    ),
    Constraint(
        "actor_config.recompute_granularity",
        "recompute_method and recompute_num_layers go with recompute_granularity full, "
        "recompute_modules with selective.",
        _unused_recomputation,
        code="has-no-effect",
    ),
    Constraint(
        "actor_config.recompute_method",
        "recompute_granularity full needs recompute_method, uniform or block.",
        lambda context: (
            context.actor.recompute_granularity == "full" and context.actor.recompute_method is None
        ),
        code="is-needed",
    ),
    Constraint(
        "actor_config.recompute_num_layers",
        "recompute_granularity full needs recompute_num_layers, 1 or more.",
        lambda context: (
            context.actor.recompute_granularity == "full"
            and context.actor.recompute_num_layers is None
        ),
        code="is-needed",
    ),
    Constraint(
        "actor_config.recompute_num_layers",
        "With recompute_method uniform, recompute_num_layers divides the layers of every chunk.",
        _groups_are_uneven,
        code="not-divisible",
    ),
    Constraint(
        "actor_config.recompute_modules",
        "recompute_modules are parts that the model has.",
        _absent_modules,
        code="model-lacks-module",
    ),
    *OVERRIDES,
]
"""Rules for training with Megatron."""

# -- FSDP2 -----------------------------------------------------------------------------------------

_OF_ANY_TRAINER = frozenset(
    {
        "params_dtype",
        "micro_batch_size",
        "seq_length",
        "seed",
        "optimizer",
        "lora",
        "frozen_parameters",
        "fsdp",
    }
)
"""Keys of `actor_config` that FSDP2 also reads."""


def _keys_of_megatron(context: TrainingContext) -> dict[str, str]:
    return {
        f"actor_config.{key}": f"{shortened(value)}, which only Megatron reads"
        for key, value in context.actor
        if key not in _OF_ANY_TRAINER and value != ActorConfig.model_fields[key].default
    }


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


def _targets_of_another_dtype(context: TrainingContext) -> Iterator[str]:
    """Yield targets whose adapters FSDP2 would gather together with weights of another dtype."""
    actor = context.actor
    if actor.lora is None or actor.params_dtype == "float32":
        return
    adapted: dict[str, str] = {}  # target -> first weight
    for name in context.table.shapes:
        parts = name.removesuffix(".weight").split(".")
        if "experts" in parts:
            adapted.setdefault(ALL_LINEAR, name)
        elif any(map(str.isdigit, parts)):
            continue  # a linear layer of a decoder layer
        adapted.setdefault(parts[-1], name)
    for target in actor.lora.target_modules:
        if target in adapted:
            yield f"{target}, which adapts {adapted[target]}"


FSDP: list[Constraint[TrainingContext]] = [
    Constraint(
        "actor_config.fsdp",
        "With fsdp, keys that only Megatron reads are left out.",
        _keys_of_megatron,
        code="megatron-only-key",
    ),
    Constraint(
        "actor_config.fsdp.replicas",
        "replicas divides the number of ranks, "
        "is more than 1 with HYBRID_SHARD, and 1 with FULL_SHARD.",
        lambda context: replica_violations(
            context.fsdp, context.world_size, "actor_config.fsdp.replicas"
        ),
    ),
    Constraint(
        "actor_config.params_dtype",
        "With FSDP2, params_dtype is float32, or with lora bfloat16, because a step changes the "
        "parameters themselves: mixed_precision is for the computation, compress_reshard for the "
        "wire.",
        lambda context: (
            context.actor.params_dtype
            not in ({"float32", "bfloat16"} if context.actor.lora else {"float32"})
        ),
        code="not-float32",
        computing="stored",
    ),
    Constraint(
        "actor_config.lora",
        "With FSDP2 and params_dtype bfloat16, target_modules are linear layers without experts, "
        "embeddings and head, whose adapters in float32 would be gathered together with them.",
        _targets_of_another_dtype,
        code="several-dtypes",
        computing="stored",
    ),
    Constraint(
        "actor_config.fsdp.mixed_precision",
        "mixed_precision is not fp16, because losses are not scaled.",
        lambda context: context.fsdp.mixed_precision == "fp16",
        code="not-supported",
        computing="here",
    ),
]
"""Rules for training with FSDP2."""


def rules_of_trainer(context: TrainingContext) -> list[Constraint[TrainingContext]]:
    """Return the rules of the configured trainer."""
    return [*TRAINING, *(MEGATRON if context.actor.fsdp is None else FSDP)]
