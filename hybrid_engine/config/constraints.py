"""What makes a configuration impossible: one record for each rule, with what is wrong and what to do about it.

All rules are looked at before a process group exists, and all findings are reported at once. docs/constraints.md is
made from this table (`make docs`), and every rule has a test that breaks it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hybrid_engine.config.parallelism import inference_parallelism, train_parallelism
from hybrid_engine.errors import Violation
from hybrid_engine.layouts import inference, training
from hybrid_engine.layouts.inference import InferenceParallelism
from hybrid_engine.layouts.parameters import head_violations, parameters_of
from hybrid_engine.layouts.stages import split_violations
from hybrid_engine.layouts.training import TrainParallelism
from hybrid_engine.models.lora_tensors import VLLM_LORA_RANKS
from hybrid_engine.models.table import ModelTable

if TYPE_CHECKING:
    from hybrid_engine.config.keys import ActorConfig, GenerateConfig, LoraConfig


@dataclass(frozen=True)
class Job:
    """What the rules look at; without `generate`, a training model that nothing is generated with."""

    actor: ActorConfig
    table: ModelTable
    world_size: int
    generate: GenerateConfig | None = None

    @cached_property
    def train_sizes(self) -> TrainParallelism:
        """The training side's sizes; parameters lie as in megatron-core's local layer spec."""
        return train_parallelism(self.actor, self.world_size, cuts_whole_projections=True)

    @cached_property
    def infer_sizes(self) -> InferenceParallelism:
        """The inference side's sizes, ranks in order."""
        return inference_parallelism(self.generate, self.world_size)

    @property
    def wire_dtype(self) -> str:
        """In which weights arrive at vLLM."""
        return self.generate.wire_dtype(self.actor.params_dtype)


TRAIN_KEYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage": "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
    "pipeline_layout": "pipeline_model_parallel_layout",
    "noop_layers": "noop_layers",
    "make_vocab_size_divisible_by": "make_vocab_size_divisible_by",
}
"""Attribute of `TrainParallelism` -> key of `actor_config`."""

INFER_KEYS = {
    "tensor": "infer_tensor_parallel_size",
    "pipeline": "infer_pipeline_parallel_size",
    "expert": "infer_expert_parallel_size",
}
"""Attribute of `InferenceParallelism` -> key of `generate_config`."""


def _of_training(found: Iterable[Violation]) -> Iterator[Violation]:
    """Findings of the layouts under the keys of the configuration."""
    return (Violation(f"actor_config.{TRAIN_KEYS[one.key]}", one.problem, one.remedy) for one in found)


def _of_inference(found: Iterable[Violation]) -> Iterator[Violation]:
    return (Violation(f"generate_config.{INFER_KEYS[one.key]}", one.problem, one.remedy) for one in found)


NARROWER = frozenset({("float32", "bfloat16"), ("float32", "float16")})
"""Pairs of dtypes, training and wire, that compression may have."""


@dataclass(frozen=True)
class Constraint:
    """One rule.

    Attributes:
        key: the configuration key that is most often to change; a finding names its own.
        rule: what holds of a sound configuration; a sentence for the documentation.
        find: yields what breaks it.
        computing: concerns training's computation only; a model that just holds weights may break it.
    """

    key: str
    rule: str
    find: Callable[[Job], Iterator[Violation]]
    computing: bool = False

    @property
    def is_of_inference(self) -> bool:
        """Whether it looks at `generate_config`; those of training do not."""
        return self.key.startswith("generate_config.")


CONSTRAINTS: list[Constraint] = []


def broken_rules(job: Job, *, weights_only: bool = False) -> list[Violation]:
    """What breaks the rules that concern this job; `weights_only`: training need not compute."""
    return [
        found
        for constraint in CONSTRAINTS
        if not (weights_only and constraint.computing) and not (job.generate is None and constraint.is_of_inference)
        for found in constraint.find(job)
    ]


