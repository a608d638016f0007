"""`plan --from verl`: reads a trainer configuration of verl as one of this project.

Names and defaults are those of verl 0.9.1, `verl/trainer/config` (ppo_trainer and ppo_megatron_trainer). A key that is
not there has verl's default. What takes memory and has no counterpart becomes a remark beside the plan.

A misspelt key would be the plan of another job, but verl has hundreds of keys that a plan does not need, and its
recipes add their own. So a key is refused if it was not read and its name is close to one that was, or if it is the
tail of one; verl's own keys of which that is true are in `_NOT_READ`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from hybrid_engine.cli.options import check_config
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import ConfigError, Violation, nearest, shortened
from hybrid_engine.files.documents import apply_overrides, read_yaml, section_at

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MEGATRON, _FSDP = f"{_ACTOR}.megatron", f"{_ACTOR}.fsdp_config"
_OPTIMIZER = f"{_ACTOR}.optim"
_OVERRIDE = re.compile(r"\+{0,2}([\w.]+=.*)", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")
_RESOLVE = "Write it out: run verl's command with `--cfg job --resolve`"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

_SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}
"""Keys of verl's `actor.megatron` with their defaults; `actor_config` has each under the same name."""
_TRANSFORMER = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
"""Keys of `override_transformer_config`, which have the same names there, too."""
_GENERATION = {
    "infer_tensor_parallel_size": ("tensor_model_parallel_size", 2),
    "infer_pipeline_parallel_size": ("pipeline_model_parallel_size", 1),
    "infer_expert_parallel_size": ("expert_parallel_size", 1),
    "gpu_memory_utilization": ("gpu_memory_utilization", 0.5),
    "max_num_seqs": ("max_num_seqs", 256),
    "enforce_eager": ("enforce_eager", False),
    "quantization": ("quantization", None),
    "release_weights": ("free_cache_engine", True),
    "vllm.max_num_batched_tokens": ("max_num_batched_tokens", 8192),
}
"""By the key of `generate_config`: the key of verl's `rollout` that it is read from, and its default."""
_ADAM = {"lr": ("lr", 1e-6), "weight_decay": ("weight_decay", 0.01), "clip_grad": ("clip_grad", 1.0)}
"""By the key of `actor_config.optimizer`: the key of verl's `actor.optim`, and its default."""
_NOT_READ = {
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_MEGATRON}.grad_offload",
    f"{_ROLLOUT}.moe_tensor_parallel_size",
    *(f"{_OPTIMIZER}.{name}" for name in ("lr_decay_steps", "lr_warmup_init", "lr_wsd_decay_steps")),
    f"{_OPTIMIZER}.lr_wsd_decay_style",
}
"""verl's keys that have no part in a plan, and names close to some that have."""
_NOT_COUNTED = {
    "actor_rollout_ref.model.lora_rank": "the plan is that of all weights, trained",
    "actor_rollout_ref.model.lora.rank": "the plan is that of all weights, trained",
    "actor_rollout_ref.model.enable_activation_offload": "activations are counted on the device",
    "actor_rollout_ref.model.mtp.enable": "no layers for it are counted",
    f"{_FSDP}.offload_policy": "all training state is counted on the device while it trains",
    f"{_ACTOR}.ppo_micro_batch_size": "not read: it is ppo_micro_batch_size_per_gpu that is",
    f"{_MEGATRON}.use_megatron_fsdp": "planned as Megatron's distributed optimizer",
    f"{_MEGATRON}.override_ddp_config": "not read",
    f"{_MEGATRON}.dynamic_context_parallel": "planned as sequences that no ranks share",
    f"{_MEGATRON}.qat.enable": "planned without quantization, in training and in vLLM",
    f"{_ACTOR}.optim.use_precision_aware_optimizer": "gradients and moments are counted in float32",
    f"{_ACTOR}.optim.override_optimizer_config": "not read",
    f"{_ROLLOUT}.engine_kwargs.vllm": "not read: set what takes memory as generate_config.vllm.NAME=VALUE",
    f"{_ACTOR}.use_kl_loss": "the reference policy's memory is not counted",
    "algorithm.use_kl_in_reward": "the reference policy's memory is not counted",
    "reward_model.enable": "the reward model's memory is not counted",
    "reward.reward_model.enable": "the reward model's memory is not counted",
}
"""Keys that the plan leaves out, and what is said beside it where one is set."""


