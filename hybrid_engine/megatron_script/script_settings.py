"""Settings of `--enable-resharding`: Megatron's arguments, our flags and the YAML file together.

    model: path/to/hf_model        # config.json, or a Hub id; weights come from training
    generate_config: {...}         # as everywhere; --infer-… and --offload-train-… override it
    sampling: {max_tokens: 64}     # fields of `Sampling`

The training side, `actor_config`, comes from Megatron's own arguments. All violations are reported
at once.
"""

from __future__ import annotations

import importlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch

from hybrid_engine.attaching.config_check import FLAGS, model_mismatches
from hybrid_engine.backends.vllm.arguments import GENERATING_LAYOUT, generation_problem
from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.config import GenerateConfig, HybridConfig, load_config
from hybrid_engine.errors import (
    ConfigError,
    Violation,
    Violations,
    clipped,
    collect,
    require_none,
    shortened,
)
from hybrid_engine.files.documents import read_text, read_yaml
from hybrid_engine.files.hub import find_model
from hybrid_engine.layouts.parallelism import TrainParallelism, sizes_of
from hybrid_engine.models.families import read_model, require_rules
from hybrid_engine.models.table import ModelTable
from megatron_patches.engines import MegatronScript, ReshardingOptions, performs_rl
from megatron_patches.patch import check_version
from megatron_patches.refused_fields import argument_refusals
from megatron_patches.rl import PATCHES

Prompt = str | tuple[int, ...]
Callback = Callable[[Any], Callable[[list[Any]], None] | None]
"""Function of the user, called on every rank with the `InferenceEngine`, which has the new weights.

If it returns a function, that is called with Megatron's model chunks after training state is back,
before the next step.
"""

_KEYS = ("model", "revision", "generate_config", "sampling")
"""Keys of the YAML file."""

_SHARED_KEYS = (
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "micro_batch_size",
    "seq_length",
    "seed",
)
"""Keys of `actor_config`, without the parallel sizes, that Megatron's arguments share."""

_REFUSED = {
    "use_legacy_models": "parameters have other names",
    "use_torch_fsdp2": "there are no flat buffers to read",
    "async_save": (
        "its worker process maps parameters by CUDA IPC, which cannot export elastic memory"
    ),
    "skip_train": "switches happen between training steps",
    "inprocess_restart": "an inference engine cannot be restarted inside its process",
}
"""Argument of Megatron's training loop that does not go with a switch -> reason.

Fields of megatron-core are in `megatron_patches.refused_fields`.
"""

_FLAGS = {
    "nccl_ub": "--use-nccl-ub",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "fp8_param": "--fp8-param-gather",
    "fp4_param": "--fp4-param-gather",
}
"""Argument -> flag, if the flag has another name."""

_SECOND_MODEL = (
    "Megatron would build a second model and copy weights into it; servers have their own sizes"
)

_REFUSED_IN_RL: Final = {
    **{
        f"rl_inference_{axis}_model_parallel_size": (
            _SECOND_MODEL,
            "Leave it out: start the servers with their sizes",
        )
        for axis in ("tensor", "pipeline", "expert", "expert_tensor")
    },
    "rl_offload_optimizer_during_inference": (
        "a switch takes training state off the device and back",
        "Leave it out: --offload-train-grad and --offload-train-optimizer choose what leaves",
    ),
    "rl_verify_model_weights_swap": (
        "there is no second model to compare",
        "Use --resharding-verify full",
    ),
    "rl_partial_rollouts": (
        "completions that outlive a switch cannot be attributed to one set of weights",
        "Leave it out, with --rl-generation-lag",
    ),
    "rl_inference_parsers": ("servers return tokens, not parsed chats", "Leave it out"),
}
"""Argument of `--perform-rl-step`, if vLLM servers generate its rollouts -> (problem, remedy)."""


@dataclass(frozen=True)
class ScriptSettings:
    """Settings after all checks.

    Attributes:
        config: configuration of both sides; the training side is Megatron's.
        table: name table of the model.
        sampling: parameters with which completions are drawn.
        prompts: texts, or token ids.
        output: directory for samples and timings.
        callback: None without --resharding-callback.
    """

    config: HybridConfig
    table: ModelTable
    sampling: Sampling
    prompts: tuple[Prompt, ...]
    output: Path | None
    callback: Callback | None