def _constraint(key: str, rule: str, *, computing: bool = False) -> Callable[..., Callable[[Job], Iterator[Violation]]]:
    def register(find: Callable[[Job], Iterator[Violation]]) -> Callable[[Job], Iterator[Violation]]:
        CONSTRAINTS.append(Constraint(key, rule, find, computing))
        return find

    return register


# -- the model -------------------------------------------------------------------------------------------------------


@_constraint("model", "The training model computes everything that the config asks for.", computing=True)
def _model_is_built(job: Job) -> Iterator[Violation]:
    for what in job.table.not_built:
        yield Violation("model", f"{what} is not built here", "Bring your own model")


# -- training --------------------------------------------------------------------------------------------------------


@_constraint(
    "actor_config.tensor_model_parallel_size",
    "TP x PP x CP, and ETP x EP x PP with experts, divide the number of ranks.",
)
def _training_world(job: Job) -> Iterator[Violation]:
    return _of_training(training.rank_violations(job.train_sizes, job.table))


@_constraint(
    "actor_config.tensor_model_parallel_size",
    "TP divides the attention heads; it divides the key/value heads or is a multiple.",
)
def _training_heads(job: Job) -> Iterator[Violation]:
    return _of_training(head_violations(job.table, job.train_sizes.tensor, "tensor"))


@_constraint(
    "actor_config.tensor_model_parallel_size",
    "Every parameter divides evenly over the ranks that share it: TP, and ETP for experts.",
)
def _training_cuts(job: Job) -> Iterator[Violation]:
    return _of_training(training.cut_violations_of(job.train_sizes, job.table))


@_constraint("actor_config.expert_model_parallel_size", "EP divides the number of experts; EP and ETP are 1 without.")
def _training_experts(job: Job) -> Iterator[Violation]:
    return _of_training(training.expert_violations(job.train_sizes, job.table))


@_constraint(
    "actor_config.expert_tensor_parallel_size",
    "ETP is TP where EP is 1: megatron-core 0.16.1 would sum the experts' gradients over other ranks.",
    computing=True,
)
def _expert_tensor_alone(job: Job) -> Iterator[Violation]:
    sizes = job.train_sizes
    if job.table.dims.num_experts and sizes.expert == 1 and sizes.expert_cut != sizes.tensor:
        problem = f"{sizes.expert_cut} with TP {sizes.tensor} and EP 1: replicas of experts would drift apart"
        yield Violation("actor_config.expert_tensor_parallel_size", problem, "Leave it out, or raise EP")


@_constraint("actor_config.pipeline_model_parallel_size", "The layers can be dealt out to the stages and their chunks.")
def _training_stages(job: Job) -> Iterator[Violation]:
    sizes, dims = job.train_sizes, job.table.dims
    num_layers = dims.num_layers + len(sizes.noop_layers)
    return _of_training(split_violations(sizes.split, num_layers, dims.num_mtp_layers))


@_constraint(
    "actor_config.pipeline_model_parallel_layout",
    "With tied embeddings, layers for further tokens are on the last stage: Megatron keeps two copies alike.",
)
def _tied_further_tokens(job: Job) -> Iterator[Violation]:
    layout, stages = job.actor.pipeline_model_parallel_layout, job.actor.pipeline_model_parallel_size
    if layout is None or not job.table.dims.tied_embeddings or list(_training_stages(job)):
        return
    with_mtp = {chunk.stage for chunk in job.train_sizes.chunks(job.table) if chunk.has_mtp}
    if with_mtp - {stages - 1}:
        problem = f"{layout}: the embedding is tied, and layers for further tokens are not on the last stage"
        yield Violation("actor_config.pipeline_model_parallel_layout", problem, "Move them there")


@_constraint("actor_config.noop_layers", "Layers that do nothing have positions among all layers.")
def _training_noops(job: Job) -> Iterator[Violation]:
    return _of_training(training.noop_violations(job.train_sizes, job.table))


