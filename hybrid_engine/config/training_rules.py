"""Rules of `actor_config` and the model: of any trainer, of Megatron with its overrides, and of FSDP2."""

from __future__ import annotations

import enum
import fnmatch
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

import pydantic

from hybrid_engine.config.keys import ActorConfig, Dtype, FsdpConfig, OptimizerConfig, ScheduleConfig, Section
from hybrid_engine.config.rules import Constraint, Finding, TrainingContext, constraint, size_constraints
from hybrid_engine.errors import Violation, nearest, shortened
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.parameters import parameters_of
from hybrid_engine.layouts.size_rules import TRAIN_RULES
from hybrid_engine.layouts.stages import chunks_of, split_violations
from hybrid_engine.models.table import ModelTable

if TYPE_CHECKING:
    from megatron_patches.review import DeclaredFields

TRAINING: list[Constraint[TrainingContext]] = []
"""Rules of any trainer."""
MEGATRON: list[Constraint[TrainingContext]] = []
"""Rules where Megatron trains."""
FSDP: list[Constraint[TrainingContext]] = []
"""Rules where FSDP2 trains."""


@constraint(MEGATRON, "model", "build_model() implements everything that config.json asks for.", computing="here")
def _model_is_built(context: TrainingContext) -> Iterator[Finding]:
    for what in context.table.not_built:
        yield f"{what} is not implemented by build_model()", "Pass your own Megatron model"


@constraint(
    MEGATRON,
    "actor_config.hybrid_layer_pattern",
    "A HybridModel is built of Megatron's own layers, without windows, soft caps and post norms.",
    computing="here",
)
def _hybrid_model_is_built(context: TrainingContext) -> Iterator[Finding]:
    if context.train_sizes.hybrid_layer_pattern is not None and context.table.layer_spec != "default":
        yield "the model's layers have parts that Megatron's do not have", "Leave it out, or pass your own model"


MEGATRON += size_constraints("actor_config", TrainParallelism, TRAIN_RULES, lambda context: context.train_sizes)


@constraint(
    MEGATRON,
    "actor_config.expert_tensor_parallel_size",
    "ETP is TP where EP is 1: megatron-core before 0.19 would sum gradients of experts over the wrong ranks.",
    computing="anywhere",
)
def _expert_tensor_alone(context: TrainingContext) -> Iterator[Finding]:
    sizes = context.train_sizes
    if context.table.dims.num_experts and sizes.expert == 1 and sizes.expert_cut != sizes.tensor:
        version = _megatron_core_version()
        if version and tuple(map(int, version.split(".")[:2])) < (0, 19):
            problem = (
                f"{sizes.expert_cut} with TP {sizes.tensor} and EP 1: replicas of the experts would diverge with "
                f"megatron-core {version}"
            )
            yield problem, "Leave it out, raise EP, or install megatron-core 0.19"


def _megatron_core_version() -> str:
    """Version of the imported megatron-core, else of the installed one; empty without one."""
    if (core := sys.modules.get("megatron.core")) is not None:
        return core.__version__
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


@constraint(
    MEGATRON,
    "actor_config.pipeline_model_parallel_layout",
    "With tied embeddings, MTP layers must be on the last pipeline stage: Megatron keeps only two copies equal.",
)
def _tied_mtp_layers(context: TrainingContext) -> Iterator[Finding]:
    sizes, dims = context.train_sizes, context.table.dims
    layers = dims.num_layers, dims.num_mtp_layers
    if sizes.pipeline_layout is None or not dims.tied_embeddings or any(split_violations(sizes, *layers)):
        return
    with_mtp = {chunk.stage for chunk in chunks_of(sizes, *layers) if chunk.has_mtp}
    if with_mtp - {sizes.pipeline - 1}:
        problem = f"{sizes.pipeline_layout}: the embedding is tied, and MTP layers are not on the last pipeline stage"
        yield problem, "Move them there"


@constraint(
    MEGATRON,
    "actor_config.context_parallel_size",
    "CP is 1 where TrainEngine trains; Megatron's own training loop may use more.",
    computing="here",
)
def _context_parallel(context: TrainingContext) -> Iterator[Finding]:
    if (cp := context.train_sizes.context) > 1:
        yield f"{cp}: TrainEngine does not split sequences over ranks", "Use 1, or train with Megatron's own loop"


