"""Conversion of a verl trainer configuration for `plan --from verl`.

Names and defaults are those of verl 0.9.1, `verl/trainer/config` (ppo_trainer and
ppo_megatron_trainer). Missing keys have verl's defaults. Settings that take memory and have no
counterpart here become remarks of the plan.

A misspelt key would plan another job, but verl has hundreds of keys that a plan does not need, and
its recipes add more. So a key is refused if it was not read and its name is close to a key that was
read, or if it is the tail of such a key. Real keys of verl to which this applies are in
`_NOT_READ`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import ConfigError, Violation, nearest, shortened
from hybrid_engine.files.documents import apply_overrides, read_yaml, section_at
from hybrid_engine.tools.cli.options import check_config

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MEGATRON = f"{_ACTOR}.megatron"
_FSDP = f"{_ACTOR}.fsdp_config"
_OPTIMIZER = f"{_ACTOR}.optim"
_OVERRIDE = re.compile(r"\+{0,2}([\w.]+=.*)", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")
_RESOLVE = "Write it out: run verl's command with `--cfg job --resolve`"
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}

_SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}
"""Key of verl's `actor.megatron` -> default. `actor_config` has keys of the same names."""
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
"""Keys of `override_transformer_config` with the same names in `actor_config`."""
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
"""Key of `generate_config` -> key of verl's `rollout`, and its default."""
_ADAM = {
    "lr": ("lr", 1e-6),
    "weight_decay": ("weight_decay", 0.01),
    "clip_grad": ("clip_grad", 1.0),
}
"""Key of `actor_config.optimizer` -> key of verl's `actor.optim`, and its default."""
_NOT_READ = {
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_MEGATRON}.grad_offload",
    f"{_ROLLOUT}.moe_tensor_parallel_size",
    *(
        f"{_OPTIMIZER}.{name}"
        for name in ("lr_decay_steps", "lr_warmup_init", "lr_wsd_decay_steps")
    ),
    f"{_OPTIMIZER}.lr_wsd_decay_style",
}
"""verl's keys that a plan does not need, but whose names are close to keys that it reads."""
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
    f"{_ROLLOUT}.engine_kwargs.vllm": (
        "not read: set what takes memory as generate_config.vllm.NAME=VALUE"
    ),
    f"{_ACTOR}.use_kl_loss": "the reference policy's memory is not counted",
    "algorithm.use_kl_in_reward": "the reference policy's memory is not counted",
    "reward_model.enable": "the reward model's memory is not counted",
    "reward.reward_model.enable": "the reward model's memory is not counted",
}
"""Key of verl that the plan ignores -> remark if it is set."""


@dataclass(frozen=True)
class VerlJob:
    """A converted verl configuration.

    Attributes:
        config: the checked configuration.
        ranks: number of ranks.
        hosts_of: ranks of one host.
        remarks: the converted keys, and settings that the plan ignores.
    """

    config: HybridConfig
    ranks: int
    hosts_of: int
    remarks: Sequence[str]


def read_verl(words: Sequence[str], ranks: int | None, hosts_of: int | None) -> VerlJob:
    """Convert the file and the overrides of a command line.

    Args:
        words: at most one file, and overrides of verl's keys or of this project's, which win.
        ranks, hosts_of: replace the file's numbers.

    Raises:
        ConfigError: with verl's keys where a value of verl is the cause.
    """
    overrides = [match[1] for word in words if (match := _OVERRIDE.fullmatch(word))]
    files = [word for word in words if not _OVERRIDE.fullmatch(word)]
    if len(files) > 1:
        raise ConfigError(
            [
                Violation(
                    "CONFIG",
                    f"more than one file: {shortened(file)}",
                    "Name one",
                    code="many-files",
                )
                for file in files
            ]
        )
    values = read_yaml(files[0], "CONFIG") if files else {}
    ours = []
    theirs = []
    violations = []
    for word in overrides:
        section = re.split("[.=]", word)[0]
        if section in HybridConfig.model_fields:
            ours.append(word)
            continue
        theirs.append(word)
        meant = nearest(section, HybridConfig.model_fields)
        if meant:
            key = word.partition("=")[0]
            problem = "is neither a key of verl nor of this project"
            remedy = f"Did you mean {meant}?"
            violations.append(Violation(key, problem, remedy, code="unknown-key"))
    violations += apply_overrides(values, theirs)
    reading = _Reading(values, violations)
    reading.translate()
    num_hosts = reading.size("trainer.nnodes", 1)
    ranks_per_host = reading.size("trainer.n_gpus_per_node", 8)
    if ranks is None:
        ranks = num_hosts * ranks_per_host
    if reading.strategy != "megatron":
        reading.shard(ranks)
    remarks = list(reading.remarks())
    violations += reading.misspelt()  # last, when all keys that matter have been read
    if violations:
        raise ConfigError(violations)
    translated: dict[Any, Any] = {}
    for key, value in reading.keys.items():
        *sections, name = key.split(".")
        section_at(translated, sections)[name] = value
    shown = yaml.safe_dump(translated, sort_keys=False).strip()
    violations += apply_overrides(translated, ours)
    if violations:
        raise ConfigError(violations)
    try:
        config = check_config(translated, ranks, None)
    except ConfigError as error:
        overridden = {word.partition("=")[0] for word in ours}
        findings = []
        for violation in error.findings:
            source = reading.sources.get(violation.key)
            if source is not None and violation.key not in overridden:
                violation = replace(violation, key=f"{source} ({violation.key})")
            findings.append(violation)
        raise ConfigError(findings) from error
    remarks.insert(0, f"Read from verl's configuration as:\n{shown}")
    return VerlJob(config, ranks, ranks_per_host if hosts_of is None else hosts_of, tuple(remarks))


