"""Engines around models of trainers that use accelerate, such as TRL's and ms-swift's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hybrid_engine.config.keys import FromProgram
from hybrid_engine.errors import (
    ConfigError,
    Violation,
    require_none,
)
from hybrid_engine.hybrid_engine import HybridEngine

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion
    from hybrid_engine.switch.report import ReshardReport


def engine_around(owner: Any, rollout_config: Mapping[str, Any]) -> HybridEngine:
    """Build an engine around a model that accelerate has prepared. Collective.

    The main process prints the report of the first switch.

    Args:
        owner: object with `model` and `accelerator`.
        rollout_config: keys, as `HybridEngine` takes them.
    """
    accelerator = owner.accelerator
    # torchrun sets these. Without it, accelerate has the numbers.
    os.environ.setdefault("RANK", str(accelerator.process_index))
    os.environ.setdefault("LOCAL_RANK", str(accelerator.local_process_index))
    os.environ.setdefault("WORLD_SIZE", str(accelerator.num_processes))
    import_module("trl.trainer.utils").ensure_master_addr_port()
    engine = HybridEngine(model=owner.model, rollout_config=rollout_config, shard=False)
    if accelerator.is_main_process:

        @engine.on_reshard_end
        def announce(report: ReshardReport) -> None:
            print(report, flush=True)
            engine.sharding.remove_hook(announce)

    return engine


def merge_configs(
    trainer_config: Mapping[str, Any],
    rollout_config: Mapping[str, Any],
) -> dict[str, Any]:
    """Merge keys of a trainer with keys of the caller, which win; `vllm` argument by argument."""
    arguments = {**trainer_config.get("vllm", {}), **rollout_config.get("vllm", {})}
    return {**trainer_config, **rollout_config, "vllm": FromProgram(arguments)}


def require_supported(accelerator: Any, violations: Iterable[Violation]) -> None:
    """Raise ConfigError with `violations`, and if accelerate shards the model in another way."""
    violations = list(violations)
    # accelerate's DistributedType, e.g. "DistributedType.FSDP".
    strategy = str(accelerator.distributed_type).rpartition(".")[2]
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    problem = ""
    if strategy == "DEEPSPEED":
        problem = "DeepSpeed has the parameters"
    elif strategy == "FSDP" and fsdp.fsdp_version != 2:
        problem = f"fsdp_version {fsdp.fsdp_version}"
    if problem:
        violations.append(
            Violation(
                "accelerate",
                problem,
                "Use FSDP2 (fsdp_version: 2), DDP or one process",
                code="not-supported",
            )
        )
    require_none(violations)


def request_outputs(
    engine: HybridEngine,
    prompts: Sequence[Mapping[str, Any]],
    samplings: Sequence[Any],
) -> list[SimpleNamespace]:
    """Complete this rank's prompts, and return the part of vLLM's `RequestOutput` that is read.

    Collective, in a rollout context.

    Args:
        prompts: vLLM's prompts, with `prompt_token_ids`; any number of them.
        samplings: `vllm.SamplingParams` of each prompt.

    Raises:
        ConfigError: prompts of this rank have images.
        RemoteError: those of another rank do.
    """
    with engine.job.agreement.phase("looking at prompts"):
        if any("multi_modal_data" in prompt for prompt in prompts):
            raise ConfigError.of(
                "dataset",
                "has images",
                "Use texts: only models of text are resharded",
                code="not-supported",
            )
    token_ids = [list(prompt["prompt_token_ids"]) for prompt in prompts]
    # A list, because ranks may have different parameters, or no prompts.
    groups = engine.generate_sequences(token_ids, list(samplings), data="local")
    outputs = []
    for prompt, params, group in zip(token_ids, samplings, groups, strict=True):
        completions = [
            _completion_output(index, completion, params.logprobs is not None)
            for index, completion in enumerate(group)
        ]
        outputs.append(SimpleNamespace(prompt_token_ids=prompt, outputs=completions))
    return outputs


def _completion_output(index: int, completion: Completion, has_logprobs: bool) -> SimpleNamespace:
    """Return the part of vLLM's `CompletionOutput` that is read."""
    # Of each position only the drawn token has a log-probability, so its rank is given as 1.
    # Without log-probabilities the completion's are empty, and nothing is paired.
    pairs = zip(completion.token_ids, completion.logprobs, strict=has_logprobs)
    rows = [{token: SimpleNamespace(logprob=logprob, rank=1)} for token, logprob in pairs]
    return SimpleNamespace(
        index=index,
        token_ids=list(completion.token_ids),
        logprobs=rows if has_logprobs else None,
        finish_reason=completion.finish_reason,
    )
