"""Log-probabilities of a paused server, computed in its engine core for its trainers.

Requests of other clients wait in their queues meanwhile. They restart anyway, because weights have
changed since they began.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import probe_limits
from hybrid_engine.backends.vllm.server.receiver import begin_capture, end_capture, readings_of
from hybrid_engine.compute_check.logprob_check import Description
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.serving.comparison import ServerDescription, token_ids

_QUEUES = ("waiting", "skipped_waiting")
"""Queues of vLLM's scheduler with requests that do not run; the second exists up to vLLM 0.29."""


def describe(core: Any) -> str:
    """Return what the server computes with: JSON of a `serving.comparison.ServerDescription`."""
    limits = probe_limits(core.vllm_config)
    readings = core.model_executor.collective_rpc(readings_of)
    workers = [Description(limits, *of_worker) for of_worker in readings]
    settings = core.vllm_config.model_config.hf_config.to_dict()
    return ServerDescription(workers=workers, settings=settings).to_json()


def probe(core: Any, tokens: object) -> str:
    """Return log-probabilities of every token but the first: JSON of a `ServerAnswer`.

    The server must be paused, with no request running. `ServerAnswer`: see serving/comparison.py.

    Raises MessageError for tokens that are not valid token ids of the model.
    """
    rows = token_ids(tokens, probe_limits(core.vllm_config))
    call = core.model_executor.collective_rpc
    call(begin_capture, args=(sum(map(len, rows)),))
    try:
        with _alone(core):
            log_probs = _run(core, rows)
    finally:
        # Workers of one pipeline stage have the same routes.
        first, *others = call(end_capture)
    core._reset_caches()
    routes = first if all(other == first for other in others) else []
    dtype = str(core.vllm_config.model_config.dtype)
    return json.dumps({"log_probs": log_probs, "dtype": dtype, "routes": routes})


@contextmanager
def _alone(core: Any) -> Iterator[None]:
    """Run only requests that are added in this context, and none of those that wait."""
    scheduler = core.scheduler
    if getattr(scheduler, "kv_holding_waiting", None):
        raise StateError(
            "requests wait that hold blocks of a KV connector: "
            "start the server without --kv-transfer-config",
            code="kv-connector",
        )
    state = scheduler.pause_state
    present = [name for name in _QUEUES if hasattr(scheduler, name)]
    empty = {name: type(getattr(scheduler, name))() for name in present}
    with attributes_set([scheduler], **empty):
        scheduler.set_pause_state(internals.UNPAUSED)
        try:
            yield
        finally:
            scheduler.set_pause_state(state)


def _run(core: Any, rows: Sequence[list[int]]) -> list[list[float]]:
    from vllm import SamplingParams

    kinds = internals.ENGINE_MESSAGES
    scheduler = core.scheduler
    names = [f"hybrid-engine-probe-{number}" for number in range(len(rows))]
    for name, row in zip(names, rows, strict=True):
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
        )
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
        preprocessed, *_ = core.preprocess_add_request(request)
        scheduler.add_request(preprocessed)
    log_probs: TensorDict = {}
    try:
        while scheduler.has_requests() or core.batch_queue:
            by_client, _ = core.step_fn()
            for outputs in (by_client or {}).values():
                for output in outputs.outputs:
                    if output.new_prompt_logprobs_tensors is not None:
                        # Column 0 is the prompt's own token.
                        scored = output.new_prompt_logprobs_tensors.logprobs[:, 0]
                        log_probs[output.request_id] = scored
    finally:
        core.abort_requests(names)
    return [log_probs[name].tolist() for name in names]
