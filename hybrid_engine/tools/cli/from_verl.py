"""Conversion of a verl trainer configuration for `plan --from verl`.

Names and defaults are those of verl 0.9.1, `verl/trainer/config` (ppo_trainer and
ppo_megatron_trainer). Missing keys have verl's defaults. Every other key becomes a remark of the
plan: it is not counted, or refused by a job, or not read.

A misspelt key would plan another job. So a key is refused if it was not read and its name is close
to a key that was read, or if it is part of such a key. Real keys of verl to which this applies are
in `_NOT_READ`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import (
    ConfigError,
    Violation,
    Violations,
    nearest,
    require_none,
    shortened,
)
from hybrid_engine.files.documents import apply_overrides, read_yaml, section_at
from hybrid_engine.tools.cli.options import check_config, split_words

_MAIN = "actor_rollout_ref."
_IN_MAIN = re.compile(r"(actor|rollout|model|hybrid_engine)(\.|$)")
"""Start of a path below `_MAIN`, which paths in this file leave out."""
_MEGATRON = "actor.megatron"
_FSDP = "actor.fsdp_config"
# Hydra's KEY=VALUE, +KEY=VALUE and ++KEY=VALUE.
_OVERRIDE = re.compile(r"\+{0,2}([\w.]+=.*)", re.DOTALL)
# ${a.b} and ${oc.select:a.b,default}.
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
    "vllm.enable_prefix_caching": ("enable_prefix_caching", True),
}
"""Key of `generate_config` -> key of verl's `rollout`, and its default."""
_ADAM = {"lr": 1e-6, "weight_decay": 0.01, "clip_grad": 1.0}
"""Key of verl's `actor.optim` -> default. `actor_config.optimizer` has keys of the same names."""
_NOT_READ = {
    "actor.ppo_micro_batch_size",
    "actor.ppo_mini_batch_size",
    "actor.megatron.grad_offload",
    "rollout.moe_tensor_parallel_size",
    "actor.optim.lr_decay_steps",
    "actor.optim.lr_warmup_init",
    "actor.optim.lr_wsd_decay_steps",
    "actor.optim.lr_wsd_decay_style",
}
"""verl's keys that a plan does not need, but whose names are close to keys that it reads."""
_REFUSED = "a job with this project's engines is refused (docs/frameworks.md)"
_NOT_COUNTED: dict[str, tuple[Any, str]] = {
    "rollout.name": ("vllm", "planned as vLLM"),
    "rollout.free_cache_engine": (True, "the KV cache is not counted while it trains"),
    "model.lora_rank": (0, "the plan is that of all weights, trained"),
    "model.lora.rank": (0, f"{_REFUSED}; planned with all weights trained"),
    "model.enable_activation_offload": (False, "activations are counted on the device"),
    "actor.fsdp_config.offload_policy": (False, _REFUSED),
    "actor.megatron.use_megatron_fsdp": (
        False,
        f"{_REFUSED}; planned as Megatron's distributed optimizer",
    ),
    "actor.megatron.dynamic_context_parallel": (
        False,
        "planned as sequences that no ranks share",
    ),
    "actor.megatron.qat.enable": (False, f"{_REFUSED}; planned without quantization"),
    "actor.optim.use_precision_aware_optimizer": (
        False,
        f"{_REFUSED}; gradients and moments are counted in float32",
    ),
    "rollout.engine_kwargs.vllm": (
        {},
        "not read: set what takes memory as generate_config.vllm.NAME=VALUE",
    ),
    "actor.use_kl_loss": (False, "the reference policy's memory is not counted"),
    "algorithm.use_kl_in_reward": (False, "the reference policy's memory is not counted"),
    "reward_model.enable": (False, "the reward model's memory is not counted"),
    "reward.reward_model.enable": (False, "the reward model's memory is not counted"),
}
"""Key of verl that the plan ignores -> its value without an effect, and a remark on others."""
_OVERRIDES = {
    "actor.optim.override_optimizer_config": "OptimizerConfig",
    "actor.megatron.override_ddp_config": "DistributedDataParallelConfig",
    "actor.megatron.override_transformer_config": "TransformerConfig",
}
"""Section of verl with fields of one of Megatron's configuration classes -> the class."""


