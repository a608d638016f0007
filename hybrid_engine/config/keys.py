"""Configuration: `actor_config` (training) and `generate_config` (inference), from YAML or from Python.

Keys are those of Megatron-LM for training and, for inference, `infer_tensor_parallel_size` and its siblings. The keys
of parallel sizes are the fields of layouts/parallelism.py, with the same defaults; a test compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

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

# -- types of values -------------------------------------------------------------------------------------------------


def _not_a_flag(value: Any) -> Any:
    """Pydantic takes `true` for 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _beside_its_file(path: Path, info: ValidationInfo) -> Path:
    """A relative path begins at the configuration file's directory, which `load_config` gives as context."""
    directory = (info.context or {}).get("directory")
    return path if directory is None else directory / path


def _always_a_path(value: Any, info: ValidationInfo) -> Any:
    """`Path` would drop the `./`, and what is left may be an id on the Hub: somebody else's model."""
    if not isinstance(value, str) or not value.startswith("./"):
        return value
    return Path((info.context or {}).get("directory") or "").absolute() / value


# Upper bounds are far beyond any job, and small enough that nothing which is made of them takes long or overflows.
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
File = Annotated[Path, AfterValidator(_beside_its_file)]
"""A path; a relative one begins at the directory of the file that it is written in."""
Model = Annotated[Path, BeforeValidator(_always_a_path)]
"""A directory, or an id on the Hub, which `find_model` tells apart; none begins with `./`, `../`, `/` or `~`."""


class FromProgram(dict[str, pydantic.JsonValue]):
    """Engine arguments that a program gives in Python: `{"vllm": FromProgram(trust_remote_code=True)}`.

    Neither YAML nor JSON nor a command line can make one, so a configuration from elsewhere cannot name code to run.
    """


