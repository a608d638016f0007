"""What `--enable-resharding` is to do: Megatron's arguments, our command line and its YAML file, checked together.

    model: path/to/hf_model        # config.json, or a Hub id; weights come from training
    generate_config: {...}         # as everywhere; --infer-… and --offload-train-… override it
    sampling: {max_tokens: 64}     # of `Sampling`

The training side, `actor_config`, comes from Megatron's own arguments.
"""

from __future__ import annotations

import importlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.attaching.matching import FLAGS, model_mismatches
from hybrid_engine.backends.vllm.arguments import GENERATING_LAYOUT, generation_problem
from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.config import GenerateConfig, HybridConfig, load_config
from hybrid_engine.errors import ConfigError, Violation, clipped, collect, shortened
from hybrid_engine.files.documents import read_text, read_yaml
from hybrid_engine.files.hub import find_model
from hybrid_engine.layouts.parallelism import TrainParallelism, sizes_of
from hybrid_engine.megatron_script.rl_settings import rl_defaults, rl_refusals
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable
from megatron_patches.engines import MegatronScript, ReshardingOptions, performs_rl
from megatron_patches.review import argument_refusals

Prompt = str | tuple[int, ...]
Callback = Callable[[Any], Callable[[list[Any]], None] | None]
"""Called on every rank with the `InferenceEngine`, which has the new weights. A function it returns is called with
Megatron's model chunks once training state is back, before the next step."""

_KEYS = ("model", "revision", "generate_config", "sampling")
"""Of the YAML file."""