@dataclass(frozen=True)
class VerlJob:
    """A converted verl configuration.

    Attributes:
        config: the checked configuration.
        ranks: number of ranks.
        hosts_of: ranks of one host.
        remarks: the converted keys, and settings that the plan ignores.
        num_mtp_layers: see `load_config`. verl builds no MTP layers without model.mtp.enable.
    """

    config: HybridConfig
    ranks: int
    hosts_of: int
    remarks: Sequence[str]
    num_mtp_layers: int | None


def read_verl(words: Sequence[str], ranks: int | None, hosts_of: int | None) -> VerlJob:
    """Convert the file and the overrides of a command line.

    Args:
        words: at most one file, and overrides of verl's keys or of this project's, which win.
        ranks, hosts_of: replace the file's numbers.

    Raises:
        ConfigError: with verl's keys where a value of verl is the cause.
    """
    violations: list[Violation] = []
    files, overrides = split_words(words, _OVERRIDE, violations)
    require_none(violations)
    values = read_yaml(files[0], "CONFIG") if files else {}
    ours = []
    theirs = []
    for word in overrides:
        section = re.split("[.=]", word)[0]
        if section in HybridConfig.model_fields:
            ours.append(word)
            continue
        theirs.append(word)
        meant = nearest(section, HybridConfig.model_fields)
        if meant:
            violations.append(
                Violation(
                    word.partition("=")[0],
                    "is neither a key of verl nor of this project",
                    f"Did you mean {meant}?",
                    code="unknown-key",
                )
            )
    violations += apply_overrides(values, theirs)
    reading = _Reading(values, violations)
    reading.translate()
    num_hosts = reading.size("trainer.nnodes", 1)
    ranks_per_host = reading.size("trainer.n_gpus_per_node", 8)
    if ranks is None:
        ranks = num_hosts * ranks_per_host
    if reading.strategy != "megatron":
        reading.shard(ranks)
    num_mtp_layers = None if reading.get("model.mtp.enable") else 0
    remarks = list(reading.remarks())
    violations += reading.misspelt()
    require_none(violations)
    translated: dict[Any, Any] = {}
    for key, value in reading.keys.items():
        *sections, name = key.split(".")
        section_at(translated, sections)[name] = value
    shown = yaml.safe_dump(translated, sort_keys=False).strip()
    violations += apply_overrides(translated, ours)
    require_none(violations)
    try:
        config = check_config(translated, ranks, None, num_mtp_layers=num_mtp_layers)
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
    if num_mtp_layers == 0 and config.table().dims.num_mtp_layers:
        remarks.append(
            "actor_rollout_ref.model.mtp.enable is not set: planned without the model's layers for "
            "multi-token prediction, as verl trains it. A job of the configuration above has them."
        )
    hosts_of = ranks_per_host if hosts_of is None else hosts_of
    return VerlJob(config, ranks, hosts_of, tuple(remarks), num_mtp_layers)


def _full(path: str) -> str:
    return f"{_MAIN}{path}" if _IN_MAIN.match(path) else path


