"""What of `--perform-rl-step` does not go with vLLM servers for its rollouts, and what follows from it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hybrid_engine.errors import Violation
from megatron_patches.engines import ReshardingOptions
from megatron_patches.patch import check_version
from megatron_patches.rl import PATCHES

_SECOND_MODEL = "Megatron would build a second model and copy weights into it; servers have sizes of their own"

_REFUSED: Final = {
    **{
        f"rl_inference_{axis}_model_parallel_size": (_SECOND_MODEL, "Leave it out: start the servers with their sizes")
        for axis in ("tensor", "pipeline", "expert", "expert_tensor")
    },
    "rl_offload_optimizer_during_inference": (
        "a switch takes training state off the device and back",
        "Leave it out: --offload-train-grad and --offload-train-optimizer say what leaves",
    ),
    "rl_verify_model_weights_swap": ("there is no second model to compare", "Use --resharding-verify full"),
    "rl_partial_rollouts": (
        "completions that outlive a switch are not told apart by their weights",
        "Leave it out, with --rl-generation-lag",
    ),
    "rl_inference_parsers": ("servers are asked for tokens, not for parsed chats", "Leave it out"),
}
"""Megatron's argument -> why, and the remedy."""


def rl_refusals(
    args: Namespace, options: ReshardingOptions, content: Mapping[str, Any], model_limit: object = None
) -> Iterator[Violation]:
    """What cannot be with `--perform-rl-step`.

    Args:
        content: of the YAML file.
        model_limit: tokens of the longest sequence, where that says nothing of it; None: not known.
    """
    version = check_version(allow_version=True)
    if not all(patch.is_needed_by(version) for patch in PATCHES):
        problem = f"megatron-core {version} has another RL loop"
        yield Violation("--perform-rl-step", problem, "Use a checkout of core_v0.19.0")
    generate = _mapping(content.get("generate_config"))
    if not generate.get("servers"):
        problem = "is missing: agents draw on one rank while the others wait, which a vLLM within all ranks cannot"
        yield Violation("generate_config.servers", problem, "Start vllm serve, and name its address (docs/servers.md)")
    for name, (problem, remedy) in _REFUSED.items():
        if getattr(args, name, None):
            yield Violation("--" + name.replace("_", "-"), problem, remedy)
    if args.context_parallel_size > 1:
        yield Violation("--context-parallel-size", _SECOND_MODEL, "Set it to 1")
    given = {
        "--resharding-interval": options.interval != ReshardingOptions.interval,
        "--resharding-at-start": options.at_start,
        "--resharding-prompts": options.prompts is not None,
        "--resharding-callback": options.callback is not None,
        "sampling": content.get("sampling") is not None,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        yield Violation(flag, "Megatron's RL loop says what is drawn, and when", "Leave it out")
    most = generate.get("max_model_len") or model_limit
    if isinstance(most, int) and most < args.inference_max_seq_length:
        problem = f"{most}, and --inference-max-seq-length is {args.inference_max_seq_length}"
        yield Violation("generate_config.max_model_len", problem, "Make them agree, with the servers' --max-model-len")


def rl_defaults(args: Namespace) -> dict[str, Any]:
    """Of `generate_config`: servers that keep their weights are as many steps behind as one collection is used for."""
    batches = args.grpo_prompts_per_step * args.grpo_group_size // args.global_batch_size
    return {"server_max_lag": max(1, args.grpo_iterations * batches)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