@dataclass(frozen=True)
class VerlJob:
    """What was read: the configuration, the number of ranks in all and on each host, and remarks beside the plan."""

    config: HybridConfig
    ranks: int
    hosts_of: int
    remarks: Sequence[str]


def read_verl(words: Sequence[str], ranks: int | None, hosts_of: int | None) -> VerlJob:
    """Read the file and the overrides among the words of the command line. Overrides are of verl's keys or of ours, and
    ours win.

    `ranks`, `hosts_of`: in place of the file's. Raises ConfigError, by verl's keys where they are the cause.
    """
    overrides = [match[1] for word in words if (match := _OVERRIDE.fullmatch(word))]
    files = [word for word in words if not _OVERRIDE.fullmatch(word)]
    if len(files) > 1:
        raise ConfigError([Violation("CONFIG", f"more than one file: {shortened(each)}", "Name one") for each in files])
    values = read_yaml(files[0], "CONFIG") if files else {}
    ours = [word for word in overrides if re.split("[.=]", word)[0] in HybridConfig.model_fields]
    theirs = [word for word in overrides if word not in ours]
    found = [
        Violation(word.partition("=")[0], "is a key of neither", f"Did you mean {meant}?")
        for word in theirs
        if (meant := nearest(re.split("[.=]", word)[0], HybridConfig.model_fields))
    ]
    found += apply_overrides(values, theirs)
    reading = _Reading(values, found)
    reading.translate()
    num_hosts, of_host = reading.size("trainer.nnodes", 1), reading.size("trainer.n_gpus_per_node", 8)
    ranks = num_hosts * of_host if ranks is None else ranks
    if reading.strategy != "megatron":
        reading.shard(ranks)
    remarks = [*reading.remarks()]
    found += reading.misspelt()
    if found:
        raise ConfigError(found)
    translated: dict[Any, Any] = {}
    for key, value in reading.keys.items():
        *sections, name = key.split(".")
        section_at(translated, sections)[name] = value
    shown = yaml.safe_dump(translated, sort_keys=False).strip()
    found += apply_overrides(translated, ours)
    if found:
        raise ConfigError(found)
    given = {word.partition("=")[0] for word in ours}
    sources = {key: source for key, source in reading.sources.items() if key not in given}
    try:
        config = check_config(translated, ranks, None)
    except ConfigError as error:
        by_source = [
            replace(each, key=f"{sources[each.key]} ({each.key})") if each.key in sources else each
            for each in error.findings
        ]
        raise ConfigError(by_source) from error
    told = (f"Read from verl's configuration as:\n{shown}", *remarks)
    return VerlJob(config, ranks, of_host if hosts_of is None else hosts_of, told)