def read_settings(script: MegatronScript) -> ScriptSettings:
    """Read the settings from the script's arguments.

    Raises ConfigError with all violations at once.
    """
    options = script.options
    args = script.args
    violations = []
    # Arguments of Megatron's training loop that do not go with a switch.
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            remedy = "Leave it out, or leave out --enable-resharding"
            key = _flag(name)
            violations.append(Violation(key, reason, remedy, code="refused-megatron-setting"))
    content = collect(violations, _read_yaml, options.config)
    # Without the file, the settings that do not depend on it are checked all the same.
    known_content = content or {}
    sampling = collect(violations, _read_sampling, known_content.get("sampling")) or Sampling()
    prompts = collect(violations, _read_prompts, options) or ()
    # Imported now: a callback that is missing must not end the run at its first switch.
    callback = collect(violations, _import_callback, options.callback)
    if args.rank == 0:  # the only rank that writes
        collect(violations, _require_writable, options.output)
    config = None
    if content is not None:
        config = collect(violations, _read_config, content, options, args)
    # The limit of the model bounds Megatron's rollouts if the file has no max_model_len.
    if performs_rl(args):
        limit = None if config is None else config.hf_config().get("max_position_embeddings")
        violations += rl_refusals(args, options, known_content, limit)
    table = _read_table(known_content, options)
    transformer_config = script.transformer_config()
    # One flag can set fields of several configurations. Report it once.
    violations += dict.fromkeys(
        Violation(
            _flag(refusal.field),
            refusal.problem,
            f"{refusal.remedy}, or leave out --enable-resharding",
            code="refused-megatron-setting",
        )
        for refusal in argument_refusals(args, transformer_config)
    )
    if config is not None and prompts:
        # A layout that can receive weights may be unable to complete prompts.
        sizes = config.generate_config.sizes(args.world_size)
        problem = generation_problem(sizes, "cuda" if torch.cuda.is_available() else "cpu")
        if problem:
            key = "generate_config.infer_pipeline_parallel_size"
            violations.append(
                Violation(
                    key,
                    problem,
                    f"{GENERATING_LAYOUT.capitalize()}, or leave out --resharding-prompts",
                    code="cannot-generate",
                )
            )
    # Violations name Megatron's flags instead of the fields of its configurations.
    if table is not None:
        names = replace(FLAGS, flags=script.flags)
        mismatches = collect(violations, model_mismatches, table, args, transformer_config, names)
        violations += mismatches or ()
    require_none(violations)
    assert config is not None, "the reason why it could not be read is a violation"
    assert table is not None, "the reason why it could not be read is a violation"
    return ScriptSettings(config, table, sampling, prompts, options.output, callback)


def actor_values(args: Namespace) -> dict[str, Any]:
    """Return `actor_config` from Megatron's validated arguments."""
    arguments = {size.key: size.script for size in sizes_of(TrainParallelism) if size.script}
    arguments |= {key: key for key in _SHARED_KEYS}
    values = {key: getattr(args, name) for key, name in arguments.items() if hasattr(args, name)}
    # Megatron sets this size for dense models as well.
    if not args.num_experts:
        values["expert_tensor_parallel_size"] = None
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    values["pipeline_model_parallel_layout"] = None if layout is None else str(layout)
    # The layout determines the number of chunks per stage.
    if layout is not None:
        values["virtual_pipeline_model_parallel_size"] = None
    values["params_dtype"] = str(args.params_dtype).removeprefix("torch.")
    return values