@dataclass
class _Reading:
    """Conversion of verl's values in progress.

    Attributes:
        values: verl's configuration.
        violations: receives what cannot be converted.
        keys: full key of this project -> value.
        sources: full key of this project -> verl's path.
        read: all full paths that were looked up, present or not.
    """

    values: Mapping[Any, Any]
    violations: list[Violation]
    keys: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def get(self, path: str, default: Any = None, depth: int = 0) -> Any:
        """Return the value at a path with interpolations resolved; `default` if missing or null."""
        path = _full(path)
        self.read.add(path)
        value: Any = self.values
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and "${" in value:
            match = _INTERPOLATION.fullmatch(value)
            if match is None or depth > 8:  # interpolations may refer to each other
                self.violations.append(
                    Violation(
                        path,
                        f"{shortened(value)} is an interpolation",
                        _RESOLVE,
                        code="interpolation",
                    )
                )
                return default
            alternative = yaml.safe_load(match[2] or "null")
            value = self.get(match[1], alternative, depth + 1)
        return default if value is None else value

    def size(self, path: str, default: int) -> int:
        """Return the number at a path; `default` with a violation if it is not a number."""
        value = self.get(path, default)
        if type(value) is int:
            return value
        self._refuse(path, f"{shortened(value)} is not a number", "Use a whole number")
        return default

    def _refuse(self, path: str, problem: str, remedy: str) -> None:
        self.violations.append(Violation(_full(path), problem, remedy, code="wrong-value"))

    @property
    def strategy(self) -> Any:
        """The actor's strategy.

        `model_engine` implies it, but files that hydra wrote out lack that key. A file with
        Megatron's sizes and neither key is not assumed to be FSDP.
        """
        engine = self.get("model_engine", None if self.get(_MEGATRON) else "dp")
        return self.get("actor.strategy", "fsdp" if engine == "dp" else engine)

    def put(self, key: str, path: str, default: Any = None, value: Any = None) -> None:
        """Set `key` to `value`, or else to the value at `path`, which is recorded as its source."""
        value = self.get(path, default) if value is None else value
        if value is not None:
            self.keys[key] = value
            self.sources[key] = _full(path)

    def translate(self) -> None:
        """Set all keys except `actor_config.fsdp`, which depends on the number of ranks."""
        strategy = self.strategy
        if strategy not in ("megatron", "fsdp", "fsdp2"):
            self._refuse("actor.strategy", shortened(strategy), "Use megatron, fsdp2 or fsdp")
        if self.get("hybrid_engine", True) is not True:
            self.violations.append(
                Violation(
                    f"{_MAIN}hybrid_engine",
                    "false: training and generation use separate devices",
                    "Here they share devices: use true",
                    code="not-supported",
                )
            )
        model = self.get("model.path")
        if model is None:
            self.violations.append(
                Violation(
                    f"{_MAIN}model.path",
                    "is missing",
                    "Name a Hugging Face model: a directory or an id",
                    code="is-missing",
                )
            )
        self.put("model", "model.path", value=os.path.expanduser(str(model)))
        self._translate_batch()
        self._translate_optimizer()
        for key, (name, default) in _GENERATION.items():
            self.put(f"generate_config.{key}", f"rollout.{name}", default)
        section = _FSDP
        path = "actor.fsdp_config.model_dtype"
        dtype = "fp32"
        if strategy == "megatron":
            self._megatron()
            section = _MEGATRON
            path = "actor.megatron.dtype"
            dtype = "bf16"
            # Megatron's param_offload includes gradients; FSDP frees its gradients after a step.
            self.put("generate_config.offload_train_grad", f"{section}.param_offload", False)
        train_dtype = self._dtype(path, dtype)
        self.put("actor_config.params_dtype", path, value=train_dtype)
        path = "rollout.dtype"
        served_dtype = self._dtype(path, "bf16")
        if served_dtype != train_dtype:
            self.put("generate_config.compress_reshard", path, value=True)
            self.put("generate_config.compression_dtype", path, value=served_dtype)
        self.put("generate_config.offload_train_param", f"{section}.param_offload", False)
        self.put("generate_config.offload_train_optimizer", f"{section}.optimizer_offload", False)

    def _translate_batch(self) -> None:
        """Set lengths of sequences, and the micro batch that a plan counts activations of."""
        prompt = self.size("rollout.prompt_length", 0)
        tokens = prompt or self.size("data.max_prompt_length", 512)
        response = self.size("rollout.response_length", 0)
        tokens += response or self.size("data.max_response_length", 512)
        self.put("actor_config.seq_length", "data.max_response_length", value=tokens)
        self.put("generate_config.max_model_len", "rollout.max_model_len", tokens)
        self.put("actor_config.micro_batch_size", "actor.ppo_micro_batch_size_per_gpu")
        path = "actor.ppo_max_token_len_per_gpu"
        context = self.size("actor.megatron.context_parallel_size", 1)
        # verl counts a rank's part of the sequences that context parallel ranks share.
        most_tokens = self.size(path, 16384) * context
        if self.get("actor.use_dynamic_bsz") is True:
            # 16,384 tokens are 16 sequences of 1,024.
            num_sequences = max(1, most_tokens // max(1, tokens))
            self.put("actor_config.micro_batch_size", path, value=num_sequences)

    def _translate_optimizer(self) -> None:
        for name, default in _ADAM.items():
            self.put(f"actor_config.optimizer.{name}", f"actor.optim.{name}", default)
        path = "actor.optim.betas"
        betas = self.get(path, [0.9, 0.999])
        if isinstance(betas, list) and len(betas) == 2:
            self.put("actor_config.optimizer.adam_beta1", path, value=betas[0])
            self.put("actor_config.optimizer.adam_beta2", path, value=betas[1])
        else:
            self._refuse(path, shortened(betas), "Use two numbers")

    def _megatron(self) -> None:
        for name, default in _SIZES.items():
            self.put(f"actor_config.{name}", f"{_MEGATRON}.{name}", default)
        # Without TP, verl ignores the key, which is true by default.
        if self.keys["actor_config.tensor_model_parallel_size"] != 1:
            self.put("actor_config.sequence_parallel", "actor.megatron.sequence_parallel", True)
        path = "actor.megatron.use_distributed_optimizer"
        self.put("actor_config.use_distributed_optimizer", path, True)
        for name in _TRANSFORMER:
            path = f"actor.megatron.override_transformer_config.{name}"
            self.put(f"actor_config.{name}", path)
        # verl names modules by default, also when they are not used.
        if self.keys.get("actor_config.recompute_granularity") != "selective":
            self.keys.pop("actor_config.recompute_modules", None)

    def shard(self, ranks: int) -> None:
        """Set `actor_config.fsdp`."""
        path = "actor.fsdp_config.fsdp_size"
        num_shards = self.size(path, -1)
        strategy_path = "actor.fsdp_config.reshard_after_forward"
        keeps_gathered = self.get(strategy_path, True) is False
        if keeps_gathered:
            self.put("actor_config.fsdp.sharding_strategy", strategy_path, value="SHARD_GRAD_OP")
        if 0 < num_shards < ranks:
            if ranks % num_shards:
                self.violations.append(
                    Violation(
                        _full(path),
                        f"{num_shards} does not divide {ranks} ranks",
                        "Use a divisor, or -1",
                        code="not-divisible",
                    )
                )
            if not keeps_gathered:
                self.put("actor_config.fsdp.sharding_strategy", path, value="HYBRID_SHARD")
            # 8 ranks with fsdp_size 4 are 2 replicas.
            self.put("actor_config.fsdp.replicas", path, value=ranks // num_shards)
        path = "actor.fsdp_config.dtype"
        dtype = self._dtype(path, "bf16")
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "no")
        self.put("actor_config.fsdp.mixed_precision", path, value=precision)
        path = "model.enable_gradient_checkpointing"
        self.put("actor_config.fsdp.activation_checkpointing", path, True)

    def _dtype(self, path: str, default: str) -> str:
        name = str(self.get(path, default))
        return _DTYPES.get(name, name)

    def misspelt(self) -> Violations:
        """Yield keys that are misspellings of keys that were read, after all have been read."""
        for path in self._unread(self.values):
            section, _, name = f".{path}".rpartition(".")
            below = [
                read
                for read in map(".{}".format, sorted(self.read))
                if read.startswith(f"{section}.")
            ]
            # Below ".actor.megatron" the name in ".actor.megatron.qat.enable" is qat.
            meant = nearest(name, {read[len(section) :].split(".")[1] for read in below})
            read_key = f"{section}.{meant}"[1:] if meant else None
            if read_key is None:
                # Without its first sections, as megatron.dtype is part of
                # actor_rollout_ref.actor.megatron.dtype.
                read_key = next(
                    (read for read in sorted(self.read) if f".{path}." in f"{read}."), None
                )
            if read_key and path not in map(_full, _NOT_READ):
                yield Violation(
                    path, "is not a key of verl", f"Did you mean {read_key}?", code="unknown-key"
                )

    def remarks(self) -> Iterator[str]:
        """Yield settings that take memory or move data and are not in the plan."""
        is_dynamic = self.get("actor.use_dynamic_bsz") is True
        if is_dynamic:
            number = self.keys["actor_config.micro_batch_size"]
            tokens = self.keys["actor_config.seq_length"]
            yield (
                f"{_MAIN}actor.use_dynamic_bsz: planned as micro batches of {number} "
                f"sequences of {tokens} tokens."
            )
        if self.strategy == "fsdp":
            yield f"{_MAIN}actor.strategy fsdp: {_REFUSED}; planned as FSDP2."
        has_replicas = self.get("rollout.data_parallel_size", 1) != 1
        if has_replicas and self.get("rollout.expert_parallel_size", 1) == 1:
            yield f"{_MAIN}rollout.data_parallel_size: replicas that share nothing are planned."
        for section in ("actor", _FSDP):
            path = f"{section}.ulysses_sequence_parallel_size"
            if self.get(path, 1) != 1 and not is_dynamic:
                yield f"{_MAIN}{path}: activations are counted of whole sequences."
        advantages = self.get("algorithm.adv_estimator", "gae")
        if self.get("critic.enable", advantages == "gae"):
            yield (
                "critic: its memory is not counted; "
                "critic_config={} adds one in the actor's layout."
            )
        for path, (default, meaning) in _NOT_COUNTED.items():
            value = self.get(path, default)
            if value != default:
                yield f"{_full(path)} {shortened(value)}: {meaning}."
        yield from self._refused_fields()
        unread: dict[str, list[str]] = {}
        for path in self._unread(self.values):
            section, _, name = path.rpartition(".")
            unread.setdefault(section or "sections", []).append(name)
        if unread:
            lines = (f"  {section}: {', '.join(names)}" for section, names in unread.items())
            yield "\n".join(("Not read:", *lines))

    def _refused_fields(self) -> Iterator[str]:
        """Yield the fields of Megatron with values that a switch does not allow."""
        try:
            from megatron_patches.patch import CORE_VERSIONS
            from megatron_patches.refused_fields import refusal
        except ImportError:  # without torch, where nothing can be trained
            return
        for path, kind in _OVERRIDES.items():
            fields = self.get(path, {})
            section = _full(path)
            self.read.discard(section)  # accepted fields are not read
            for name, value in fields.items():
                refused = refusal(kind, name, value, CORE_VERSIONS[0])
                if refused is not None:
                    self.read.add(f"{section}.{name}")
                    yield f"{section}.{name} {shortened(value)}: {_REFUSED}: {refused.problem}."

    def _unread(self, values: Mapping[Any, Any], section: str = "") -> Iterator[str]:
        """Yield the keys that are set and were not read, or sections of which no key was read."""
        for name, value in values.items():
            path = f"{section}{name}"
            is_set = value is not None and value not in ({}, []) and name != "_target_"
            if any(read.startswith(f"{path}.") for read in self.read):
                yield from self._unread(value if isinstance(value, Mapping) else {}, f"{path}.")
            elif is_set and path not in self.read:
                yield path
