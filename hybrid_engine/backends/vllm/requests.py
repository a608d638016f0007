"""Conversion of requests to vLLM's form and back; no request outlives the call that made it.

The next call would answer the requests that a failed call left in vLLM's engine, from a KV cache of
weights that are gone. And blocks that the failed step should have computed are already in the
prefix cache, empty. So a failure aborts every request and resets the prefix cache, and generation
is refused while any request is left.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import (
    Completion,
    RoutedExperts,
    Sampling,
)
from hybrid_engine.backends.vllm.images import ImagePrompt, PackedImage, unpacked
from hybrid_engine.backends.vllm.prompts import STREAMING, ModelTokenizer
from hybrid_engine.compute_check.attention import compared_positions
from hybrid_engine.compute_check.probes import ProbeLimits
from hybrid_engine.errors import (
    ArgumentError,
    GenerationError,
    MessageError,
    ModelError,
    StateError,
    Violation,
    Violations,
    first_of,
    require_none,
    shortened,
)
from hybrid_engine.memory.offload_items import Spans
from hybrid_engine.messages import Record, encode
from hybrid_engine.ranks.torch_internals import tree_leaves
from hybrid_engine.serving.invitation import DrawnWith

if TYPE_CHECKING:
    from vllm import SamplingParams

    AnySampling: TypeAlias = Sampling | SamplingParams
    Samplings: TypeAlias = AnySampling | Sequence[AnySampling]

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probabilities of the distribution that tokens are drawn from: after
temperature, penalties, top-p and top-k."""


def probe_limits(vllm_config: Any, refusal: str = "") -> ProbeLimits:
    """Return the limits of probes to an engine of this configuration; see `probes.Probed`.

    Quantized weights or caches are refused, because the trainer does not compute with them.

    `refusal`: a reason for refusing that is known otherwise.
    """
    config = vllm_config.model_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    if config.quantization is not None:
        refusal = f"vLLM computes with weights in {config.quantization}, the trainer does not"
    elif cache_dtype not in ("auto", str(config.dtype).removeprefix("torch.")):
        refusal = f"vLLM keeps keys and values in {cache_dtype}"
    last = config.max_model_len - 1
    return ProbeLimits(
        refusal,
        last,
        vocab_size=config.get_vocab_size(),
        positions=compared_positions(last, config.hf_config.to_dict()),
    )


# -- requests -------------------------------------------------------------------------------------


class Request(Record, frozen=True):
    """A prompt to complete.

    Attributes:
        prompt: token ids, with all tokens of images.
        sampling: message of its sampling, in the engine's class and with the seed of its stream.
        number: number of the prompt. Requests with the same number reach the same server.
        lora: name of a delivered LoRA.
        weights: weights of servers with which it must be answered.
        unexpanded: token ids with one token for an image; empty without images.
        images: of the prompt.
    """

    prompt: list[int]
    sampling: bytes
    number: int = 0
    lora: str | None = None
    weights: DrawnWith | None = None
    unexpanded: tuple[int, ...] = ()
    images: tuple[PackedImage, ...] = ()

    @classmethod
    def of(cls, prompt: Sequence[int], sampling: AnySampling, **values: Any) -> Request:
        """Return the request for a prompt; `values` of further attributes."""
        if isinstance(prompt, ImagePrompt):
            values |= {"unexpanded": tuple(prompt.unexpanded), "images": tuple(prompt.packed)}
        return cls(list(prompt), encode(sampling), **values)

    @property
    def for_vllm(self) -> dict[str, Any]:
        """The prompt in vLLM's form."""
        if not self.images:
            return {"prompt_token_ids": self.prompt}
        return {
            "prompt_token_ids": list(self.unexpanded),
            "multi_modal_data": {"image": unpacked(self.images)},
        }


# -- sampling --------------------------------------------------------------------------------------