def _flag(name: str) -> str:
    """Return the command-line flag of an argument."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def _read_yaml(path: Path | None) -> dict[str, Any]:
    """Return the content of the YAML file. Raises ConfigError."""
    key = "--resharding-config"
    if path is None:
        raise ConfigError.of(
            key,
            "is missing",
            "Name a YAML file with `model` and `generate_config`",
            code="missing-key",
        )
    content = read_yaml(path, key)
    unknown = sorted(clipped(str(name)) for name in set(content) - set(_KEYS))
    if "actor_config" in unknown:
        raise ConfigError.of(
            "actor_config",
            "is determined by Megatron's own arguments",
            f"Remove it from {path}",
            code="has-no-effect",
        )
    if unknown:
        raise ConfigError.of(
            key,
            f"{path}: unknown keys {', '.join(unknown[:10])}",
            f"Known keys: {', '.join(_KEYS)}",
            code="unknown-key",
        )
    return content


def _read_sampling(values: Any) -> Sampling:
    """Return the sampling of the YAML file. Raises ConfigError."""
    if values is None:
        return Sampling()
    known = [field.name for field in fields(Sampling)]
    if not isinstance(values, Mapping):
        raise ConfigError.of(
            "sampling",
            f"expected a mapping, got {shortened(values)}",
            f"Keys: {', '.join(known)}",
            code="not-a-mapping",
        )
    unknown = [clipped(str(name)) for name in values if name not in known]
    if unknown:
        raise ConfigError.of(
            "sampling",
            f"unknown keys {', '.join(unknown[:10])}",
            f"Known keys: {', '.join(known)}",
            code="unknown-key",
        )
    return Sampling(**values)


def _read_config(
    content: Mapping[str, Any],
    options: ReshardingOptions,
    args: Namespace,
) -> HybridConfig:
    """Build the configuration of both sides. Raises ConfigError."""
    generate: Any = content.get("generate_config") or {}
    # Anything else is an error that `load_config` reports.
    if isinstance(generate, Mapping):
        defaults = rl_defaults(args) if performs_rl(args) else {}
        flags = {field.name: getattr(options, field.name) for field in fields(options)}
        overrides = {
            name: value
            for name, value in flags.items()
            if name in GenerateConfig.model_fields and value is not None
        }
        # The last one wins: flags over the file, the file over what the RL loop needs.
        generate = {**defaults, **generate, **overrides}
    # A missing model is reported by `load_config`, with the other violations.
    settings = {name: content[name] for name in ("model", "revision") if name in content}
    settings["actor_config"] = actor_values(args)
    settings["generate_config"] = generate
    return load_config(
        settings,
        args.world_size,
        own_loop=True,  # training loop and weights are Megatron's
        own_weights=True,
        num_mtp_layers=args.mtp_num_layers or 0,
        directory=_directory(options),
    )


def _directory(options: ReshardingOptions) -> Path | None:
    """Return the directory to which paths in the YAML file are relative."""
    return None if options.config is None else options.config.absolute().parent


def _read_table(content: Mapping[str, Any], options: ReshardingOptions) -> ModelTable | None:
    """Return the model's name table, or None if the model cannot be read or is unknown.

    `load_config` reports the reason.
    """
    try:
        model = find_model(
            content["model"], content.get("revision"), relative_to=_directory(options)
        )
        table, _ = read_model(model)
        require_rules(table)
        return table
    except (ConfigError, KeyError, TypeError):
        return None


def _read_prompts(options: ReshardingOptions) -> tuple[Prompt, ...]:
    """Return the prompts of --resharding-prompts. Raises ConfigError."""
    if options.prompts is None:
        return ()
    key = "--resharding-prompts"
    violations = []
    if options.output is None:
        violations.append(
            Violation(
                "--resharding-output",
                "is missing",
                "Name a directory for the samples",
                code="missing-key",
            )
        )
    try:
        text = read_text(options.prompts, key, "Name a file of JSON lines")
    except ConfigError as error:
        # Together with the missing output. `from None`: the message is complete.
        raise ConfigError([*violations, *error.findings]) from None
    # JSON ends a line with "\n" alone; splitlines also splits at U+2028 and others.
    lines = [line for line in text.split("\n") if line.strip()]
    parsed = [_parse_prompt(line) for line in lines]
    invalid = [number for number, prompt in enumerate(parsed, 1) if prompt is None]
    if invalid:
        numbers = ", ".join(map(str, invalid[:10]))
        violations.append(
            Violation(
                key,
                f"{options.prompts}: lines {numbers} are not prompts",
                'Write {"prompt": "text"} or {"prompt": [1, 2, 3]} on every line',
                code="invalid-prompt",
            )
        )
    if not parsed:
        violations.append(
            Violation(
                key,
                f"{options.prompts} is empty",
                "Write a prompt on every line",
                code="no-prompts",
            )
        )
    require_none(violations)
    return tuple(prompt for prompt in parsed if prompt is not None)


def _parse_prompt(line: str) -> Prompt | None:
    """Return the text or the token ids of a line; None if it has neither."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(prompt, str) and prompt:
        return prompt
    if not (isinstance(prompt, list) and prompt):
        return None
    # Not isinstance: bool is a subclass of int.
    is_valid = all(type(token) is int and token >= 0 for token in prompt)
    return tuple(prompt) if is_valid else None