@constraint(MEGATRON, "actor_config.sequence_parallel", "Sequence parallelism needs TP > 1.")
def _sequence_parallel(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.sequence_parallel and context.train_sizes.tensor == 1:
        yield "needs tensor parallelism", "Set it to false or raise TP"


@constraint(
    MEGATRON,
    "actor_config.sequence_parallel",
    "Training experts with TP > 1 needs sequence parallelism.",
    computing="here",
)
def _sequence_parallel_of_experts(context: TrainingContext) -> Iterator[Finding]:
    tp = context.train_sizes.tensor
    if context.table.dims.num_experts and tp > 1 and not context.actor.sequence_parallel:
        problem = f"false with TP {tp}: megatron-core needs it to train experts under tensor parallelism"
        yield problem, "Set it to true, or TP to 1"


@constraint(MEGATRON, "actor_config.seq_length", "With sequence parallelism, seq_length % TP == 0.")
def _sequence_length(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.sequence_parallel:
        tp, length = context.train_sizes.tensor, context.actor.seq_length
        if length % tp:
            yield f"{tp} does not divide the sequence length {length}", "Use a multiple"


@constraint(TRAINING, "actor_config.seq_length", "seq_length is at most the number of learned positions.")
def _learned_positions(context: TrainingContext) -> Iterator[Finding]:
    positions = context.table.gpt.get("max_sequence_length")
    if positions is not None and context.actor.seq_length > positions:
        yield (f"{context.actor.seq_length}, but the model has {positions} positions", f"Use at most {positions}")


@constraint(
    MEGATRON,
    "actor_config.frozen_parameters",
    "Every pattern matches a parameter, by one of its names in megatron-core's layer specs.",
)
def _frozen_parameters(context: TrainingContext) -> Iterator[Finding]:
    names, patterns = _parameter_names(context), context.actor.frozen_parameters
    if unknown := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
        yield f"no parameter matches {', '.join(unknown)}", f"Names look like {names[0]}, {names[-1]}"


@constraint(
    MEGATRON, "actor_config.frozen_parameters", "At least one trained parameter is not frozen.", computing="here"
)
def _frozen_all(context: TrainingContext) -> Iterator[Finding]:
    names, patterns = _parameter_names(context), context.actor.frozen_parameters
    if context.actor.lora is not None:
        names = [name for name in names if ".adapter." in name]
    if patterns and names and not set(names).difference(*(fnmatch.filter(names, pattern) for pattern in patterns)):
        yield f"{', '.join(patterns[:5])} would freeze every trained parameter", "Leave some out"


def _parameter_names(context: TrainingContext) -> list[str]:
    """Every name that a parameter can have, in any layer spec, with the checkpoint's numbers of layers and experts.

    Empty unless some are to be frozen: a model with many experts has very many.
    """
    if not context.actor.frozen_parameters:
        return []
    table, lora = context.table, context.actor.lora
    names = [
        name.format(**parameter.indices)
        for parameter in parameters_of(table)
        for name in table.rules[parameter.rule].names
        if name.startswith(parameter.location) and ("{expert}" in name) == parameter.is_expert
    ]
    if lora is None:
        return names
    adapted = []
    for name in names:
        module = name.removesuffix(".weight")
        if module == name or module.rpartition(".")[2] not in lora.target_modules:
            adapted.append(name)
        else:  # a weight that gets an adapter has three names instead
            adapted += [f"{module}.{part}.weight" for part in ("to_wrap", "adapter.linear_in", "adapter.linear_out")]
    return adapted


@constraint(
    MEGATRON,
    "actor_config.overlap_param_gather",
    "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce.",
)
def _overlapped_gather(context: TrainingContext) -> Iterator[Finding]:
    actor = context.actor
    if actor.overlap_param_gather and not actor.use_distributed_optimizer:
        yield "only the distributed optimizer gathers parameters", "Set use_distributed_optimizer to true"
    if actor.overlap_param_gather and not actor.overlap_grad_reduce:
        problem = "Megatron overlaps the gather only if it overlaps the gradient reduction too"
        yield problem, "Set overlap_grad_reduce to true"


@constraint(MEGATRON, "actor_config.lora", "target_modules are linear layers of the model, none of experts.")
def _lora_targets(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.lora is None:
        return
    modules = _linear_modules(context.table)
    targets = context.actor.lora.target_modules
    if unknown := [target for target in targets if target not in modules]:
        problem = f"target_modules {', '.join(unknown)}: Megatron has no linear layers of these names in this model"
        yield problem, f"Use some of {', '.join(sorted(modules))}"
    if in_experts := [target for target in targets if modules.get(target)]:
        problem = f"target_modules {', '.join(in_experts)} are parts of experts, where adapters are not supported"
        yield problem, "Leave them out"
    if not targets:
        yield "target_modules is empty: nothing would be trained", "Name some"


def _linear_modules(table: ModelTable) -> dict[str, bool]:
    """Megatron's names of the layers' linear modules -> whether experts have them."""
    found: dict[str, bool] = {}
    for parameter in parameters_of(table):
        module, _, kind = parameter.name.rpartition(".")
        if "linear_" in module and kind.startswith("weight"):
            name = module.rpartition(".")[2]
            found[name] = found.get(name, False) or "{expert}" in parameter.name
    return found


@constraint(
    MEGATRON,
    "actor_config.recompute_granularity",
    "recompute_granularity full needs recompute_method and recompute_num_layers; recompute_modules go with selective.",
)
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


@constraint(
    MEGATRON,
    "actor_config.recompute_num_layers",
    "With recompute_method uniform, recompute_num_layers divides the layers of every chunk.",
)
def _uniform_groups(context: TrainingContext) -> Iterator[Finding]:
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
        yield problem, "Use a divisor, or recompute_method block"


@constraint(MEGATRON, "actor_config.recompute_modules", "recompute_modules are parts that the model has.")
def _recomputed_modules(context: TrainingContext) -> Iterator[Finding]:
    settings, lacking = context.table.transformer, {}
    if not settings.get("multi_latent_attention"):
        lacking["mla_up_proj"] = "latent attention"
    if not context.table.dims.num_experts:
        lacking |= dict.fromkeys(("moe", "moe_act", "shared_experts"), "experts")
    elif not settings.get("moe_shared_expert_intermediate_size"):
        lacking["shared_experts"] = "shared experts"
    for module in context.actor.recompute_modules or ():
        if module in lacking:
            yield f"{module}, but the model has no {lacking[module]}", "Leave it out"


@constraint(
    TRAINING,
    "actor_config.optimizer.schedule",
    "A schedule's warm-up and decays fit into lr_decay_steps; no learning rate is above optimizer.lr; weight decay "
    "does not fall.",
)
def _schedule(context: TrainingContext) -> Iterator[Violation]:
    optimizer, schedule = context.actor.optimizer, context.actor.optimizer.schedule
    if schedule is not None:
        for find in (_learning_rate_findings, _weight_decay_findings):
            for key, problem, remedy in find(optimizer, schedule):
                yield Violation(f"actor_config.optimizer.schedule.{key}", problem, remedy)


_KeyedFinding = tuple[str, str, str]
"""Key, problem and remedy."""


def _learning_rate_findings(optimizer: OptimizerConfig, schedule: ScheduleConfig) -> Iterator[_KeyedFinding]:
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


def _weight_decay_findings(optimizer: OptimizerConfig, schedule: ScheduleConfig) -> Iterator[_KeyedFinding]:
    start, end, style = *optimizer.weight_decays, schedule.weight_decay_incr_style
    if end < start:
        yield "end_weight_decay", f"{end} is below the {start} of the first update", "Use at least start_weight_decay"
    if style == "constant" and start != end:
        problem = f"constant, but weight decay is to grow from {start} to {end}"
        yield "weight_decay_incr_style", problem, "Use linear or cosine"
    if style != "constant" and schedule.num_weight_decay_steps is None:
        yield "weight_decay_incr_steps", f"weight_decay_incr_style {style} needs it", "Set it, or lr_decay_steps"


# -- overrides -------------------------------------------------------------------------------------------------------

CLASSES: Final = {
    "transformer": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
}
"""Key of `actor_config.overrides` -> megatron-core's class."""

_KEYS: Final = {
    **dict.fromkeys(("bf16", "fp16", "pipeline_dtype"), "actor_config.params_dtype"),
    "is_hybrid_model": "actor_config.hybrid_layer_pattern",
    "min_lr": "actor_config.optimizer.schedule.min_lr",
}
"""Fields that another key of ours decides, by another name."""

_SET_HERE: Final = {
    "optimizer": "Adam is what is built, offloaded and saved here",
    "batch_p2p_comm": "it follows from the pipeline's schedule",
    "overlap_p2p_comm": "it follows from the pipeline's schedule",
    "calculate_per_token_loss": "TrainEngine takes the mean that a loss function returns",
    "num_distributed_optimizer_instances": "process groups are made for one",
    "overlap_moe_expert_parallel_comm": "TrainEngine runs a micro batch as a whole",
    "overlap_param_gather_with_optimizer_step": "TrainEngine builds one optimizer for all chunks",
    "tp_comm_overlap": "its buffers are made by Megatron-LM's initialize_megatron, which does not run here",
    "qk_clip": "TrainEngine takes no steps after those of the optimizer",
}
"""Fields that TrainEngine builds on."""


@cache
def _declared() -> DeclaredFields | None:
    """Fields of the installed megatron-core; None without one, or without torch: nothing can be trained there."""
    if find_spec("torch") is None:
        return None
    from megatron_patches.review import declared_fields

    return declared_fields() or None


@constraint(
    MEGATRON,
    "actor_config.overrides",
    "overrides are fields of the installed megatron-core's configuration classes, with values of their types, that go "
    "with a switch and that neither the model, the layout nor another key decides.",
)
def _overrides(context: TrainingContext) -> Iterator[Violation]:
    for part in CLASSES:
        for name, value in getattr(context.actor.overrides, part).items():
            if (declared := _declared()) is not None and (found := _override_finding(part, name, value, declared)):
                yield Violation(f"actor_config.overrides.{part}.{name}", *found)


def _override_finding(part: str, name: str, value: pydantic.JsonValue, declared: DeclaredFields) -> Finding | None:
    """Why `value` is none for megatron-core's field `name`, and what to do; None where it may be set."""
    from megatron_patches.review import FUNCTION_FIELDS, READ_OFF_THE_MODEL, refusal

    section = CLASSES[part]
    if (field := declared.get((section, name))) is None:
        close = nearest(name, [known for owner, known in declared if owner == section])
        problem = f"{section} of the installed megatron-core has no such field"
        return problem, f"Did you mean {close}?" if close else "Leave it out"
    if name in _SET_HERE:
        return _SET_HERE[name], "Leave it out"
    if key := _own_key(part, name):
        return "a key of its own decides it", f"Use {key}"
    if part == "transformer" and name in FUNCTION_FIELDS:
        return "it follows from the model, whose config.json vLLM goes by, too", "Leave it out, or change config.json"
    if part == "transformer" and name in READ_OFF_THE_MODEL:  # `plan`, the other rules and the live model would differ
        return "it decides how weights are laid out, which follows from the model and from other keys", "Leave it out"
    if wrong := type_problem(value, field.type, field.default):
        quoted = isinstance(value, str) and re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", value)
        remedy = "YAML takes 1e-5 and quoted numbers for text; write 1.0e-5" if quoted else "Correct the value"
        return f"{shortened(value)}: {wrong}", remedy
    if refused := refusal(section, name, value):
        return refused.problem, refused.remedy
    return None


def _own_key(part: str, field: str) -> str | None:
    """The key of ours that decides a field."""
    if part == "optimizer" and field in OptimizerConfig.model_fields:
        return f"actor_config.optimizer.{field}"
    return f"actor_config.{field}" if field in ActorConfig.model_fields else _KEYS.get(field)


def type_problem(value: pydantic.JsonValue, annotation: Any, default: object) -> str | None:
    """Return why `value` is invalid for a field of this type and default; None if it is valid.

    A configuration file names dtypes, and the members of an enum.
    """
    options = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
    options += [None] if default is None else []  # also where the annotation forgets to say so
    named = {option: _names_of(option) for option in options}
    kinds = [Literal[tuple(names)] if (names := named[option]) else option for option in options]
    config = pydantic.ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
    expected: Any = Union[tuple(kinds)]  # noqa: UP007  # of a list
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(expected, config=config)
    try:
        adapter.validate_json(json.dumps(value), strict=True)  # JSON: a list may stand for a tuple
    except pydantic.ValidationError as error:
        return "; ".join(dict.fromkeys(found["msg"] for found in error.errors(include_url=False)))
    return None


def _names_of(kind: Any) -> tuple[str, ...]:
    """Names by which a configuration file gives values of a dtype or an enum; none for other types."""
    if isinstance(kind, enum.EnumType):
        return tuple(kind.__members__)
    is_dtype = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}" == "torch.dtype"
    return get_args(Dtype) if is_dtype else ()


@constraint(
    MEGATRON,
    "actor_config.overrides",
    "With EP > 1, moe_token_dispatcher_type is not allgather.",
    computing="here",
)
def _dispatched(context: TrainingContext) -> Iterator[Finding]:
    ep, dispatcher = context.train_sizes.expert, context.actor.overrides.transformer.get("moe_token_dispatcher_type")
    if ep > 1 and dispatcher == "allgather":
        problem = f"allgather with EP {ep}: it takes as many tokens from every rank, but each cuts its own padding"
        yield problem, "Use alltoall, which exchanges counts"


# -- FSDP2 -----------------------------------------------------------------------------------------------------------

_OF_ANY_TRAINER = frozenset({"params_dtype", "micro_batch_size", "seq_length", "seed", "optimizer", "fsdp"})
"""Keys of `actor_config` that are not Megatron's alone."""


@constraint(FSDP, "actor_config.fsdp", "Beside fsdp, keys that only Megatron has are left out.")
def _megatron_keys(context: TrainingContext) -> Iterator[Violation]:
    for key, field in ActorConfig.model_fields.items():
        value = getattr(context.actor, key)
        if key not in _OF_ANY_TRAINER and value != field.default:
            shown = value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value
            problem = f"{shortened(shown)}, but this key is Megatron's, and with actor_config.fsdp FSDP2 trains"
            yield Violation(f"actor_config.{key}", problem, "Leave one of them out")


def replica_findings(fsdp: FsdpConfig, world_size: int) -> Iterator[Finding]:
    """Find faults in the number of replicas."""
    if world_size % fsdp.replicas:
        yield f"{fsdp.replicas} do not divide {world_size} ranks", "Use a divisor"
    if fsdp.sharding_strategy == ("HYBRID_SHARD" if fsdp.replicas == 1 else "FULL_SHARD"):
        problem = f"{fsdp.replicas} with sharding_strategy {fsdp.sharding_strategy}"
        yield problem, "Use HYBRID_SHARD (or SHARD_GRAD_OP) and 2 or more, or neither"


@constraint(
    FSDP,
    "actor_config.fsdp.replicas",
    "replicas divides the number of ranks, is more than 1 with HYBRID_SHARD, and 1 with FULL_SHARD.",
)
def _replicas(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.fsdp is not None:
        yield from replica_findings(context.actor.fsdp, context.world_size)


@constraint(
    FSDP,
    "actor_config.params_dtype",
    "With fsdp, params_dtype is float32: the optimizer steps on the parameters themselves.",
    computing="here",
)
def _params_dtype(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.params_dtype != "float32":
        problem = f"{context.actor.params_dtype} would round small updates away: FSDP2 keeps no other copy"
        yield problem, "Set float32; fsdp.mixed_precision is what layers compute in, compress_reshard what is sent"


@constraint(
    FSDP,
    "actor_config.fsdp.mixed_precision",
    "mixed_precision is not fp16: losses are not scaled.",
    computing="here",
)
def _mixed_precision(context: TrainingContext) -> Iterator[Finding]:
    if context.actor.fsdp is not None and context.actor.fsdp.mixed_precision == "fp16":
        yield "fp16: gradients would underflow, for losses are not scaled", "Use bf16"