@_constraint(
    "actor_config.context_parallel_size",
    "CP is 1 where this project's TrainEngine trains; Megatron's own training loop may split sequences.",
    computing=True,
)
def _context_parallel(job: Job) -> Iterator[Violation]:
    if (cp := job.actor.context_parallel_size) > 1:
        problem = f"{cp}: sequences are not split over ranks by TrainEngine"
        yield Violation("actor_config.context_parallel_size", problem, "Use 1, or train with Megatron's own loop")


@_constraint("actor_config.sequence_parallel", "Sequence parallelism goes with TP above 1.")
def _sequence_parallel(job: Job) -> Iterator[Violation]:
    if job.actor.sequence_parallel and job.actor.tensor_model_parallel_size == 1:
        yield Violation("actor_config.sequence_parallel", "needs tensor parallelism", "Set it to false or raise TP")


@_constraint(
    "actor_config.sequence_parallel",
    "Experts are trained with TP above 1 only with sequence parallelism.",
    computing=True,
)
def _sequence_parallel_of_experts(job: Job) -> Iterator[Violation]:
    tp = job.actor.tensor_model_parallel_size
    if job.table.dims.num_experts and tp > 1 and not job.actor.sequence_parallel:
        problem = f"false with TP {tp}: megatron-core trains experts under tensor parallelism only with it"
        yield Violation("actor_config.sequence_parallel", problem, "Set it to true, or TP to 1")


@_constraint("actor_config.seq_length", "With sequence parallelism TP divides the sequence length.")
def _sequence_length(job: Job) -> Iterator[Violation]:
    if job.actor.sequence_parallel:
        tp, length = job.actor.tensor_model_parallel_size, job.actor.seq_length
        if length % tp:
            yield Violation(
                "actor_config.seq_length", f"{tp} does not divide the sequence length {length}", "Use a multiple"
            )


@_constraint("actor_config.seq_length", "Sequences are not longer than the positions that the model has learned.")
def _learned_positions(job: Job) -> Iterator[Violation]:
    positions = job.table.gpt.get("max_sequence_length")
    if positions is not None and job.actor.seq_length > positions:
        yield Violation(
            "actor_config.seq_length",
            f"{job.actor.seq_length}, but the model has {positions} positions",
            f"Use at most {positions}",
        )


@_constraint(
    "actor_config.frozen_parameters",
    "Every pattern fits a parameter of the model, by one of its names in megatron-core's layer specs.",
)
def _frozen_parameters(job: Job) -> Iterator[Violation]:
    if not (patterns := job.actor.frozen_parameters):
        return
    names = [name for pattern in _megatron_names(job.table) for name in _with_adapters(pattern, job.actor.lora)]
    if unknown := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
        problem = f"no parameter is called {', '.join(unknown)}"
        yield Violation("actor_config.frozen_parameters", problem, f"Names are as in {names[0]}, {names[-1]}")


@_constraint("actor_config.frozen_parameters", "Something is left to train.", computing=True)
def _frozen_all(job: Job) -> Iterator[Violation]:
    if not (patterns := job.actor.frozen_parameters):
        return
    lora = job.actor.lora
    names = {name for pattern in _megatron_names(job.table) for name in _with_adapters(pattern, lora)}
    if lora is not None:
        names = {name for name in names if ".adapter." in name}
    if names and not names.difference(*(fnmatch.filter(names, pattern) for pattern in patterns)):
        problem = f"{', '.join(patterns[:5])}: they freeze every parameter that is trained"
        yield Violation("actor_config.frozen_parameters", problem, "Leave some out")


def _megatron_names(table: ModelTable) -> list[str]:
    """Every name that a parameter can have, in any layer spec, with the checkpoint's numbers of layers and experts."""
    return [
        name.format(**parameter.indices)
        for parameter in parameters_of(table)
        for name in table.rules[parameter.rule].names
        if name.startswith(parameter.location) and ("{expert}" in name) == parameter.is_expert
    ]