def _require_writable(directory: Path | None) -> None:
    """Raise ConfigError unless the directory, or its nearest existing parent, is writable."""
    if directory is None:
        return
    # os.path.exists returns False below a directory that this process may not search, where
    # Path.exists raises.
    candidates = (directory, *directory.absolute().parents)
    existing = next(path for path in candidates if os.path.exists(path))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise ConfigError.of(
            "--resharding-output",
            f"{directory} cannot be written: {existing} is not a directory that this process may "
            "write to",
            "Name another directory",
            code="not-writable",
        )


def _import_callback(reference: str | None) -> Callback | None:
    """Import the function of --resharding-callback. Raises ConfigError."""
    if reference is None:
        return None
    key = "--resharding-callback"
    module_name, _, name = reference.partition(":")
    try:
        callback = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError.of(
            key,
            f"{reference} cannot be imported: {error}",
            "Name a MODULE:FUNCTION that can be imported",
            code="import-failed",
        ) from error
    if not callable(callback):
        raise ConfigError.of(
            key,
            f"{reference} is a {type(callback).__name__}",
            "Name a function of one argument",
            code="not-callable",
        )
    return callback


def rl_refusals(
    args: Namespace,
    options: ReshardingOptions,
    content: Mapping[str, Any],
    model_limit: object = None,
) -> Violations:
    """Report settings that do not go with `--perform-rl-step`.

    Args:
        args: Megatron's arguments.
        options: our command line.
        content: content of the YAML file.
        model_limit: longest sequence of the model, in tokens, if the file sets no limit; None if
            it is not known.
    """
    # The patches of the RL loop were written for one version of it.
    version = check_version(allow_version=True)
    if not all(patch.is_needed_by(version) for patch in PATCHES):
        yield Violation(
            "--perform-rl-step",
            f"megatron-core {version} has another RL loop",
            "Use a checkout of core_v0.19.0",
            code="untested-version",
        )
    generate = content.get("generate_config")
    if not isinstance(generate, Mapping):  # reported elsewhere
        generate = {}
    if not generate.get("servers"):
        # In Megatron's loop agents draw on one rank while the others wait. A vLLM inside the
        # training processes needs all ranks in each call.
        yield Violation(
            "generate_config.servers",
            "is missing: agents draw on one rank, but a vLLM inside the ranks needs all",
            "Start vllm serve, and name its address (docs/servers.md)",
            code="missing-key",
        )
    for name, (problem, remedy) in _REFUSED_IN_RL.items():
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            yield Violation(flag, problem, remedy, code="refused-megatron-setting")
    if args.context_parallel_size > 1:
        key, remedy = "--context-parallel-size", "Set it to 1"
        yield Violation(key, _SECOND_MODEL, remedy, code="refused-megatron-setting")
    # Options of `ScriptEngine.switch`, which does nothing in this loop.
    is_set = {
        "--resharding-interval": options.interval != ReshardingOptions.interval,
        "--resharding-at-start": options.at_start,
        "--resharding-prompts": options.prompts is not None,
        "--resharding-callback": options.callback is not None,
        "sampling": content.get("sampling") is not None,
    }
    for key in is_set:
        if is_set[key]:
            yield Violation(
                key,
                "Megatron's RL loop decides what is drawn, and when",
                "Leave it out",
                code="has-no-effect",
            )
    # Found now, not by the first rollout that is too long.
    limit = generate.get("max_model_len") or model_limit
    if isinstance(limit, int) and limit < args.inference_max_seq_length:
        yield Violation(
            "generate_config.max_model_len",
            f"{limit}, and --inference-max-seq-length is {args.inference_max_seq_length}",
            "Make them agree, with the servers' --max-model-len",
            code="shorter-than-rollouts",
        )


def rl_defaults(args: Namespace) -> dict[str, Any]:
    """Return defaults of `generate_config` for Megatron's RL loop.

    Servers that keep their weights lag behind by the optimizer steps that use one collection of
    rollouts.
    """
    # 32 prompts * 8 completions in batches of 128, for 2 iterations: 2 * 2 = 4 steps.
    num_completions = args.grpo_prompts_per_step * args.grpo_group_size
    steps_per_iteration = num_completions // args.global_batch_size
    return {"server_max_lag": max(1, args.grpo_iterations * steps_per_iteration)}
