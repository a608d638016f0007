"""Configuration: `actor_config` (training) and `generate_config` (inference), in YAML or Python.

Training keys have Megatron-LM's names; inference keys are `infer_tensor_parallel_size` and its
siblings. The keys of parallel sizes are the fields of layouts/parallelism.py with the same
defaults, which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from hybrid_engine.files.documents import read_json
from hybrid_engine.layouts.parallelism import (
    LARGEST_SIZE,
    InferenceParallelism,
    Parallelism,
    ShardedParallelism,
    TrainParallelism,
    sizes_of,
)
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.models.derived import derived_table
from hybrid_engine.models.families import architecture_of

TRAINED_DRAFT: Final = "mtp"
"""vLLM's method of speculative decoding that drafts with the model's MTP layers."""

# -- types of values -------------------------------------------------------------------------------


def _not_a_flag(value: Any) -> Any:
    """Reject `true` and `false`, which pydantic would accept as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _relative_to_file(path: Path, info: ValidationInfo) -> Path:
    """Resolve a relative path against the file's directory, passed by `load_config` as context."""
    directory = (info.context or {}).get("directory")
    return path if directory is None else directory / path


def _always_a_path(value: Any, info: ValidationInfo) -> Any:
    """Resolve a path with `./` in front.

    `Path` would drop the `./`, and the rest could be the id of another model on the Hub.
    """
    if not isinstance(value, str) or not value.startswith("./"):
        return value
    directory = (info.context or {}).get("directory")
    return Path(directory or "").absolute() / value