def sampling_params(sampling: AnySampling | None, tokenizer: ModelTokenizer | None = None) -> Any:
    """Return vLLM's `SamplingParams` for one call, a copy if the caller passes such.

    vLLM detokenizes only if it must: `Completion.text` makes text on access.

    Args:
        sampling: ours or vLLM's; None: `Sampling()`.
        tokenizer: is loaded if requests need it.

    Raises ArgumentError with vLLM's complaints (VLLM_MAX_N_SEQUENCES may limit n further) and with
    every field of `SamplingParams` that completions cannot carry, and ConfigError if requests need
    a tokenizer and the model has none.
    """
    from vllm import SamplingParams

    sampling = Sampling() if sampling is None else sampling
    if isinstance(sampling, Sampling):
        params = _from_ours(sampling)
    elif isinstance(sampling, SamplingParams):
        require_none(_unsupported(sampling), ArgumentError)
        params = sampling.clone()
        for name in params.__struct_fields__:
            setattr(params, name, _with_numbers_of_python(getattr(params, name)))
        # `Completion.text` makes the same text, unless these change it or stop strings need it.
        is_plain = params.skip_special_tokens and not params.include_stop_str_in_output
        params.detokenize = params.detokenize and (bool(params.stop) or not is_plain)
    else:
        raise ArgumentError.of(
            "sampling",
            f"got {shortened(sampling)}",
            "Pass hybrid_engine.Sampling or vllm.SamplingParams, "
            "one for all prompts or a list with one for each",
            code="wrong-type",
        )
    if tokenizer is not None and needs_tokenizer(params):
        _ = tokenizer.loaded
    try:
        encode(params)
    except MessageError as error:
        raise ArgumentError.of(
            "sampling", str(error), "Use numbers, texts, lists and mappings", code="wrong-type"
        ) from None
    return params


def _with_numbers_of_python(value: Any) -> Any:
    """Return a value of a sampling without NumPy's numbers, which messages do not have."""
    convert = _with_numbers_of_python
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {convert(key): convert(element) for key, element in value.items()}
    return list(map(convert, value)) if type(value) is list else value


def asked_for(
    sampling: Samplings | None,
    num_prompts: int,
    taken: Callable[[AnySampling | None], Any],
) -> list[Any]:
    """Return the sampling of each of `num_prompts` prompts, from one object for all or a list.

    `taken` checks an object and converts it. Raises ArgumentError with the violations of all
    objects, and for a list of another length.
    """
    if not isinstance(sampling, list | tuple):
        return [taken(sampling)] * num_prompts
    violations = []
    converted = []
    if len(sampling) != num_prompts:
        violations.append(
            Violation(
                "sampling",
                f"a list of {len(sampling)} for {num_prompts} prompts",
                "Pass one for all prompts, or a list with one for each",
                code="wrong-length",
            )
        )
    for index, element in enumerate(sampling):
        try:
            converted.append(taken(element))
        except ArgumentError as error:
            # `sampling.n` becomes `sampling[2].n`.
            violations += [
                replace(violation, key=violation.key.replace("sampling", f"sampling[{index}]", 1))
                for violation in error.findings
            ]
    require_none(violations, ArgumentError)
    return converted


def with_values(sampling: AnySampling, **values: Any) -> Any:
    """Return a copy of a sampling, ours or vLLM's, with other values.

    Does not import vLLM, which need not be installed.
    """
    if isinstance(sampling, Sampling):
        return replace(sampling, **values)
    params = sampling.clone()
    for name, value in values.items():
        setattr(params, name, value)
    return params


def needs_tokenizer(params: SamplingParams) -> bool:
    return bool(params.detokenize or params.bad_words or params.structured_outputs is not None)


@contextmanager
def refusals_named() -> Iterator[None]:
    """Raise ArgumentError in place of vLLM's errors about an invalid request."""
    try:
        yield
    except internals.CLIENT_ERROR as error:
        raise ArgumentError.of(
            "sampling", f"vLLM refuses it: {error}", "Correct the value", code="refused-by-vllm"
        ) from error


def _from_ours(sampling: Sampling) -> Any:
    from vllm import SamplingParams

    fields = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    fields["logprobs"] = 0 if sampling.logprobs else None  # 0: of the sampled token alone
    fields["detokenize"] = bool(sampling.stop)
    fields["stop"] = list(sampling.stop)
    fields["stop_token_ids"] = list(sampling.stop_token_ids)
    with refusals_named():
        return SamplingParams(**fields)


def _unsupported(params: SamplingParams) -> Violations:
    if params.output_kind.name == "DELTA":
        yield Violation(
            "sampling.output_kind",
            "DELTA, but completions are returned whole",
            STREAMING,
            code="no-streaming",
        )
    # Older versions of vLLM do not have these fields.
    if getattr(params, "routed_experts_prompt_start", 0):
        yield Violation(
            "sampling.routed_experts_prompt_start",
            f"{params.routed_experts_prompt_start}, but routers take the experts of all tokens",
            "Leave it out",
            code="not-supported",
        )
    if getattr(params, "prompt_logprob_token_ids", None) is not None:
        yield Violation(
            "sampling.prompt_logprob_token_ids",
            "completions do not carry it",
            "Leave it out; prompt_logprobs asks for those of the prompt's own tokens",
            code="not-supported",
        )


