"""Log-probabilities of a server that is paused, for its trainers to compare with theirs: in the engine core.

Requests of others stay in a queue of their own meanwhile. They had been told to begin anew when weights came.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import probe_limits
from hybrid_engine.errors import StateError
from hybrid_engine.serving.comparison import token_ids

_QUEUES = ("waiting", "skipped_waiting")
"""Of vLLM's scheduler, with requests that do not run; the second up to vLLM 0.29."""


def describe(core: Any) -> str:
    """What the server can compute: JSON of a `serving.comparison.Description`."""
    limits = probe_limits(core.vllm_config)
    settings = core.vllm_config.model_config.hf_config.to_dict()
    values = {"refusal": limits.refusal, "max_length": limits.max_length, "vocab_size": limits.vocab_size}
    return json.dumps({**values, "settings": settings}, default=str)


def probe(core: Any, tokens: object) -> str:
    """Log-probabilities of every token but the first: JSON of a `serving.comparison.ServerAnswer`.

    The server is paused, and nothing runs. Raises MessageError for what are no token ids that it can take.
    """
    rows = token_ids(tokens, probe_limits(core.vllm_config))
    with _alone(core):
        found = _run(core, rows)
    core._reset_caches()
    return json.dumps({"log_probs": found, "dtype": str(core.vllm_config.model_config.dtype)})


@contextmanager
def _alone(core: Any) -> Iterator[None]:
    """The scheduler runs what is added inside, and none of what waits."""
    scheduler = core.scheduler
    if getattr(scheduler, "kv_holding_waiting", None):
        raise StateError("requests wait that hold blocks of a KV connector")
    state = scheduler.pause_state
    queues = {name: getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)}
    for name, queue in queues.items():
        setattr(scheduler, name, type(queue)())
    scheduler.set_pause_state(internals.UNPAUSED.load())
    try:
        yield
    finally:
        scheduler.set_pause_state(state)
        for name, queue in queues.items():
            setattr(scheduler, name, queue)


def _run(core: Any, rows: Sequence[list[int]]) -> list[list[float]]:
    from vllm import SamplingParams

    kinds, scheduler = internals.ENGINE_MESSAGES.load(), core.scheduler
    names = [f"hybrid-engine-probe-{number}" for number in range(len(rows))]
    for name, row in zip(names, rows, strict=True):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        request = kinds.EngineCoreRequest(
            request_id=name,
            prompt_token_ids=row,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        scheduler.add_request(core.preprocess_add_request(request)[0])
    found: dict[str, torch.Tensor] = {}
    try:
        while scheduler.has_requests() or core.batch_queue:
            outputs, _ = core.step_fn()
            for output in [each for of_client in (outputs or {}).values() for each in of_client.outputs]:
                if output.new_prompt_logprobs_tensors is not None:
                    found[output.request_id] = output.new_prompt_logprobs_tensors.logprobs[:, 0]
    finally:
        core.abort_requests(names)
    return [found[name].tolist() for name in names]