# Upper bounds are far beyond any job, but small enough that code which allocates or counts up to
# them is fast and does not overflow.
Number = BeforeValidator(_not_a_flag)
Count = Annotated[int, Number, Field(ge=1, le=LARGEST_SIZE)]
Position = Annotated[int, Number, Field(ge=0, lt=LARGEST_SIZE)]
Positions = Annotated[tuple[Position, ...], Field(max_length=10_000)]
StageLayout = Annotated[str, Field(max_length=10_000)]
Tokens = Annotated[int, Number, Field(ge=1, le=2**30)]
Seed = Annotated[int, Number, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Number, Field(gt=0, le=1e30)]
NonNegative = Annotated[float, Number, Field(ge=0, le=1e30)]
Share = Annotated[float, Number, Field(gt=0, le=1)]
Decay = Annotated[float, Number, Field(ge=0, lt=1)]
Steps = Annotated[int, Number, Field(ge=0, le=2**40)]
Seconds = Annotated[float, Number, Field(ge=1, le=30 * 24 * 3600)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
Names = Annotated[tuple[Name, ...], Field(max_length=1000)]
Ports = Annotated[str, Field(pattern=r"^[0-9]{1,5}-[0-9]{1,5}$")]
File = Annotated[Path, AfterValidator(_relative_to_file)]
"""A path, relative to the directory of its configuration file."""
Model = Annotated[Path, BeforeValidator(_always_a_path)]
"""A directory, or an id on the Hub.

Ids do not begin with `./`, `../`, `/` or `~`; see `find_model`.
"""


class FromProgram(dict[str, pydantic.JsonValue]):
    """Engine arguments set by a program: `{"vllm": FromProgram(trust_remote_code=True)}`.

    YAML, JSON and command lines cannot create this type, so a configuration from an untrusted
    source cannot name code to run.
    """


def _keep_type(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Keep the type `FromProgram`, which pydantic would convert to a plain dictionary."""
    checked = check(value)
    return FromProgram(checked) if isinstance(value, FromProgram) else checked


EngineArguments = Annotated[
    dict[Name, pydantic.JsonValue],
    Field(max_length=100),
    pydantic.WrapValidator(_keep_type),
]
Fields = Annotated[dict[Name, pydantic.JsonValue], Field(max_length=1000)]
NOTHING: Final[dict[str, pydantic.JsonValue]] = {}
"""Empty default; pydantic copies it for each section."""
OF_VLLM: Final = "engine argument"
"""Mark of a key that vLLM gets under the same name.

Other arguments of files: IN_FILES in inference_rules.py.
"""
MAY_CHANGE: Final = "may change in a run"
"""Mark of a key that may differ in a resumed run.

Such keys are locations, times and amounts of memory use, speed, checks, and the training layout,
which changes the order of sums only. A key without it changes the computation.
"""
Value = TypeVar("Value")
Changeable = Annotated[Value, MAY_CHANGE]
ChangeableFlag = Changeable[bool]
Offload = Changeable[bool | Literal["auto"]]
Dtype = Literal["bfloat16", "float16", "float32"]
RecomputedModule = Literal[
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
]


class Section(pydantic.BaseModel):
    """Base class of the configuration's sections: immutable, without unknown keys.

    Attributes:
        page: page of the documentation that lists all keys.
    """

    page: ClassVar[str] = "docs/configuration.md"

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _names_of_false(cls, values: Any) -> Any:
        """Return `off` or `no` where a key has that value: YAML reads both words as false."""
        if not isinstance(values, dict):
            return values
        replaced = dict(values)
        for name, field in cls.model_fields.items():
            if replaced.get(name) is False:
                words = {"off", "no"}.intersection(get_args(field.annotation))
                replaced[name] = next(iter(words), False)
        return replaced


# -- sections --------------------------------------------------------------------------------------


class ScheduleConfig(Section):
    """`actor_config.optimizer.schedule`: learning rate and weight decay by update.

    Keys have the names of megatron-core's OptimizerParamScheduler.
    """

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """Shape after the warm-up. WSD (warmup-stable-decay) is constant until the last
    lr_wsd_decay_steps."""
    lr_warmup_init: NonNegative = 0.0
    """Learning rate of the first update; it rises linearly to `lr`."""
    lr_warmup_steps: Steps = 0
    """Updates of the warm-up."""
    lr_warmup_fraction: Decay | None = None
    """Warm-up as a fraction of lr_decay_steps, instead of lr_warmup_steps."""
    lr_decay_steps: Annotated[Steps, Field(ge=1)] | None = None
    """Updates until min_lr, including the warm-up. Required by all styles except constant."""
    min_lr: NonNegative = 0.0
    """Final learning rate."""
    lr_wsd_decay_steps: Annotated[Steps, Field(ge=1)] | None = None
    """Updates of WSD's decay, the last of lr_decay_steps."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay."""
    start_weight_decay: NonNegative | None = None
    """Weight decay of the first update; default: weight_decay."""
    end_weight_decay: NonNegative | None = None
    """Weight decay after weight_decay_incr_steps, at least start_weight_decay; default:
    weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Growth of the weight decay."""
    weight_decay_incr_steps: Annotated[Steps, Field(ge=1)] | None = None
    """Updates until end_weight_decay; default: lr_decay_steps."""

    @property
    def num_warmup_steps(self) -> int:
        """Updates of the warm-up, from lr_warmup_fraction or lr_warmup_steps."""
        if self.lr_warmup_fraction is None or self.lr_decay_steps is None:
            return self.lr_warmup_steps
        return int(self.lr_warmup_fraction * self.lr_decay_steps)

    @property
    def num_weight_decay_steps(self) -> int | None:
        """Updates until end_weight_decay; None if no key sets them."""
        return self.weight_decay_incr_steps or self.lr_decay_steps


class OptimizerConfig(Section):
    """`actor_config.optimizer`: Adam, with the names of megatron-core's OptimizerConfig."""

    lr: NonNegative = 1e-6
    """Learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    adam_beta1: Decay = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Decay = 0.95
    """Decay rate of the second moment."""
    adam_eps: Positive = 1e-8
    """Added to the denominator."""
    clip_grad: NonNegative = 1.0
    """Maximum norm of the gradient; 0 disables clipping."""
    schedule: ScheduleConfig | None = None
    """Learning rate and weight decay by update; default: constant."""

    @property
    def weight_decays(self) -> tuple[float, float]:
        """Weight decay of the first and of the last update."""
        schedule = self.schedule or ScheduleConfig()
        start = schedule.start_weight_decay
        end = schedule.end_weight_decay
        return (
            self.weight_decay if start is None else start,
            self.weight_decay if end is None else end,
        )


class OverridesConfig(Section):
    """`actor_config.overrides`: fields of megatron-core's configuration classes; see below."""

    transformer: Fields = NOTHING
    """Fields of TransformerConfig, e.g. `{attention_dropout: 0.1, moe_permute_fusion: true}`."""
    optimizer: Fields = NOTHING
    """Fields of OptimizerConfig, e.g. `{decoupled_weight_decay: false}`."""
    ddp: Fields = NOTHING
    """Fields of DistributedDataParallelConfig, e.g. `{bucket_size: 40000000}`."""


ALL_LINEAR = "all-linear"
"""PEFT's name of all linear layers but the head."""


class LoraConfig(Section):
    """`actor_config.lora`: low-rank adapters, trained on frozen weights."""

    rank: Count = 16
    """Inner dimension."""
    alpha: Positive = 32.0
    """Scale: alpha / rank."""
    target_modules: Names = (
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    )
    """Megatron's names of the linear layers, also of experts. With fsdp transformers' names, such
    as q_proj, or all-linear, its default: all but the head."""


class FsdpConfig(Section):
    """`actor_config.fsdp`, or `train_config.fsdp_config`: how FSDP2 splits the model.

    FSDP2 is `torch.distributed.fsdp.fully_shard`.
    """

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"] = "FULL_SHARD"
    """FULL_SHARD gathers a layer's parameters for each forward and backward pass; SHARD_GRAD_OP
    keeps them in between; HYBRID_SHARD is FULL_SHARD within each of `replicas` groups."""
    replicas: Count = 1
    """Groups of ranks, each with a copy of the model, for HYBRID_SHARD or SHARD_GRAD_OP."""
    mixed_precision: Literal["no", "amp", "bf16", "fp16"] = "no"
    """Dtype of the computation; parameters and reduced gradients keep theirs. amp is bf16."""
    activation_checkpointing: ChangeableFlag = False
    """Keep only each layer's input and recompute the rest."""

    def sizes(self, world_size: int) -> ShardedParallelism:
        """Return the sizes on `world_size` ranks."""
        return ShardedParallelism(world_size, self.replicas)


def _values_of(section: Section, side: type[Parallelism]) -> dict[str, Any]:
    """Return attribute -> size of `side`, from the keys of `section`."""
    return {size.name: getattr(section, size.key) for size in sizes_of(side)}


class ActorConfig(Section):
    """`actor_config`, the training side; keys have the names of Megatron-LM's arguments."""

    tensor_model_parallel_size: Changeable[Count] = 1
    """Ranks that split each layer (TP)."""
    pipeline_model_parallel_size: Changeable[Count] = 1
    """Pipeline stages (PP). The data parallel size is the rest of the world size."""
    virtual_pipeline_model_parallel_size: Changeable[Count | None] = None
    """Model chunks per stage (VPP)."""
    num_layers_in_first_pipeline_stage: Changeable[Count | None] = None
    """Layers of the first stage; others share the rest evenly."""
    num_layers_in_last_pipeline_stage: Changeable[Count | None] = None
    """The same for the last stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output head as a layer of the last stage."""
    pipeline_model_parallel_layout: StageLayout | None = None
    """All stages in Megatron's notation, e.g. `Et|t*2|tL`, instead of the four keys above."""
    noop_layers: Positions = ()
    """Positions (from 0) of no-op layers, which count for the pipeline split only."""
    hybrid_layer_pattern: StageLayout | None = None
    """Build megatron-core 0.19's HybridModel of this pattern, e.g. `*-*-|*E*E`."""
    context_parallel_size: Count = 1
    """Ranks that split the sequence (CP); replicas for a switch. More than 1 needs Transformer
    Engine."""
    expert_model_parallel_size: Changeable[Count] = 1
    """Data parallel ranks that share the experts (EP): EP 2 on two ranks with TP 1 is DP 2 for
    other layers."""
    expert_tensor_parallel_size: Changeable[Count | None] = None
    """Ranks that split each expert (ETP); default: TP."""
    make_vocab_size_divisible_by: Count = 128
    """The vocabulary is padded to a multiple of this times TP."""
    sequence_parallel: ChangeableFlag = False
    """Split norms and dropout along the sequence; needs TP > 1."""
    use_distributed_optimizer: ChangeableFlag = True
    """Split the optimizer state over data parallel ranks."""
    overlap_grad_reduce: ChangeableFlag = False
    """Reduce gradients during the backward pass."""
    overlap_param_gather: ChangeableFlag = False
    """Gather parameters during the forward pass; a switch waits for them."""
    params_dtype: Dtype = "bfloat16"
    """Dtype of the training weights; without compress_reshard also of vLLM's. Default with fsdp:
    float32. Adapters of fsdp are float32 in any."""
    micro_batch_size: Count = 1
    """Sequences per micro batch."""
    seq_length: Tokens = 1024
    """Maximum tokens of a row in training; shorter rows are not padded to it."""
    seed: Seed = 1234
    """Seed of random weights."""
    recompute_granularity: Changeable[Literal["full", "selective"] | None] = None
    """Recomputed activations: full, of whole layers; selective, of recompute_modules. Default:
    none; on a GPU without Transformer Engine, attention scores."""
    recompute_method: Changeable[Literal["uniform", "block"] | None] = None
    """With full: uniform keeps the input of each group of recompute_num_layers; block recomputes
    only the first recompute_num_layers of a stage or chunk."""
    recompute_num_layers: Changeable[Count | None] = None
    """See recompute_method."""
    recompute_modules: Changeable[
        Annotated[tuple[RecomputedModule, ...], Field(min_length=1, max_length=100)] | None
    ] = None
    """With selective: parts of a layer; default: core_attn."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """See below."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights; see below."""
    frozen_parameters: Names = ()
    """Patterns (`*`, `?`) of Megatron's names of parameters to freeze, e.g. `embedding.*`; with
    fsdp of transformers' names, e.g. `model.visual.*`."""
    overrides: OverridesConfig = OverridesConfig()
    """Other fields of Megatron's configuration; see below."""
    fsdp: FsdpConfig | None = None
    """Train with FSDP2, without Megatron's keys; see below."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _defaults_of_fsdp(cls, values: Any) -> Any:
        """Return the values with FSDP2's defaults: the dtype that it trains, PEFT's modules."""
        if not isinstance(values, dict) or values.get("fsdp") is None:
            return values
        values = {"params_dtype": "float32", **values}
        lora = values.get("lora")
        if isinstance(lora, LoraConfig):
            lora = lora.model_dump(exclude_unset=True)
        if isinstance(lora, dict):
            names = lora.get("target_modules", ALL_LINEAR)
            # PEFT takes all-linear as a text
            values["lora"] = {**lora, "target_modules": [names] if names == ALL_LINEAR else names}
        return values

    def sizes(self, world_size: int, *, cuts_whole_projections: bool = False) -> TrainParallelism:
        """Return Megatron's sizes on `world_size` ranks; see `TrainParallelism` for the flag."""
        values = _values_of(self, TrainParallelism)
        return TrainParallelism(world_size, **values, cuts_whole_projections=cuts_whole_projections)


class GenerateConfig(Section):
    """`generate_config`, the inference side and the switch."""

    infer_tensor_parallel_size: Count = 1
    """vLLM's TP."""
    infer_pipeline_parallel_size: Count = 1
    """vLLM's PP."""
    infer_expert_parallel_size: Count = 1
    """Ranks that share whole experts, a multiple of infer_tensor_parallel_size; 1: every expert is
    split over TP."""
    infer_data_parallel_size: Count | None = None
    """Replicas; default: the rest of the world size."""
    infer_rank_order: Literal["auto", "sequential"] = "auto"
    """auto gives each rank the shard of which its training weights contain most; sequential goes by
    rank."""
    offload_train_param: Offload = True
    """Offload parameters while vLLM generates. With auto they stay on the device if they fit
    (planning.md#what-stays)."""
    offload_train_grad: ChangeableFlag = True
    """Free the memory of gradients while vLLM generates; their values are dropped."""
    offload_train_optimizer: Offload = True
    """Offload main parameters and moments while vLLM generates. With auto they stay on the device
    if they fit."""
    suspend_communicators: ChangeableFlag = False
    """Release the device memory of the trainer's NCCL communicators while vLLM generates, several
    GB in large jobs (`ReshardReport.bytes_suspended`); needs NCCL 2.29.7. Until the next train or
    forward context, collectives over Megatron's groups or FSDP2's mesh are NCCL errors, and so over
    the default process group if FSDP2's mesh spans all ranks."""
    release_weights: ChangeableFlag = True
    """Free the inference weights during training; false keeps them beside all training state, and
    lets servers generate meanwhile (server_max_lag). With sleep mode the KV cache leaves a GPU in
    either case."""
    compress_reshard: bool = False
    """Cast weights to compression_dtype before sending; vLLM also computes in it."""
    compression_dtype: Dtype = "bfloat16"
    """Dtype for compress_reshard, narrower than params_dtype."""
    dtype: Dtype | None = None
    """Dtype of vLLM's weights; only the default is possible: compression_dtype with
    compress_reshard, else params_dtype."""
    max_model_len: Annotated[
        Annotated[int, Number, Field(ge=2, le=2**30)] | None,
        OF_VLLM,
    ] = None
    """Maximum tokens of prompt plus completion; default: the model's."""
    max_num_seqs: Annotated[Count, OF_VLLM, MAY_CHANGE] = 256
    """Maximum sequences decoded together."""
    gpu_memory_utilization: Annotated[Share, OF_VLLM, MAY_CHANGE] = 0.5
    """Fraction of a GPU for vLLM while it generates. Megatron's communicators and workspaces come
    later and stay: leave them some GB."""
    enforce_eager: Changeable[bool | None] = None
    """No graph capture and compilation; default: true on CPU, false on GPU."""
    kv_cache_mb: Changeable[Annotated[int, Number, Field(ge=1, le=2**24)] | None] = None
    """MiB of KV cache per rank; default: 256 on CPU, the rest of gpu_memory_utilization on GPU."""
    seed: Annotated[Seed, OF_VLLM] = 0
    """Seed of sampling without `Sampling.seed`."""
    router_replay: bool = False
    """Return the experts that vLLM computed each token with, for Megatron's routers
    (rl.md#router-replay)."""
    lora_delivery: Literal["merge", "adapter"] = "merge"
    """merge adds adapters to the weights before sending; adapter sends both, and vLLM adds them in
    its computation."""
    vllm: EngineArguments = NOTHING
    """Other engine arguments of vLLM; see below."""
    allow_version: bool = False
    """Accept an untested version of vLLM, unless it lacks names that are used."""
    quantization: Annotated[Name | None, OF_VLLM] = None
    """A method of vLLM that quantises while loading; or fp8, mxfp8, mxfp4 or nvfp4, for weights
    quantised in blocks before they are sent, which is the default if config.json has them; or none
    (trainers.md#rollouts-in-8-and-4-bits)."""
    transport: Changeable[Literal["auto", "shared_memory", "collective"]] = "auto"
    """auto reads mapped memory within a host and sends messages between hosts, once per host; the
    others force one transport."""
    incremental: Changeable[Literal["auto", "delta", "off"]] = "off"
    """auto skips weights whose bytes are unchanged and that vLLM still holds; delta also sends
    servers only the changed elements in messages (planning.md#send-only-what-changed)."""
    incremental_mb: Annotated[int, Number, Field(ge=0, le=2**24), MAY_CHANGE] = 1024
    """With incremental: MiB of inference weights per rank that stay on the device during training,
    those that change least first. No effect with release_weights: false, which keeps all."""
    bucket_mb: Changeable[Count] = 256
    """MiB per destination rank between two commits; more if a single module is larger."""
    check_nan: ChangeableFlag = True
    """Read every weight before a switch and refuse NaN, infinities, and overflow of
    compression_dtype."""
    verify: Changeable[Literal["off", "sample", "full"]] = "off"
    """Compare vLLM's weights with the trainer's bit by bit in every switch: all, or a sample
    (failures.md#wrong-bits)."""
    check_compute: Changeable[Literal["first", "always", "exact", "off"]] = "first"
    """Compare the computation of both sides: attention settings when the engine is built,
    log-probabilities in the first switch and when the model has changed, or in every switch
    (failures.md#another-function). exact allows no difference, in no switch and no rollout of
    `train`, and selects vLLM's batch-invariant kernels."""
    servers: Changeable[Names] = ()
    """vLLM servers (servers.md) that generate instead of vLLM in the training processes:
    http://HOST:PORT, or ray:NAME of a Ray actor. Keys of vLLM's sizes, memory and kernels then have
    no effect."""
    server_pause: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight when a server's weights leave: keep continues them afterwards, wait
    finishes them first, abort ends them with the tokens so far."""
    server_max_lag: Count = 1
    """With servers and release_weights: false, optimizer steps by which training may be ahead of
    the servers; further steps are refused until a publish. For no lag, leave release_weights
    out."""
    server_address: Changeable[Name | None] = None
    """Address at which servers on other hosts reach rank 0; default: all servers are on this
    host."""
    server_ports: Changeable[Ports | None] = None
    """FIRST-LAST, the ports that a firewall between trainers and servers opens
    (servers.md#across-hosts). Default: any."""
    server_take_over: ChangeableFlag = False
    """Take servers from other trainers that are still running."""
    server_allow_public: ChangeableFlag = False
    """Allow servers and a server_address at public addresses, without authentication or
    encryption."""
    trace: Changeable[File | None] = None
    """Timeline of all switches for https://ui.perfetto.dev; rank N > 0 writes FILE.rankN.json."""
    timeout_seconds: Changeable[Seconds] = 300.0
    """Longest wait for a peer (failures.md#every-wait), also in vLLM and for a replica that
    generates longer than another; at least 300 while engines are built."""

    @property
    def offloads(self) -> dict[Literal["param", "grad", "optimizer"], bool | Literal["auto"]]:
        """Kind of training state -> `offload_train_...`."""
        return {
            "param": self.offload_train_param,
            "grad": self.offload_train_grad,
            "optimizer": self.offload_train_optimizer,
        }

    @property
    def share_of_device(self) -> float:
        """Fraction of a GPU for vLLM; 1 with `kv_cache_mb`, which bounds the cache alone."""
        return self.gpu_memory_utilization if self.kv_cache_mb is None else 1.0

    def sizes(self, world_size: int) -> InferenceParallelism:
        """Return the parallel sizes on `world_size` ranks, with ranks in sequential order."""
        return InferenceParallelism(world_size, **_values_of(self, InferenceParallelism))

    def of_vllm(self) -> dict[str, Any]:
        """Return the engine arguments set by keys of the same name, without those left at None."""
        fields = type(self).model_fields.items()
        names = {name for name, field in fields if OF_VLLM in field.metadata}
        return self.model_dump(include=names, exclude_none=True)

    @property
    def drafts_with_mtp(self) -> bool:
        """True if vLLM drafts tokens with the model's layers for multi-token prediction (MTP)."""
        config = self.vllm.get("speculative_config")
        method = config.get("method") if isinstance(config, Mapping) else None
        return TRAINED_DRAFT in (method, self.vllm.get("spec_method"))

    def served(self, table: ModelTable) -> ModelTable:
        """Return the table of a model with the tensors that this vLLM reads."""
        has_drafter = self.drafts_with_mtp and table.dims.num_mtp_layers
        return replace(table, unserved=()) if has_drafter else table

    def served_dtype(self, params_dtype: Dtype) -> Dtype:
        """Return the dtype of the weights that vLLM receives from training in `params_dtype`."""
        return self.compression_dtype if self.compress_reshard else params_dtype


class CriticConfig(Section):
    """`critic_config`: a value model of the actor, trained by the actor's trainer in its sizes.

    Keys that are left out have the actor's values, except `optimizer`, `lora` and
    `frozen_parameters`, which are not shared.
    """

    model: Changeable[Model | None] = None
    """As the model at the top; default: the actor's. The output layer is new, with one output per
    token."""
    pipeline_model_parallel_layout: StageLayout | None = None
    """Stages of critic_config.model in Megatron's notation; default: even ones."""
    params_dtype: Dtype | None = None
    """Dtype of the weights; values are float32. Default: the actor's, float32 with fsdp."""
    micro_batch_size: Count | None = None
    """Sequences per micro batch."""
    seed: Seed | None = None
    """Seed of random weights; the output layer begins with zeros."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """As `actor_config.optimizer`."""
    offload: ChangeableFlag = True
    """Offload the critic outside its contexts, and the actor and vLLM's weights inside them."""


class HybridConfig(Section):
    """Whole configuration: both sides and the model."""

    model: Changeable[Model]
    """Directory of a Hugging Face model, relative to the configuration file, or an id on the Hub
    (`org/name`), which is downloaded. A path with `./` in front is never an id."""
    revision: Changeable[Name | None] = None
    """Branch, tag or commit of a model on the Hub; default: main."""
    random_weights: ChangeableFlag = False
    """Begin with random weights; the model's directory needs none."""
    actor_config: ActorConfig = ActorConfig()
    """Training side."""
    generate_config: GenerateConfig = GenerateConfig()
    """Inference side."""
    critic_config: CriticConfig | None = None
    """Value model that is trained with the actor; default: none."""
    device_budget_gib: Changeable[Positive | None] = None
    """Refuse the configuration if weights, gradients and optimizer state exceed these GiB on a
    device in any phase; without activations and KV cache. A worker on a GPU compares with all of
    its memory as well, where this can be planned."""

    @property
    def served_dtype(self) -> Dtype:
        """Dtype of the weights that vLLM receives."""
        return self.generate_config.served_dtype(self.actor_config.params_dtype)

    def train_sizes(self, world_size: int) -> TrainParallelism | ShardedParallelism:
        """Return the training side's sizes on `world_size` ranks, of Megatron or FSDP2."""
        actor = self.actor_config
        return actor.sizes(world_size) if actor.fsdp is None else actor.fsdp.sizes(world_size)

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        path = self.model / "config.json"
        return read_json(path, "model", "Name a Hugging Face model directory")

    def table(self) -> ModelTable:
        """Return the table of the model in the trainer, with the tensors that vLLM reads.

        FSDP2 trains transformers' own class, from which its table is derived. A written one knows
        Megatron's parameters as well.

        Raises UnknownModelError and ConfigError as `table_for` does.
        """
        hf_config = self.hf_config()
        if self.actor_config.fsdp is None:
            return self.generate_config.served(table_for(hf_config))
        return derived_table(hf_config, architecture_of(hf_config.get("architectures")))