def _with_adapters(name: str, lora: LoraConfig | None) -> list[str]:
    """The names that a weight and its adapter have instead, where it gets one."""
    module = name.removesuffix(".weight")
    if lora is None or module == name or module.rpartition(".")[2] not in lora.target_modules:
        return [name]
    return [f"{module}.{part}.weight" for part in ("to_wrap", "adapter.linear_in", "adapter.linear_out")]


@_constraint("actor_config.overlap_param_gather", "Parameters are gathered by the distributed optimizer only.")
def _gather_needs_distributed_optimizer(job: Job) -> Iterator[Violation]:
    if job.actor.overlap_param_gather and not job.actor.use_distributed_optimizer:
        problem = "parameters are gathered by the distributed optimizer only"
        yield Violation("actor_config.overlap_param_gather", problem, "Set use_distributed_optimizer to true")


@_constraint("actor_config.overlap_param_gather", "An overlapped gather goes with overlapped gradient reduction.")
def _gather_needs_overlapped_reduction(job: Job) -> Iterator[Violation]:
    if job.actor.overlap_param_gather and not job.actor.overlap_grad_reduce:
        problem = "Megatron overlaps the gather only together with the gradient reduction"
        yield Violation("actor_config.overlap_param_gather", problem, "Set overlap_grad_reduce to true")


# -- inference -------------------------------------------------------------------------------------------------------


@_constraint(
    "generate_config.infer_tensor_parallel_size",
    "TP x PP divides the number of ranks; EP is 1 or a multiple of TP, and EP x PP divides the number of ranks.",
)
def _inference_world(job: Job) -> Iterator[Violation]:
    return _of_inference(inference.rank_violations(job.infer_sizes))


@_constraint(
    "generate_config.infer_tensor_parallel_size",
    "TP divides the attention heads; it divides the key/value heads or is a multiple.",
)
def _inference_heads(job: Job) -> Iterator[Violation]:
    return _of_inference(head_violations(job.table, job.infer_sizes.tensor, "tensor"))


@_constraint(
    "generate_config.infer_tensor_parallel_size",
    "TP divides everything that vLLM cuts: projections, the padded vocabulary and, without EP, each expert.",
)
def _inference_cuts(job: Job) -> Iterator[Violation]:
    return _of_inference(inference.cut_violations_of(job.infer_sizes, job.table))


@_constraint("generate_config.infer_pipeline_parallel_size", "Every stage has a layer, every rank of EP an expert.")
def _inference_counts(job: Job) -> Iterator[Violation]:
    return _of_inference(inference.count_violations(job.infer_sizes, job.table))


@_constraint("generate_config.infer_data_parallel_size", "TP x PP x DP is the number of ranks, where DP is given.")
def _inference_replicas(job: Job) -> Iterator[Violation]:
    tp, pp = job.generate.infer_tensor_parallel_size, job.generate.infer_pipeline_parallel_size
    replicas = job.generate.infer_data_parallel_size
    if replicas is not None and tp * pp * replicas != job.world_size:
        yield Violation(
            "generate_config.infer_data_parallel_size",
            f"TP {tp} x PP {pp} x DP {replicas} is not the world size {job.world_size}",
            "Leave it out: it is what remains of the world",
        )


@_constraint("generate_config.dtype", "vLLM's weights have the dtype in which they arrive.")
def _dtype(job: Job) -> Iterator[Violation]:
    if job.generate.dtype not in (None, job.wire_dtype):
        problem = f"{job.generate.dtype}, but weights arrive in {job.wire_dtype}"
        yield Violation("generate_config.dtype", problem, "Leave it out, or set compress_reshard and compression_dtype")