# -- completions -----------------------------------------------------------------------------------


def completions_of(output: Any, params: Any) -> list[Completion]:
    """Return the completions of one prompt from vLLM's `RequestOutput`."""
    # No log-probability exists for the first token of a prompt.
    rows = output.prompt_logprobs[1:] if output.prompt_logprobs else ()
    has_top = bool(params.logprobs or params.logprob_token_ids)
    return [
        Completion(
            token_ids=tuple(choice.token_ids),
            logprobs=scored(choice.logprobs or (), choice.token_ids),
            finish_reason=str(choice.finish_reason),
            stop_reason=choice.stop_reason,
            top_logprobs=_all_scored(choice.logprobs or ()) if has_top else (),
            drawn_text=choice.text if params.detokenize else None,
            temperature=params.temperature or 1.0,
            prompt_logprobs=scored(rows, output.prompt_token_ids[1:]),
            prompt_top_logprobs=_all_scored(rows) if params.prompt_logprobs else (),
            routed_experts=_routed_experts_of(choice),
        )
        for choice in output.outputs
    ]


def scored(positions: Sequence[Any], tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of each token at its position; empty without positions."""
    pairs = zip(positions, tokens, strict=False)
    return tuple(position[token].logprob for position, token in pairs)


def _all_scored(positions: Sequence[Any]) -> tuple[dict[int, float], ...]:
    return tuple(
        {token: entry.logprob for token, entry in position.items()} for position in positions
    )


def _routed_experts_of(choice: Any) -> RoutedExperts | None:
    """Return the experts of a `CompletionOutput`, if vLLM returns them."""
    experts = getattr(choice, "routed_experts", None)
    if experts is None:
        return None
    return RoutedExperts(experts.astype("int16").tobytes(), *experts.shape[1:])


def prompt_distributions(completion: Completion) -> torch.Tensor:
    """Return the log-probabilities [length - 1, vocabulary] of a prompt that was wholly scored."""
    rows = completion.prompt_top_logprobs
    return torch.tensor([[*map(row.get, range(len(row)))] for row in rows], dtype=torch.float32)


# -- vLLM's engine around a call -------------------------------------------------------------------


class _OneThread(ContextDecorator):
    """A lock that admits one thread, which may enter again; another thread gets a StateError.

    It does not wait: ranks answer a call together, and the first thread may differ between ranks.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise StateError(
                "another thread is generating: vLLM in this process answers one call at a time. "
                "That call continues. Pass all prompts in one call, or take a lock around calls, "
                "in the same order on every rank",
                code="another-thread-generates",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


one_thread = _OneThread()
"""The lock of this process: a call of any engine changes the process's generator and settings."""


@contextmanager
def none_left(llm: Any) -> Iterator[None]:
    """Abort all requests of `llm` if this block raises, KeyboardInterrupt included.

    Raises StateError if there are requests at its beginning.
    """
    _require_none(llm, "generate")
    try:
        yield
    except BaseException:
        abandon(llm)
        raise


def abandon(llm: Any) -> None:
    """Abort every request in every part of vLLM's engine, and reset the prefix cache.

    Local to this rank: ranks of a replica, or of replicas that step together, must all do so or
    end.

    Raises StateError if the prefix cache cannot be reset.
    """
    engine = llm.llm_engine
    core = internals.core_of(llm)
    outputs = engine.output_processor
    # The engine's own abort raises if its tables disagree, as they may after an interruption.
    for table in (outputs.request_states, outputs.parent_requests, outputs.external_req_ids):
        table.clear()
    core.abort_requests(list(core.scheduler.requests))
    if core.batch_queue is not None:
        core.batch_queue.clear()
    engine.should_execute_dummy_batch = False
    runner = internals.model_runner_of(llm)
    routes = getattr(runner, "aux_output_connector", None)
    if routes is not None:
        routes._pending_outputs.clear()  # experts of tokens whose step will not return
    runner.execute_model_state = None  # a forward without its sampling: the next one would raise
    # A failed step may have lost the ids of requests that ended before it. The next step passes the
    # runner every id that it holds, whether it is vLLM's first or second version of the runner.
    states = getattr(runner, "req_states", None)
    core.scheduler.finished_req_ids.update(
        runner.requests if states is None else states.req_id_to_index
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # steps in flight read the weights
    reset_prefix_cache(llm)


def reset_prefix_cache(llm: Any) -> None:
    """Reset the caches of prefixes and of images' embeddings.

    Raises StateError if vLLM has requests, or refuses to reset the cache of prefixes.
    """
    _require_none(llm, "forget cached prefixes")
    llm.llm_engine.reset_encoder_cache()
    if not llm.reset_prefix_cache():
        scheduler = internals.core_of(llm).scheduler
        pool = scheduler.kv_cache_manager.block_pool
        num_used = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1  # one is always taken
        raise StateError(
            f"vLLM did not forget its cached prefixes: {num_used} blocks of the KV cache are in "
            "use, though it has no requests. They hold values of older weights: shut this engine "
            "down and build a new one",
            code="prefix-cache-in-use",
        )


def zero_caches(runner: Any, pending: Spans | None = None) -> None:
    """Zero the memory of every cache: keys and values, latent vectors, states of linear attention.

    `pending`: addresses that stay as they are.

    A block that a request leaves keeps its contents, and kernels read more of a block than its
    valid part. A masked score is zero, but zero times NaN is NaN: the contents left by a diverged
    policy would corrupt later requests.
    """
    storages = {storage.data_ptr(): storage for storage in cache_storages(runner)}
    pending = pending or Spans()
    for address, storage in storages.items():
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for start, stop in pending.missing(address, address + storage.nbytes()):
            flat[start - address : stop - address].zero_()


def cache_storages(runner: Any) -> list[torch.UntypedStorage]:
    """Return the storages of every cache; a storage may appear more than once."""
    layers = runner.vllm_config.compilation_config.static_forward_context
    caches = [getattr(layer, "kv_cache", None) for layer in layers.values()]
    # Caches are views of any shape, alone or in tuples.
    leaves = tree_leaves([*runner.kv_caches, *caches])
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def require_answers(
    outputs: Sequence[Any],
    requests: Sequence[Request],
    num_each: Sequence[int],
) -> None:
    """Raise StateError unless `outputs` answer `requests`, in order, with `num_each` completions.

    Raises ModelError if vLLM gives images another number of tokens than the model's processor does,
    and GenerationError for NaN among the requested log-probabilities.
    """
    problem = None
    if len(outputs) != len(requests):
        problem = f"{len(outputs)} results for {len(requests)} prompts"
    expected = zip(outputs, requests, num_each, strict=False)
    for index, (output, request, num) in enumerate(expected):
        num_tokens = len(output.prompt_token_ids)
        if request.images and num_tokens != len(request.prompt):
            raise ModelError(
                f"prompt {index} has {len(request.prompt)} tokens with those of its images by the "
                f"model's processor, and {num_tokens} by vLLM. Correct the settings that decide "
                "how many tokens an image has, such as vision_feature_select_strategy, in "
                "config.json and the processor's files",
                code="image-tokens-differ",
            )
        if list(output.prompt_token_ids) != request.prompt:
            problem = problem or f"result {index} is of another prompt"
        elif len(output.outputs) != num:
            problem = problem or f"result {index} has {len(output.outputs)} completions, not {num}"
    if problem:
        raise StateError(
            f"vLLM mixed up requests: {problem}. Is its engine used from elsewhere at the same "
            "time? If not, shut it down and build a new one",
            code="mixed-up-requests",
        )
    for index, output in enumerate(outputs):
        places = {
            f"completion {number}": choice.cumulative_logprob
            for number, choice in enumerate(output.outputs)
        }
        # If a logit is NaN, its whole row is: the first entry of each row is enough.
        rows = [next(iter(row.values())).logprob for row in output.prompt_logprobs or () if row]
        # A sum is NaN if one of its terms is.
        places["the prompt itself"] = math.fsum(rows)
        for place, logprob in places.items():
            if logprob is not None and math.isnan(logprob):
                raise GenerationError(
                    f"vLLM computed NaN: log-probabilities of {place}, prompt {index} of "
                    f"{len(outputs)}. With these weights its activations overflow, or a weight is "
                    "NaN: go on from the last good checkpoint",
                    code="nan-computed",
                )


def _require_none(llm: Any, purpose: str) -> None:
    scheduled = internals.core_of(llm).scheduler.requests
    left = sorted({*llm.llm_engine.output_processor.request_states, *scheduled})
    if left:
        raise StateError(
            f"vLLM cannot {purpose} while it has {len(left)} unfinished requests "
            f"({first_of(left, 8)}): finish those added to its engine, or call abandon_requests() "
            "on every rank; if neither helps, build a new engine",
            code="unfinished-requests",
        )