@dataclass
class _Reading:
    """Conversion of verl's values in progress.

    Attributes:
        values: verl's configuration.
        violations: receives what cannot be converted.
        keys: full key of this project -> value.
        sources: full key of this project -> verl's path.
        read: all paths that were looked up, present or not.
    """

    values: Mapping[Any, Any]
    violations: list[Violation]
    keys: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def get(self, path: str, default: Any = None, depth: int = 0) -> Any:
        """Return the value at a path with interpolations resolved; `default` if missing or null."""
        self.read.add(path)
        value: Any = self.values
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and "${" in value:
            match = _INTERPOLATION.fullmatch(value)
            if match is None or depth > 8:  # interpolations may refer to each other
                problem = f"{shortened(value)} is an interpolation"
                self.violations.append(Violation(path, problem, _RESOLVE, code="interpolation"))
                return default
            alternative = yaml.safe_load(match[2] or "null")
            value = self.get(match[1], alternative, depth + 1)
        return default if value is None else value

    def size(self, path: str, default: int) -> int:
        """Return the number at a path; `default` with a violation if it is not a number."""
        value = self.get(path, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        problem = f"{shortened(value)} is not a number"
        self.violations.append(Violation(path, problem, "Use a whole number", code="wrong-value"))
        return default

    @property
    def strategy(self) -> Any:
        """The actor's strategy.

        `model_engine` implies it, but files that hydra wrote out lack that key. A file with
        Megatron's sizes and neither key is not assumed to be FSDP.
        """
        engine = self.get("model_engine", None if self.get(_MEGATRON) else "dp")
        return self.get(f"{_ACTOR}.strategy", "fsdp" if engine == "dp" else engine)

    def put(self, key: str, path: str, default: Any = None, value: Any = None) -> None:
        """Set `key` to `value`, or else to the value at `path`, which is recorded as its source."""
        value = self.get(path, default) if value is None else value
        if value is not None:
            self.keys[key] = value
            self.sources[key] = path

    def translate(self) -> None:
        """Set all keys except `actor_config.fsdp`, which depends on the number of ranks."""
        strategy = self.strategy
        if strategy not in ("megatron", "fsdp", "fsdp2"):
            key = f"{_ACTOR}.strategy"
            remedy = "Use megatron, fsdp2 or fsdp"
            self.violations.append(Violation(key, shortened(strategy), remedy, code="wrong-value"))
        key = "actor_rollout_ref.hybrid_engine"
        if self.get(key, True) is not True:
            problem = "false: training and generation use separate devices"
            remedy = "Here they share devices: use true"
            self.violations.append(Violation(key, problem, remedy, code="not-supported"))
        path = "actor_rollout_ref.model.path"
        model = self.get(path)
        if model is None:
            remedy = "Name a Hugging Face model: a directory or an id"
            self.violations.append(Violation(path, "is missing", remedy, code="is-missing"))
        self.put("model", path, value=os.path.expanduser(str(model)))
        self._translate_batch()
        self._translate_optimizer()
        if strategy == "megatron":
            self._megatron()
        for key, (name, default) in _GENERATION.items():
            self.put(f"generate_config.{key}", f"{_ROLLOUT}.{name}", default)
        if strategy == "megatron":
            section = _MEGATRON
            path = f"{section}.dtype"
            train_dtype = self._dtype(path, "bf16")
        else:
            section = _FSDP
            path = f"{section}.model_dtype"
            train_dtype = self._dtype(path, "fp32")
        self.put("actor_config.params_dtype", path, value=train_dtype)
        path = f"{_ROLLOUT}.dtype"
        served_dtype = self._dtype(path, "bf16")
        if served_dtype != train_dtype:
            self.put("generate_config.compress_reshard", path, value=True)
            self.put("generate_config.compression_dtype", path, value=served_dtype)
        self.put("generate_config.offload_train_param", f"{section}.param_offload", False)
        self.put("generate_config.offload_train_optimizer", f"{section}.optimizer_offload", False)
        if strategy == "megatron":
            # Megatron's param_offload includes gradients; FSDP frees its gradients after a step.
            self.put("generate_config.offload_train_grad", f"{section}.param_offload", False)

    def _translate_batch(self) -> None:
        """Set lengths of sequences, and the micro batch that a plan counts activations of."""
        prompt = self.size(f"{_ROLLOUT}.prompt_length", 0)
        tokens = prompt or self.size("data.max_prompt_length", 512)
        response = self.size(f"{_ROLLOUT}.response_length", 0)
        tokens += response or self.size("data.max_response_length", 512)
        self.put("actor_config.seq_length", "data.max_response_length", value=tokens)
        self.put("generate_config.max_model_len", f"{_ROLLOUT}.max_model_len", tokens)
        self.put("actor_config.micro_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
        path = f"{_ACTOR}.ppo_max_token_len_per_gpu"
        most_tokens = self.size(path, 16384) * self.size(f"{_MEGATRON}.context_parallel_size", 1)
        if self.get(f"{_ACTOR}.use_dynamic_bsz") is True:
            num_sequences = max(1, most_tokens // max(1, tokens))
            self.put("actor_config.micro_batch_size", path, value=num_sequences)

    def _translate_optimizer(self) -> None:
        for key, (name, default) in _ADAM.items():
            self.put(f"actor_config.optimizer.{key}", f"{_OPTIMIZER}.{name}", default)
        path = f"{_OPTIMIZER}.betas"
        betas = self.get(path, [0.9, 0.999])
        if isinstance(betas, list) and len(betas) == 2:
            self.put("actor_config.optimizer.adam_beta1", path, value=betas[0])
            self.put("actor_config.optimizer.adam_beta2", path, value=betas[1])
        else:
            problem = shortened(betas)
            self.violations.append(Violation(path, problem, "Use two numbers", code="wrong-value"))

    def _megatron(self) -> None:
        for name, default in _SIZES.items():
            self.put(f"actor_config.{name}", f"{_MEGATRON}.{name}", default)
        # Without TP, verl ignores the key, which is true by default.
        if self.keys["actor_config.tensor_model_parallel_size"] != 1:
            self.put("actor_config.sequence_parallel", f"{_MEGATRON}.sequence_parallel", True)
        path = f"{_MEGATRON}.use_distributed_optimizer"
        self.put("actor_config.use_distributed_optimizer", path, True)
        section = f"{_MEGATRON}.override_transformer_config"
        for name in _TRANSFORMER:
            self.put(f"actor_config.{name}", f"{section}.{name}")
        # verl names modules by default, also when they are not used.
        if self.get(f"{section}.recompute_granularity") != "selective":
            self.keys.pop("actor_config.recompute_modules", None)

    def shard(self, ranks: int) -> None:
        """Set `actor_config.fsdp`."""
        path = f"{_FSDP}.fsdp_size"
        num_shards = self.size(path, -1)
        strategy_path = f"{_FSDP}.reshard_after_forward"
        keeps_gathered = self.get(strategy_path, True) is False
        if keeps_gathered:
            self.put("actor_config.fsdp.sharding_strategy", strategy_path, value="SHARD_GRAD_OP")
        if 0 < num_shards < ranks:
            if ranks % num_shards:
                problem = f"{num_shards} does not divide {ranks} ranks"
                remedy = "Use a divisor, or -1"
                self.violations.append(Violation(path, problem, remedy, code="not-divisible"))
            if not keeps_gathered:
                self.put("actor_config.fsdp.sharding_strategy", path, value="HYBRID_SHARD")
            self.put("actor_config.fsdp.replicas", path, value=ranks // num_shards)
        path = f"{_FSDP}.dtype"
        dtype = self._dtype(path, "bf16")
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "no")
        self.put("actor_config.fsdp.mixed_precision", path, value=precision)
        path = "actor_rollout_ref.model.enable_gradient_checkpointing"
        self.put("actor_config.fsdp.activation_checkpointing", path, True)

    def _dtype(self, path: str, default: str) -> str:
        name = str(self.get(path, default))
        return _DTYPES.get(name, name)

    def misspelt(self) -> Iterator[Violation]:
        """Yield keys that are misspellings of keys that were read; to be called after all reads."""
        for path in _paths(self.values):
            meant = self._meant(path)
            if meant:
                problem = "is not a key of verl"
                yield Violation(path, problem, f"Did you mean {meant}?", code="unknown-key")

    def _meant(self, path: str) -> str | None:
        """Return the read path (or its section) of which `path` is a misspelling or tail."""
        section = ""
        for name in path.split("."):
            below = [read.removeprefix(section) for read in self.read if read.startswith(section)]
            known = {rest.split(".")[0] for rest in below}
            # Without known keys, the section was read as a whole.
            if not known or section + name in _NOT_READ:
                return None
            if name not in known:
                meant = nearest(name, known)
                if meant is not None:
                    return section + meant
                ends = (read for read in sorted(self.read) if read.endswith(f".{path}"))
                return next(ends, None)
            section += f"{name}."
        return None

    def remarks(self) -> Iterator[str]:
        """Yield settings that take memory or move data and are not in the plan."""
        is_dynamic = self.get(f"{_ACTOR}.use_dynamic_bsz") is True
        engine = self.get(f"{_ROLLOUT}.name", "vllm")
        if engine != "vllm":
            yield f"{_ROLLOUT}.name {shortened(engine)}: planned as vLLM."
        if is_dynamic:
            number = self.keys["actor_config.micro_batch_size"]
            tokens = self.keys["actor_config.seq_length"]
            yield (
                f"{_ACTOR}.use_dynamic_bsz: planned as micro batches of {number} "
                f"sequences of {tokens} tokens."
            )
        for name in (
            "lr_warmup_steps",
            "lr_warmup_steps_ratio",
            "lr_decay_style",
            "lr_scheduler_type",
        ):
            value = self.get(f"{_OPTIMIZER}.{name}", "constant")
            if value not in ("constant", -1, 0):
                yield (
                    f"{_OPTIMIZER}.{name} {shortened(value)}: not read; "
                    "see actor_config.optimizer.schedule."
                )
        if self.strategy == "fsdp":
            yield f"{_ACTOR}.strategy fsdp: planned as FSDP2."
        if self.get(f"{_ROLLOUT}.free_cache_engine", True) is False:
            setting = f"{_ROLLOUT}.free_cache_engine false"
            yield f"{setting}: the KV cache is not counted while it trains."
        has_replicas = self.get(f"{_ROLLOUT}.data_parallel_size", 1) != 1
        if has_replicas and self.get(f"{_ROLLOUT}.expert_parallel_size", 1) == 1:
            yield f"{_ROLLOUT}.data_parallel_size: replicas that share nothing are planned."
        for section in (_ACTOR, _FSDP):
            path = f"{section}.ulysses_sequence_parallel_size"
            if self.get(path, 1) != 1 and not is_dynamic:
                yield f"{path}: activations are counted of whole sequences."
        advantages = self.get("algorithm.adv_estimator", "gae")
        if self.get("critic.enable", advantages == "gae"):
            yield (
                "critic: its memory is not counted; "
                "critic_config={} adds one in the actor's layout."
            )
        section = f"{_MEGATRON}.override_transformer_config"
        others = []
        for name, value in dict(self.get(section, {})).items():
            if value and name not in (*_TRANSFORMER, "attention_backend"):
                others.append(str(name))
        if others:
            yield f"{section} ({', '.join(others)}): not read."
        for path, meaning in _NOT_COUNTED.items():
            value = self.get(path)
            if value:
                yield f"{path} {shortened(value)}: {meaning}."


def _paths(values: Mapping[Any, Any], section: str = "") -> Iterator[str]:
    """Yield the full names of all keys that are not sections."""
    for key, value in values.items():
        path = f"{section}{key}"
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{path}.")
        else:
            yield path