def _whose(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Pydantic would make a plain dictionary of it."""
    return FromProgram(check(value)) if isinstance(value, FromProgram) else check(value)


EngineArguments = Annotated[dict[Name, pydantic.JsonValue], Field(max_length=100), pydantic.WrapValidator(_whose)]
Fields = Annotated[dict[Name, pydantic.JsonValue], Field(max_length=1000)]
NOTHING: Final[dict[str, pydantic.JsonValue]] = {}
"""A default, of which pydantic gives each section a copy."""
OF_VLLM: Final = "engine argument"
"""Marks a key that vLLM gets under the same name: to pass another one, give it a key with this mark."""
MAY_CHANGE: Final = "may change in a run"
"""Marks a key that a resumed run may have otherwise: where something is, when memory moves and how much there is, how
fast it goes, what is checked. A key without it changes what is computed, or the form of a checkpoint."""
Dtype = Literal["bfloat16", "float16", "float32"]
RecomputedModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, hide_input_in_errors=True
    )


# -- sections --------------------------------------------------------------------------------------------------------


class ScheduleConfig(Section):
    """`actor_config.optimizer.schedule`: learning rate and weight decay by update, as megatron-core's
    OptimizerParamScheduler names it."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """How the learning rate changes after the warm-up. WSD (warmup-stable-decay) keeps it up to the last
    lr_wsd_decay_steps."""
    lr_warmup_init: NonNegative = 0.0
    """Learning rate of the first update of the warm-up, which rises to `lr` linearly."""
    lr_warmup_steps: Steps = 0
    """Updates of the warm-up; 0 has none."""
    lr_warmup_fraction: Decay | None = None
    """The same as a share of lr_decay_steps, in place of lr_warmup_steps."""
    lr_decay_steps: Annotated[Steps, Field(ge=1)] | None = None
    """Updates until min_lr, the warm-up included; later ones use min_lr. All styles but constant need it."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end."""
    lr_wsd_decay_steps: Annotated[Steps, Field(ge=1)] | None = None
    """With WSD, the updates of the decay, which are the last of lr_decay_steps."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """With WSD, the form of the decay."""
    start_weight_decay: NonNegative | None = None
    """Weight decay of the first update; default: weight_decay, from the first to the last."""
    end_weight_decay: NonNegative | None = None
    """Weight decay after weight_decay_incr_steps; no less than start_weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay grows from start_weight_decay to end_weight_decay."""
    weight_decay_incr_steps: Annotated[Steps, Field(ge=1)] | None = None
    """Updates until end_weight_decay; default: lr_decay_steps."""

    @property
    def num_warmup_steps(self) -> int:
        """Updates of the warm-up, by whichever key says so."""
        if self.lr_warmup_fraction is None or self.lr_decay_steps is None:
            return self.lr_warmup_steps
        return int(self.lr_warmup_fraction * self.lr_decay_steps)

    @property
    def num_weight_decay_steps(self) -> int | None:
        """Updates until end_weight_decay; None if nothing says so."""
        return self.weight_decay_incr_steps or self.lr_decay_steps


class OptimizerConfig(Section):
    """`actor_config.optimizer`: Adam, as megatron-core's OptimizerConfig names it."""

    lr: NonNegative = 1e-6
    """Learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    adam_beta1: Decay = 0.9
    """Decay of the first moment."""
    adam_beta2: Decay = 0.95
    """Decay of the second moment."""
    adam_eps: Positive = 1e-8
    """Added to the denominator."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    schedule: ScheduleConfig | None = None
    """Change learning rate and weight decay with every update; see below. Default: they stay, and
    `worker.set_learning_rate` sets them."""

    @property
    def weight_decays(self) -> tuple[float, float]:
        """Weight decay of the first update and of the last."""
        schedule = self.schedule or ScheduleConfig()
        given = schedule.start_weight_decay, schedule.end_weight_decay
        start, end = (self.weight_decay if value is None else value for value in given)
        return start, end


class OverridesConfig(Section):
    """`actor_config.overrides`: fields of megatron-core's own configuration classes, by its names; see tuning.md."""

    transformer: Fields = NOTHING
    """Fields of TransformerConfig, e.g. `{attention_dropout: 0.1, moe_permute_fusion: true}`."""
    optimizer: Fields = NOTHING
    """Fields of megatron-core's OptimizerConfig, e.g. `{decoupled_weight_decay: false}`."""
    ddp: Fields = NOTHING
    """Fields of DistributedDataParallelConfig, e.g. `{bucket_size: 40000000}`."""


class LoraConfig(Section):
    """`actor_config.lora`: train low-rank adapters on frozen weights."""

    rank: Count = 16
    """Inner dimension of an adapter."""
    alpha: Positive = 32.0
    """An adapter's product is scaled by alpha / rank."""
    target_modules: Names = (
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    )
    """Megatron's names of the linear layers that get one."""


class FsdpConfig(Section):
    """`actor_config.fsdp`, or `train_config.fsdp_config`: how `torch.distributed.fsdp.fully_shard` splits the model."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"] = "FULL_SHARD"
    """FULL_SHARD gathers a layer's parameters for its forward and again for its backward pass; SHARD_GRAD_OP keeps them
    in between, also within each of `replicas` groups of ranks; HYBRID_SHARD is FULL_SHARD within each of them."""
    replicas: Count = 1
    """Groups of ranks that have a copy each; more than 1 with HYBRID_SHARD or SHARD_GRAD_OP."""
    mixed_precision: Literal["no", "amp", "bf16", "fp16"] = "no"
    """Dtype in which layers compute; parameters and reduced gradients stay in their own dtype. amp is bf16."""
    activation_checkpointing: Annotated[bool, MAY_CHANGE] = False
    """Keep a layer's input alone for the backward pass, which computes the rest of the layer again."""

    def sizes(self, world_size: int) -> ShardedParallelism:
        """The sizes on `world_size` ranks."""
        return ShardedParallelism(world_size, self.replicas)


def _values_of(section: Section, side: type[Parallelism]) -> dict[str, Any]:
    """The sizes that a section has the keys of, by attribute."""
    return {size.name: getattr(section, size.key) for size in sizes_of(side)}


class ActorConfig(Section):
    """`actor_config`, the training side; keys as Megatron-LM names its arguments."""

    tensor_model_parallel_size: Count = 1
    """Ranks that split each layer."""
    pipeline_model_parallel_size: Count = 1
    """Stages that split the layers. Data parallel size is what remains of the world."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Model chunks per stage, for the interleaved schedule."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first stage; the others share what remains evenly."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers of the last stage; the others share what remains evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output head as a layer of the last stage."""
    pipeline_model_parallel_layout: StageLayout | None = None
    """Megatron's own notation of every stage, e.g. `Et|t*2|tL`; instead of the four keys above."""
    noop_layers: Positions = ()
    """Positions (from 0) of no-op layers; they count for the pipeline split, not for the checkpoint."""
    hybrid_layer_pattern: StageLayout | None = None
    """Build a HybridModel (megatron-core 0.19) of this pattern, e.g. `*-*-|*E*E`: attention and MLP are layers each."""
    context_parallel_size: Count = 1
    """Ranks that split the sequence; replicas for a switch. Training with more than 1 needs Transformer Engine."""
    expert_model_parallel_size: Count = 1
    """Ranks that share the experts, whole ones each, out of the data parallel ranks: EP 2 on two ranks with TP 1 is DP
    2 for all else."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that split each expert; default: tensor_model_parallel_size."""
    make_vocab_size_divisible_by: Count = 128
    """Training pads the vocabulary to a multiple of this times the tensor parallel size."""
    sequence_parallel: bool = False
    """Split norms and dropout along the sequence too; needs tensor parallelism."""
    use_distributed_optimizer: bool = True
    """Split the optimizer's state over data parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward pass runs; a switch finishes pending gathers first."""
    params_dtype: Dtype = "bfloat16"
    """Dtype of the training weights; on the wire and in vLLM too, without generate_config.compress_reshard."""
    micro_batch_size: Count = 1
    """Sequences per micro batch."""
    seq_length: Tokens = 1024
    """Most tokens of a row in training; shorter batches stay as they are."""
    seed: Seed = 1234
    """Seed of weight initialisation."""
    recompute_granularity: Annotated[Literal["full", "selective"] | None, MAY_CHANGE] = None
    """What the backward pass computes again in place of keeping it: full, whole layers; selective, recompute_modules.
    Default: nothing; attention scores on a GPU without Transformer Engine."""
    recompute_method: Annotated[Literal["uniform", "block"] | None, MAY_CHANGE] = None
    """With full: uniform, all layers, in groups of recompute_num_layers of which the input is kept; block, the first
    recompute_num_layers of a stage (or chunk), each by itself."""
    recompute_num_layers: Annotated[Count | None, MAY_CHANGE] = None
    """See recompute_method."""
    recompute_modules: Annotated[
        Annotated[tuple[RecomputedModule, ...], Field(min_length=1, max_length=100)] | None, MAY_CHANGE
    ] = None
    """With selective: which parts of a layer; default: core_attn."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """See below."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights; see below."""
    frozen_parameters: Names = ()
    """Patterns (`*`, `?`) of Megatron's parameter names that are not trained, e.g. `embedding.*`."""
    overrides: OverridesConfig = OverridesConfig()
    """Further fields of Megatron's own configuration; see below."""
    fsdp: FsdpConfig | None = None
    """Train with FSDP2 in place of Megatron, whose own keys are then left out; see below."""

    def sizes(self, world_size: int, *, cuts_whole_projections: bool = False) -> TrainParallelism:
        """Megatron's sizes on `world_size` ranks; `cuts_whole_projections` as in `TrainParallelism`."""
        values = _values_of(self, TrainParallelism)
        return TrainParallelism(world_size, **values, cuts_whole_projections=cuts_whole_projections)


class GenerateConfig(Section):
    """`generate_config`, the inference side and the switch."""

    infer_tensor_parallel_size: Count = 1
    """vLLM's tensor parallel size."""
    infer_pipeline_parallel_size: Count = 1
    """vLLM's pipeline parallel size."""
    infer_expert_parallel_size: Count = 1
    """Ranks that share the experts, whole ones each: a multiple of infer_tensor_parallel_size. 1 cuts every expert over
    the tensor parallel ranks instead."""
    infer_data_parallel_size: Count | None = None
    """Replicas; default: what remains of the world."""
    infer_rank_order: Literal["auto", "sequential"] = "auto"
    """auto gives each rank the inference shard of which it already holds most; sequential counts ranks in order."""
    offload_train_param: Annotated[bool, MAY_CHANGE] = True
    """Take parameters off the device while vLLM generates."""
    offload_train_grad: Annotated[bool, MAY_CHANGE] = True
    """Take gradients off the device while vLLM generates; they are dropped, not copied."""
    offload_train_optimizer: Annotated[bool, MAY_CHANGE] = True
    """Take main parameters and moments off the device while vLLM generates."""
    release_weights: Annotated[bool, MAY_CHANGE] = True
    """Free the inference weights while Megatron trains; false keeps their memory for the next switch, so that they and
    all training state must fit together. The KV cache's leaves a GPU in either case, with sleep mode. With servers,
    false lets them draw tokens while trainers train; see server_max_lag."""
    compress_reshard: bool = False
    """Send weights in compression_dtype: cast where they come from, which is also what vLLM computes with."""
    compression_dtype: Dtype = "bfloat16"
    """See compress_reshard; narrower than params_dtype."""
    dtype: Dtype | None = None
    """Dtype of vLLM's weights; default and only choice: compression_dtype with compress_reshard, else params_dtype."""
    max_model_len: Annotated[Annotated[int, Number, Field(ge=2, le=2**30)] | None, OF_VLLM] = None
    """Longest prompt plus completion, in tokens; default: the model's."""
    max_num_seqs: Annotated[Count, OF_VLLM, MAY_CHANGE] = 256
    """Sequences that are decoded together."""
    gpu_memory_utilization: Annotated[Share, OF_VLLM, MAY_CHANGE] = 0.5
    """Share of a GPU that vLLM may use while it generates. Its KV cache is measured before Megatron's communicators and
    workspaces exist, which stay on the device: leave them a few GB."""
    enforce_eager: Annotated[bool | None, MAY_CHANGE] = None
    """No graph capture and no compilation; default: true on CPU, false on GPU."""
    kv_cache_mb: Annotated[Annotated[int, Number, Field(ge=1, le=2**24)] | None, MAY_CHANGE] = None
    """KV cache per rank, in MiB; default: 256 on CPU, what gpu_memory_utilization leaves on GPU."""
    seed: Annotated[Seed, OF_VLLM] = 0
    """Seed of what is sampled without a `Sampling.seed`."""
    lora_delivery: Literal["merge", "adapter"] = "merge"
    """merge adds adapters to the weights on their way; adapter sends both and lets vLLM add them while it computes."""
    vllm: EngineArguments = NOTHING
    """Further engine arguments of vLLM, by its own names, e.g. `attention_backend`; see tuning.md. None that follows
    from other keys, or that a switch does not go with; what may import, open or fetch something, only from a program.
    vLLM's names are checked when the engine is built."""
    allow_version: bool = False
    """Take a vLLM that was not tested. What it lacks of what is used here is still refused, by name."""
    quantization: Annotated[Name | None, OF_VLLM] = None
    """vLLM's quantization method for its weights; what it can be is checked against the device."""
    transport: Annotated[Literal["auto", "shared_memory", "collective"], MAY_CHANGE] = "auto"
    """auto pulls from mapped memory on one host and sends messages across, once per host; the others force one way."""
    incremental: Annotated[Literal["auto", "delta", "off"], MAY_CHANGE] = "off"
    """auto does not send weights whose bytes are those that vLLM got last, as far as incremental_mb lets them
    stay there. delta also sends, of messages between hosts, only the positions and values that changed, where that is
    less; both ends keep copies of the last messages in host memory for it."""
    incremental_mb: Annotated[int, Number, Field(ge=0, le=2**24), MAY_CHANGE] = 1024
    """With incremental: MiB of inference weights per rank that stay on the device while it trains, those first that no
    step changes. Without effect with release_weights: false, where all stay."""
    bucket_mb: Annotated[Count, MAY_CHANGE] = 256
    """Destination MiB per rank that move between two commits; more where one module, as all experts of a layer, has
    more."""
    prefetch: Annotated[Literal["auto", "off"], MAY_CHANGE] = "off"
    """auto moves training state ahead of time: it begins to come back while a rollout's last sequences are generated,
    and optimizer state leaves while inference weights come. Memory stays within the peak of the switches."""
    prefetch_share: Annotated[Share, MAY_CHANGE] = 0.1
    """With prefetch, the share of a replica's sequences that are left when training state begins to come back. On CPU,
    where copies take a core from decoding, it begins when none is left."""
    prefetch_mb: Annotated[Annotated[int, Number, Field(ge=1, le=2**24)] | None, MAY_CHANGE] = None
    """With prefetch, most MiB that come back to a rank during a rollout, whatever the peak of the switches; on GPU no
    more than is free there beside gpu_memory_utilization."""
    check_nan: Annotated[bool, MAY_CHANGE] = True
    """Read every weight once before a switch and refuse NaN, infinities, and what would be infinite in
    compression_dtype."""
    verify: Annotated[Literal["off", "sample", "full"], MAY_CHANGE] = "off"
    """Compare vLLM's weights with training's in the switch, bit by bit: all of them, or a few tensors each time. A
    difference fails the switch, and the state before is restored."""
    check_compute: Annotated[Literal["first", "always", "off"], MAY_CHANGE] = "first"
    """Compare the attention of vLLM's layers with that of the trainer's when the engine is built, and vLLM's
    log-probabilities of a few fixed tokens with the trainer's own, in the first switch or in each. Where they differ,
    the two compute different models: building or the switch fails, and the state before is restored. Where either side
    cannot compute them, a line in the log says why."""
    servers: Annotated[Names, MAY_CHANGE] = ()
    """vLLM servers that generate in place of a vLLM in the processes that train, see servers.md: http://HOST:PORT, or
    ray:NAME of a Ray actor. Their sizes, memory and kernels are their own: keys for these say nothing then."""
    server_pause: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of requests that are in flight when a server's weights leave: they go on afterwards, are finished
    first, or end with the tokens so far."""
    server_max_lag: Count = 1
    """With servers and release_weights: false, most optimizer steps by which trainers are ahead of the weights that
    servers draw with: a step beyond is refused until weights are published. For none, leave release_weights out."""
    server_address: Annotated[Name | None, MAY_CHANGE] = None
    """Address of this host at which servers on other hosts reach the first rank; default: all are on this host."""
    server_ports: Annotated[Ports | None, MAY_CHANGE] = None
    """FIRST-LAST, the ports that a firewall between trainers and servers opens. The kernel chooses those at which both
    listen, so net.ipv4.ip_local_port_range of every host (or pod) must be within; elsewhere the job is refused before
    anything listens. Default: any port."""
    server_take_over: Annotated[bool, MAY_CHANGE] = False
    """Take servers from other trainers that live. Without it a server refuses whoever is not its own trainers until
    these have ended."""
    server_allow_public: Annotated[bool, MAY_CHANGE] = False
    """Take servers, and a server_address, at addresses that are neither of this host nor private: vLLM's routes for
    weights, and the store where ranks meet, authenticate nobody."""
    trace: Annotated[File | None, MAY_CHANGE] = None
    """A file for a timeline of all switches on all ranks, which https://ui.perfetto.dev shows; default: none."""
    timeout_seconds: Annotated[Seconds, MAY_CHANGE] = 300.0
    """Longest wait for a peer in seconds, also in vLLM and for a replica that generates longer than another. While
    engines are built it is 300 at least."""

    def sizes(self, world_size: int) -> InferenceParallelism:
        """The parallel sizes on `world_size` ranks, in the order that was found for them."""
        return InferenceParallelism(world_size, **_values_of(self, InferenceParallelism))

    def of_vllm(self) -> dict[str, Any]:
        """The engine arguments that are keys of the same name; without those that are left to vLLM."""
        names = (name for name, key in type(self).model_fields.items() if OF_VLLM in key.metadata)
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def served_dtype(self, params_dtype: Dtype) -> Dtype:
        """The dtype in which vLLM receives weights of training dtype `params_dtype`."""
        return self.compression_dtype if self.compress_reshard else params_dtype


class CriticConfig(Section):
    """`critic_config`: a value model beside the actor, trained by Megatron in the actor's parallel sizes.

    Keys that are left out are the actor's, but for `optimizer`, `lora` and `frozen_parameters`: these are not shared.
    """

    model: Annotated[Model | None, MAY_CHANGE] = None
    """Directory of a Hugging Face model, or its id on the Hub; default: the actor's. Training begins with its weights
    but for the output layer, which is one number per token."""
    pipeline_model_parallel_layout: StageLayout | None = None
    """Stages of a model of its own, in Megatron's notation, as many as the actor's; default: even ones."""
    params_dtype: Dtype | None = None
    """Dtype of the weights; values are float32."""
    micro_batch_size: Count | None = None
    """Sequences per micro batch."""
    seed: Seed | None = None
    """Seed of weight initialisation, but for the head, which begins with zeros."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """As `actor_config.optimizer`."""
    offload: Annotated[bool, MAY_CHANGE] = True
    """Take the critic off the device outside its contexts, and the actor and vLLM's weights inside them. With false it
    stays there beside them."""


class HybridConfig(Section):
    """Both sides and the model."""

    model: Annotated[Model, MAY_CHANGE]
    """Directory of a Hugging Face model, or its id on the Hub (`org/name`), from where it is downloaded into the cache.
    A relative path begins at the directory of the file that it is written in; one with `./` in front is never an id.
    Training begins with its weights."""
    revision: Annotated[Name | None, MAY_CHANGE] = None
    """Branch, tag or commit of a model on the Hub; default: main."""
    random_weights: Annotated[bool, MAY_CHANGE] = False
    """Begin with random weights; the model's directory needs none then."""
    actor_config: ActorConfig = ActorConfig()
    """Training side."""
    generate_config: GenerateConfig = GenerateConfig()
    """Inference side."""
    critic_config: CriticConfig | None = None
    """A value model beside the actor; see below. Default: none."""
    device_budget_gib: Annotated[Positive | None, MAY_CHANGE] = None
    """Most GiB of weights, gradients and optimizer state on a device, in every phase; what cannot keep within it is
    refused. Activations and KV cache are beside it. Default: not checked."""

    @property
    def served_dtype(self) -> Dtype:
        """The dtype in which vLLM receives weights."""
        return self.generate_config.served_dtype(self.actor_config.params_dtype)

    def train_sizes(self, world_size: int) -> TrainParallelism | ShardedParallelism:
        """The training side's sizes on `world_size` ranks, whoever trains."""
        actor = self.actor_config
        return actor.sizes(world_size) if actor.fsdp is None else actor.fsdp.sizes(world_size)

    def hf_config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return read_json(self.model / "config.json", "model", "Name a Hugging Face model directory")