@dataclass
class _Reading:
    """The values of verl, and what they became: `keys` of ours by their full name, and verl's key for each.

    `read`: every path that was asked for, whether it is there or not.
    """

    values: Mapping[Any, Any]
    found: list[Violation]
    keys: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def get(self, path: str, default: Any = None, depth: int = 0) -> Any:
        """The value at a path, interpolations followed; `default` where there is none or null."""
        self.read.add(path)
        value: Any = self.values
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and "${" in value:
            if (match := _INTERPOLATION.fullmatch(value)) is None or depth > 8:
                self.found.append(Violation(path, f"{shortened(value)} is an interpolation", _RESOLVE))
                return default
            value = self.get(match[1], yaml.safe_load(match[2] or "null"), depth + 1)
        return default if value is None else value

    def size(self, path: str, default: int) -> int:
        """A number that is computed with; `default` with a violation for what is none."""
        value = self.get(path, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self.found.append(Violation(path, f"{shortened(value)} is not a number", "Use a whole number"))
        return default

    @property
    def strategy(self) -> Any:
        """The actor's, or what `model_engine` says of it, which is in no file that hydra has written out.

        Of an actor that has Megatron's sizes nobody guesses that it is one of FSDP.
        """
        named = self.get("model_engine", None if self.get(_MEGATRON) else "dp")
        return self.get(f"{_ACTOR}.strategy", "fsdp" if named == "dp" else named)

    def put(self, key: str, path: str, default: Any = None, value: Any = None) -> None:
        """Set a key of ours to the value at a path, or to one that was made from it."""
        value = self.get(path, default) if value is None else value
        if value is not None:
            self.keys[key], self.sources[key] = value, path

    def translate(self) -> None:
        """Set all keys but `actor_config.fsdp`, which depends on the number of ranks."""
        strategy = self.strategy
        if strategy not in ("megatron", "fsdp", "fsdp2"):
            self.found.append(Violation(f"{_ACTOR}.strategy", shortened(strategy), "Use megatron, fsdp2 or fsdp"))
        if self.get("actor_rollout_ref.hybrid_engine", True) is not True:
            problem = "false: training and generation on devices of their own"
            self.found.append(Violation("actor_rollout_ref.hybrid_engine", problem, "Here they share them: use true"))
        path = "actor_rollout_ref.model.path"
        if (model := self.get(path)) is None:
            self.found.append(Violation(path, "is missing", "Name a Hugging Face model: a directory or an id"))
        self.put("model", path, value=os.path.expanduser(str(model)))
        tokens = self.size(f"{_ROLLOUT}.prompt_length", 0) or self.size("data.max_prompt_length", 512)
        tokens += self.size(f"{_ROLLOUT}.response_length", 0) or self.size("data.max_response_length", 512)
        self.put("actor_config.seq_length", "data.max_response_length", value=tokens)
        self.put("generate_config.max_model_len", f"{_ROLLOUT}.max_model_len", tokens)
        self.put("actor_config.micro_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
        path = f"{_ACTOR}.ppo_max_token_len_per_gpu"
        most_tokens = self.size(path, 16384) * self.size(f"{_MEGATRON}.context_parallel_size", 1)
        if self.get(f"{_ACTOR}.use_dynamic_bsz") is True:
            self.put("actor_config.micro_batch_size", path, value=max(1, most_tokens // max(1, tokens)))
        for key, (name, verls) in _ADAM.items():
            self.put(f"actor_config.optimizer.{key}", f"{_OPTIMIZER}.{name}", verls)
        betas = self.get(f"{_OPTIMIZER}.betas", [0.9, 0.999])
        if isinstance(betas, list) and len(betas) == 2:
            self.put("actor_config.optimizer.adam_beta1", f"{_OPTIMIZER}.betas", value=betas[0])
            self.put("actor_config.optimizer.adam_beta2", f"{_OPTIMIZER}.betas", value=betas[1])
        else:
            self.found.append(Violation(f"{_OPTIMIZER}.betas", shortened(betas), "Use two numbers"))
        if strategy == "megatron":
            self._megatron()
        for key, (name, default) in _GENERATION.items():
            self.put(f"generate_config.{key}", f"{_ROLLOUT}.{name}", default)
        section, dtype = (_MEGATRON, "dtype") if strategy == "megatron" else (_FSDP, "model_dtype")
        trained = self._dtype(f"{section}.{dtype}", "bf16" if strategy == "megatron" else "fp32")
        self.put("actor_config.params_dtype", f"{section}.{dtype}", value=trained)
        if (served := self._dtype(f"{_ROLLOUT}.dtype", "bf16")) != trained:
            self.put("generate_config.compress_reshard", f"{_ROLLOUT}.dtype", value=True)
            self.put("generate_config.compression_dtype", f"{_ROLLOUT}.dtype", value=served)
        self.put("generate_config.offload_train_param", f"{section}.param_offload", False)
        self.put("generate_config.offload_train_optimizer", f"{section}.optimizer_offload", False)
        if strategy == "megatron":  # which offloads both buffers together; FSDP's gradients are gone after a step
            self.put("generate_config.offload_train_grad", f"{section}.param_offload", False)

    def _megatron(self) -> None:
        for name, default in _SIZES.items():
            self.put(f"actor_config.{name}", f"{_MEGATRON}.{name}", default)
        if self.keys["actor_config.tensor_model_parallel_size"] != 1:  # without TP it says nothing
            self.put("actor_config.sequence_parallel", f"{_MEGATRON}.sequence_parallel", True)
        self.put("actor_config.use_distributed_optimizer", f"{_MEGATRON}.use_distributed_optimizer", True)
        section = f"{_MEGATRON}.override_transformer_config"
        for name in _TRANSFORMER:
            self.put(f"actor_config.{name}", f"{section}.{name}")
        if self.get(f"{section}.recompute_granularity") != "selective":  # verl's default names modules all the same
            self.keys.pop("actor_config.recompute_modules", None)

    def shard(self, ranks: int) -> None:
        """Set `actor_config.fsdp`."""
        shards, path = self.size(f"{_FSDP}.fsdp_size", -1), f"{_FSDP}.reshard_after_forward"
        if is_kept := self.get(path, True) is False:
            self.put("actor_config.fsdp.sharding_strategy", path, value="SHARD_GRAD_OP")
        if 0 < shards < ranks:
            if ranks % shards:
                problem = f"{shards} does not divide {ranks} ranks"
                self.found.append(Violation(f"{_FSDP}.fsdp_size", problem, "Use a divisor, or -1"))
            if not is_kept:
                self.put("actor_config.fsdp.sharding_strategy", f"{_FSDP}.fsdp_size", value="HYBRID_SHARD")
            self.put("actor_config.fsdp.replicas", f"{_FSDP}.fsdp_size", value=ranks // shards)
        computed = {"bfloat16": "bf16", "float16": "fp16"}.get(self._dtype(f"{_FSDP}.dtype", "bf16"), "no")
        self.put("actor_config.fsdp.mixed_precision", f"{_FSDP}.dtype", value=computed)
        path = "actor_rollout_ref.model.enable_gradient_checkpointing"
        self.put("actor_config.fsdp.activation_checkpointing", path, True)

    def _dtype(self, path: str, default: str) -> str:
        name = str(self.get(path, default))
        return _DTYPES.get(name, name)

    def misspelt(self) -> Iterator[Violation]:
        """Yield keys that mean one that was read, once all have been."""
        for path in _paths(self.values):
            if meant := self._meant(path):
                yield Violation(path, "is not a key of verl", f"Did you mean {meant}?")

    def _meant(self, path: str) -> str | None:
        """The path that was read, or the section of one, of which this one is a misspelling or the tail."""
        section = ""
        for name in path.split("."):
            known = {read.removeprefix(section).split(".")[0] for read in self.read if read.startswith(section)}
            if not known or section + name in _NOT_READ:  # without any: a section that was read as a whole
                return None
            if name not in known:
                tail_of = (read for read in sorted(self.read) if read.endswith(f".{path}"))
                meant = nearest(name, known)
                return next(tail_of, None) if meant is None else section + meant
            section += f"{name}."
        return None

    def remarks(self) -> Iterator[str]:
        """Yield what takes memory, or moves, and is not in the plan."""
        if self.get(f"{_ROLLOUT}.name", "vllm") != "vllm":
            yield f"{_ROLLOUT}.name {shortened(self.get(f'{_ROLLOUT}.name'))}: planned as vLLM."
        if self.get(f"{_ACTOR}.use_dynamic_bsz") is True:
            number, tokens = (self.keys[f"actor_config.{name}"] for name in ("micro_batch_size", "seq_length"))
            yield f"{_ACTOR}.use_dynamic_bsz: planned as micro batches of {number} sequences of {tokens} tokens."
        for name in ("lr_warmup_steps", "lr_warmup_steps_ratio", "lr_decay_style", "lr_scheduler_type"):
            if (value := self.get(f"{_OPTIMIZER}.{name}", "constant")) not in ("constant", -1, 0):
                yield f"{_OPTIMIZER}.{name} {shortened(value)}: not read; see actor_config.optimizer.schedule."
        if self.strategy == "fsdp":
            yield f"{_ACTOR}.strategy fsdp: planned as FSDP2."
        if self.get(f"{_ROLLOUT}.free_cache_engine", True) is False:
            yield f"{_ROLLOUT}.free_cache_engine false: the KV cache is not counted while it trains."
        if self.get(f"{_ROLLOUT}.data_parallel_size", 1) != 1 and self.get(f"{_ROLLOUT}.expert_parallel_size", 1) == 1:
            yield f"{_ROLLOUT}.data_parallel_size: replicas that share nothing are planned."
        for path in (f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_FSDP}.ulysses_sequence_parallel_size"):
            if self.get(path, 1) != 1 and self.get(f"{_ACTOR}.use_dynamic_bsz") is not True:
                yield f"{path}: activations are counted of whole sequences."
        advantages = self.get("algorithm.adv_estimator", "gae")
        if self.get("critic.enable", advantages == "gae"):
            yield "critic: its memory is not counted; critic_config={} adds one in the actor's layout."
        section = f"{_MEGATRON}.override_transformer_config"
        read = (*_TRANSFORMER, "attention_backend")
        others = [name for name, value in dict(self.get(section, {})).items() if value and name not in read]
        if others:
            yield f"{section} ({', '.join(map(str, others))}): not read."
        for path, meaning in _NOT_COUNTED.items():
            if value := self.get(path):
                yield f"{path} {shortened(value)}: {meaning}."


def _paths(values: Mapping[Any, Any], section: str = "") -> Iterator[str]:
    """Yield the full name of every key that is not a section of others."""
    for key, value in values.items():
        path = f"{section}{key}"
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{path}.")
        else:
            yield path