@_constraint("generate_config.compression_dtype", "Weights are compressed to a narrower dtype than they have.")
def _compression(job: Job) -> Iterator[Violation]:
    if job.generate.compress_reshard and (job.actor.params_dtype, job.wire_dtype) not in NARROWER:
        problem = f"{job.wire_dtype} is not narrower than the training dtype {job.actor.params_dtype}"
        yield Violation("generate_config.compression_dtype", problem, "Set compress_reshard to false")


QUANTIZATIONS: Mapping[str, tuple[str, ...]] = {"cpu": ("fp8_per_channel",), "cuda": ()}
"""Device type -> names of vLLM's methods whose weights were renewed and compared with vLLM's own load."""


@_constraint(
    "generate_config.quantization",
    "It is a method whose weights were renewed and compared with vLLM's own load, on some kind of device; the engine "
    "looks at its own.",
)
def _quantization(job: Job) -> Iterator[Violation]:
    chosen, tried = job.generate.quantization, {method for methods in QUANTIZATIONS.values() for method in methods}
    if chosen is not None and chosen not in tried:
        problem = f"{chosen!r}: renewing its weights from unquantised ones was tried on no device"
        yield Violation("generate_config.quantization", problem, f"Use {' or '.join(sorted(tried))}, or leave it out")


@_constraint("actor_config.lora", "Adapters go on linear layers that the model has, outside of experts.")
def _lora_targets(job: Job) -> Iterator[Violation]:
    if job.actor.lora is None:
        return
    modules = _linear_modules(job.table)
    targets = job.actor.lora.target_modules
    if unknown := [target for target in targets if target not in modules]:
        problem = f"target_modules {', '.join(unknown)}: no linear layers of this model are called so in Megatron"
        yield Violation("actor_config.lora", problem, f"Use some of {', '.join(sorted(modules))}")
    if in_experts := [target for target in targets if modules.get(target)]:
        problem = f"target_modules {', '.join(in_experts)} are parts of experts, where adapters are not supported"
        yield Violation("actor_config.lora", problem, "Leave them out")
    if not targets:
        yield Violation("actor_config.lora", "target_modules is empty: nothing would be trained", "Name some or none")


def _linear_modules(table: ModelTable) -> dict[str, bool]:
    """Megatron's names of the layers' linear modules -> whether experts have them."""
    found: dict[str, bool] = {}
    for parameter in parameters_of(table):
        module, _, kind = parameter.name.rpartition(".")
        if "linear_" in module and kind.startswith("weight"):
            name = module.rpartition(".")[2]
            found[name] = found.get(name, False) or "{expert}" in parameter.name
    return found


@_constraint("generate_config.lora_delivery", "Weights that are stored transposed get their adapters added.")
def _lora_transposed(job: Job) -> Iterator[Violation]:
    if job.generate.lora_delivery != "adapter" or job.actor.lora is None:
        return
    if any(parameter.packing.transposed for parameter in parameters_of(job.table)):
        problem = "adapter, but this model's checkpoint has transposed weights"
        yield Violation("generate_config.lora_delivery", problem, "Use merge")


@_constraint("generate_config.lora_delivery", "Adapters are delivered by themselves where there are adapters.")
def _lora_delivery(job: Job) -> Iterator[Violation]:
    if job.generate.lora_delivery == "adapter" and job.actor.lora is None:
        yield Violation(
            "generate_config.lora_delivery",
            "adapter, but no adapters are trained",
            "Set actor_config.lora or leave it out",
        )


@_constraint(
    "generate_config.lora_delivery", "vLLM has room for the rank of adapters that are delivered by themselves."
)
def _lora_rank(job: Job) -> Iterator[Violation]:
    lora = job.actor.lora
    if job.generate.lora_delivery == "adapter" and lora is not None and lora.rank > VLLM_LORA_RANKS[-1]:
        problem = f"adapter, but rank {lora.rank} is above vLLM's {VLLM_LORA_RANKS[-1]}"
        yield Violation("generate_config.lora_delivery", problem, "Use a smaller rank or merge")
