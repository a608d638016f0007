"""A trainer of accelerate's, as TRL and ms-swift have one, with an engine around its model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hybrid_engine.config.keys import FromProgram
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.hybrid_engine import HybridEngine

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion


def engine_around(of: Any, rollout_config: Mapping[str, Any]) -> HybridEngine[Any]:
    """An engine around the model as accelerate has prepared it. Collective.

    Args:
        of: has `model` and `accelerator`.
        rollout_config: keys, as `HybridEngine` takes them.
    """
    accelerator = of.accelerator
    places = ("RANK", accelerator.process_index), ("LOCAL_RANK", accelerator.local_process_index)
    for name, value in (*places, ("WORLD_SIZE", accelerator.num_processes)):
        os.environ.setdefault(name, str(value))
    import_module("trl.trainer.utils").ensure_master_addr_port()
    return HybridEngine(model=of.model, rollout_config=rollout_config, shard=False)


def with_own(own: Mapping[str, Any], rollout_config: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's own keys, and the caller's in front of them; of `vllm`, argument by argument."""
    arguments = {**own.get("vllm", {}), **rollout_config.get("vllm", {})}
    return {**own, **rollout_config, "vllm": FromProgram(arguments)}


def check(accelerator: Any, findings: Sequence[Violation]) -> None:
    """Raise ConfigError with these, and with what accelerate does to a model that no engine reads."""
    found, how = list(findings), str(accelerator.distributed_type).rpartition(".")[2]
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if how == "DEEPSPEED":
        found.append(Violation("accelerate", "DeepSpeed has the parameters", "Use FSDP2, DDP or one process"))
    elif how == "FSDP" and fsdp.fsdp_version != 2:
        found.append(Violation("accelerate", f"fsdp_version {fsdp.fsdp_version}", "Set fsdp_version: 2"))
    if found:
        raise ConfigError(found)


def answers(
    engine: HybridEngine[Any], prompts: Sequence[Mapping[str, Any]], params: Any, findings: Sequence[Violation] = ()
) -> list[SimpleNamespace]:
    """What these trainers read of vLLM's `RequestOutput`, for this rank's prompts. Collective, in a rollout context.

    Args:
        prompts: vLLM's, with `prompt_token_ids`; any number of them.
        params: `vllm.SamplingParams`, the same on every rank.
        findings: of this rank alone.

    Raises ConfigError with these and with images, and RemoteError on ranks that find none.
    """
    with engine.job.agreement.phase("looking at prompts"):
        found = list(findings)
        if any("multi_modal_data" in prompt for prompt in prompts):
            found.append(Violation("dataset", "has images", "Use texts: models of text alone are resharded"))
        if found:
            raise ConfigError(found)
    token_ids = [list(prompt["prompt_token_ids"]) for prompt in prompts]
    completed = engine.generate_sequences(token_ids, params, data="local")
    has_logprobs = params.logprobs is not None
    return [
        SimpleNamespace(
            prompt_token_ids=prompt, outputs=[_output(index, one, has_logprobs) for index, one in enumerate(each)]
        )
        for prompt, each in zip(token_ids, completed, strict=True)
    ]


def _output(index: int, completion: Completion, has_logprobs: bool) -> SimpleNamespace:
    """What is read of vLLM's `CompletionOutput`; of each token's log-probabilities its own alone."""
    drawn = zip(completion.token_ids, completion.logprobs, strict=has_logprobs)
    rows = [{token: SimpleNamespace(logprob=logprob, rank=1)} for token, logprob in drawn]
    return SimpleNamespace(
        index=index,
        token_ids=list(completion.token_ids),
        logprobs=rows if has_logprobs else None,
        finish_reason=completion.finish_reason,
    )