_SAME_NAME = (
    *("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    *("micro_batch_size", "seq_length", "seed"),
)
"""Keys of `actor_config` beside the parallel sizes that Megatron's arguments have too."""

_REFUSED = {
    "use_legacy_models": "parameters have other names",
    "use_torch_fsdp2": "there are no flat buffers to read",
    "async_save": "its worker process maps parameters by CUDA IPC, which cannot export the memory they lie in here",
    "skip_train": "switches happen between training steps",
    "inprocess_restart": "an inference engine cannot be restarted inside its process",
}
"""Arguments of Megatron's loop that do not go with a switch, and why; `megatron_patches.review` has megatron-core's."""

_FLAGS = {
    "nccl_ub": "--use-nccl-ub",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "fp8_param": "--fp8-param-gather",
    "fp4_param": "--fp4-param-gather",
}
"""Flags that are not named as what they set."""


@dataclass(frozen=True)
class ScriptSettings:
    """Checked.

    Attributes:
        config: both sides; the training side as Megatron has it.
        table: name table of the model.
        sampling: how completions are drawn.
        prompts: text, or token ids.
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
    """Everything from the script's arguments. Raises ConfigError with all violations at once."""
    options, args = script.options, script.args
    found = list(_refused(args))
    content = collect(found, _read_yaml, options.config)
    sampling = collect(found, _read_sampling, (content or {}).get("sampling")) or Sampling()
    prompts = collect(found, _read_prompts, options) or ()
    callback = collect(found, _import_callback, options.callback)
    if args.rank == 0:  # it alone writes
        collect(found, _require_writable, options.output)
    config = None if content is None else collect(found, _read_config, content, options, args)
    if performs_rl(args):
        limit = None if config is None else config.hf_config().get("max_position_embeddings")
        found += rl_refusals(args, options, content or {}, limit)
    table = _table_of(content or {}, options)
    transformer_config = script.transformer_config()
    found += _refused_by_core(args, transformer_config)
    if config is not None and prompts:
        found += _cannot_generate(config, args.world_size)
    if table is not None:
        names = replace(FLAGS, flags=script.flags)
        found += collect(found, model_mismatches, table, args, transformer_config, names) or ()
    if found:
        raise ConfigError(found)
    assert config is not None, "whatever kept them from being read was reported"
    assert table is not None, "whatever kept them from being read was reported"
    return ScriptSettings(config, table, sampling, prompts, options.output, callback)


def actor_values(args: Namespace) -> dict[str, Any]:
    """`actor_config` from Megatron's validated arguments."""
    sizes = {size.key: size.script for size in sizes_of(TrainParallelism) if size.script}
    names = {**sizes, **{name: name for name in _SAME_NAME}}
    values = {key: getattr(args, name) for key, name in names.items() if hasattr(args, name)}
    if not args.num_experts:  # Megatron sets it all the same
        values["expert_tensor_parallel_size"] = None
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    values["pipeline_model_parallel_layout"] = None if layout is None else str(layout)
    if layout is not None:  # it says how many chunks a stage has
        values["virtual_pipeline_model_parallel_size"] = None
    values["params_dtype"] = str(args.params_dtype).removeprefix("torch.")
    return values


def _refused(args: Namespace) -> Iterator[Violation]:
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            yield Violation(_flag(name), reason, "Leave it out, or leave out --enable-resharding")


def _refused_by_core(args: Namespace, transformer_config: Any) -> list[Violation]:
    """What of megatron-core's configuration does not go with a switch."""
    violations = [
        Violation(_flag(found.field), found.problem, f"{found.remedy}, or leave out --enable-resharding")
        for found in argument_refusals(args, transformer_config)
    ]
    return list(dict.fromkeys(violations))  # one flag can set fields of several configurations


def _cannot_generate(config: HybridConfig, world_size: int) -> Iterator[Violation]:
    """Why there could be no completions of the prompts; the weights arrive all the same."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if problem := generation_problem(config.generate_config.sizes(world_size), device_type):
        remedy = f"{GENERATING_LAYOUT.capitalize()}, or leave out --resharding-prompts"
        yield Violation("generate_config.infer_pipeline_parallel_size", problem, remedy)


def _flag(name: str) -> str:
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def _read_yaml(path: Path | None) -> dict[str, Any]:
    key = "--resharding-config"
    if path is None:
        raise ConfigError([Violation(key, "is missing", "Name a YAML file with `model` and `generate_config`")])
    content = read_yaml(path, key)
    unknown = sorted(clipped(str(name)) for name in set(content) - set(_KEYS))
    if "actor_config" in unknown:
        raise ConfigError([Violation("actor_config", "is what Megatron's own arguments say", f"Remove it from {path}")])
    if unknown:
        remedy = f"Known keys: {', '.join(_KEYS)}"
        raise ConfigError([Violation(key, f"{path}: unknown keys {', '.join(unknown[:10])}", remedy)])
    return content


def _read_sampling(values: Any) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    if values is None:
        return Sampling()
    if not isinstance(values, Mapping):
        raise ConfigError(
            [Violation("sampling", f"expected a mapping, got {shortened(values)}", f"Keys: {', '.join(known)}")]
        )
    if unknown := [clipped(str(name)) for name in values if name not in known]:
        remedy = f"Known keys: {', '.join(known)}"
        raise ConfigError([Violation("sampling", f"unknown keys {', '.join(unknown[:10])}", remedy)])
    return Sampling(**values)


def _read_config(content: Mapping[str, Any], options: ReshardingOptions, args: Namespace) -> HybridConfig:
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    overrides = {key: given[key] for key in given.keys() & GenerateConfig.model_fields.keys() if given[key] is not None}
    generate = content.get("generate_config") or {}
    defaults = rl_defaults(args) if performs_rl(args) else {}
    return load_config(
        {
            **{name: content[name] for name in ("model", "revision") if name in content},
            "actor_config": actor_values(args),
            "generate_config": {**defaults, **generate, **overrides} if isinstance(generate, Mapping) else generate,
        },
        args.world_size,
        own_loop=True,  # Megatron's
        own_weights=True,
        num_mtp_layers=args.mtp_num_layers or 0,
        directory=_directory(options),
    )


def _directory(options: ReshardingOptions) -> Path | None:
    """Where relative paths of the YAML file begin."""
    return None if options.config is None else options.config.absolute().parent


def _table_of(content: Mapping[str, Any], options: ReshardingOptions) -> ModelTable | None:
    """None where the model cannot be read or is unknown: `load_config` says so, among other things."""
    try:
        model = find_model(content["model"], content.get("revision"), relative_to=_directory(options))
        return read_model(model)[0]
    except (ConfigError, KeyError, TypeError):
        return None


def _read_prompts(options: ReshardingOptions) -> tuple[Prompt, ...]:
    if options.prompts is None:
        return ()
    key = "--resharding-prompts"
    found = []
    if options.output is None:
        found.append(Violation("--resharding-output", "is missing", "Name a directory for the samples"))
    try:
        text = read_text(options.prompts, key, "Name a file of JSON lines")
    except ConfigError as error:
        raise ConfigError([*found, *error.findings]) from None
    lines = [line for line in text.splitlines() if line.strip()]
    prompts = [_prompt_of(line) for line in lines]
    if wrong := [number for number, prompt in enumerate(prompts, 1) if prompt is None]:
        problem = f"{options.prompts}: lines {', '.join(map(str, wrong[:10]))} are not prompts"
        found.append(Violation(key, problem, 'Write {"prompt": "text"} or {"prompt": [1, 2, 3]} on every line'))
    if not prompts:
        found.append(Violation(key, f"{options.prompts} is empty", "Write a prompt on every line"))
    if found:
        raise ConfigError(found)
    return tuple(prompt for prompt in prompts if prompt is not None)


def _prompt_of(line: str) -> Prompt | None:
    """Text, token ids, or None for anything else."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(prompt, str) and prompt:
        return prompt
    is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt)
    return tuple(prompt) if is_tokens else None


def _require_writable(directory: Path | None) -> None:
    if directory is None:
        return
    # os.path: below a directory that may not be searched it says no, where Path.exists raises
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        problem = f"{directory} cannot be written: {existing} is not a directory that this process may write to"
        raise ConfigError([Violation("--resharding-output", problem, "Name another directory")])


def _import_callback(reference: str | None) -> Callback | None:
    if reference is None:
        return None
    module_name, _, name = reference.partition(":")
    try:
        callback = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        problem, remedy = f"{reference} cannot be imported: {error}", "Name a MODULE:FUNCTION that can"
        raise ConfigError([Violation("--resharding-callback", problem, remedy)]) from error
    if not callable(callback):
        problem = f"{reference} is a {type(callback).__name__}"
        raise ConfigError([Violation("--resharding-callback", problem, "Name a function of one argument")])
    return callback
