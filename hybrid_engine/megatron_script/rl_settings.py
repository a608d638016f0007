"""Settings of `--perform-rl-step`: refusals and defaults if vLLM servers generate its rollouts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, Final

from hybrid_engine.errors import Violation, Violations
from megatron_patches.engines import ReshardingOptions
from megatron_patches.patch import check_version
from megatron_patches.rl import PATCHES

_SECOND_MODEL = (
    "Megatron would build a second model and copy weights into it; servers have their own sizes"
)

_REFUSED: Final = {
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
"""Megatron's argument -> (problem, remedy)."""


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
        problem = f"megatron-core {version} has another RL loop"
        remedy = "Use a checkout of core_v0.19.0"
        yield Violation("--perform-rl-step", problem, remedy, code="untested-version")
    generate = content.get("generate_config")
    if not isinstance(generate, Mapping):  # reported elsewhere
        generate = {}
    if not generate.get("servers"):
        # In Megatron's loop agents draw on one rank while the others wait. A vLLM inside the
        # training processes needs all ranks in each call.
        problem = "is missing: agents draw on one rank, but a vLLM inside the ranks needs all"
        remedy = "Start vllm serve, and name its address (docs/servers.md)"
        yield Violation("generate_config.servers", problem, remedy, code="missing-key")
    for name, (problem, remedy) in _REFUSED.items():
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
            problem = "Megatron's RL loop decides what is drawn, and when"
            yield Violation(key, problem, "Leave it out", code="has-no-effect")
    # Found now, not by the first rollout that is too long.
    limit = generate.get("max_model_len") or model_limit
    if isinstance(limit, int) and limit < args.inference_max_seq_length:
        problem = f"{limit}, and --inference-max-seq-length is {args.inference_max_seq_length}"
        remedy = "Make them agree, with the servers' --max-model-len"
        yield Violation(
            "generate_config.max_model_len", problem, remedy, code="shorter-than-rollouts"
        )


def rl_defaults(args: Namespace) -> dict[str, Any]:
    """Return defaults of `generate_config` for Megatron's RL loop.

    Servers that keep their weights lag behind by the optimizer steps that use one collection of
    rollouts.
    """
    num_completions = args.grpo_prompts_per_step * args.grpo_group_size
    steps_per_iteration = num_completions // args.global_batch_size
    return {"server_max_lag": max(1, args.grpo_iterations * steps_per_iteration)}
