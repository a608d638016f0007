"""Requests to vLLM, from ours and back; none outlives the call that made it.

What a failed call leaves in vLLM's engine would be answered by the next one, from a KV cache of weights that are gone;
and blocks that the failed step was to compute are already in the prefix cache, empty. So a failure aborts every request
and forgets every cached prefix, and nothing goes on while anything is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import Completion, Decoder, Sampling
from hybrid_engine.backends.vllm.prompts import STREAMING, ModelTokenizer
from hybrid_engine.errors import ArgumentError, GenerationError, StateError, Violation, first_of, shortened
from hybrid_engine.messages import decode, encode
from hybrid_engine.ports import Data, NearEnd
from hybrid_engine.probes import ProbeLimits

if TYPE_CHECKING:
    from vllm import SamplingParams

    AnySampling: TypeAlias = Sampling | SamplingParams
    Samplings: TypeAlias = AnySampling | Sequence[AnySampling]

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for those of the distribution that tokens are drawn from: after temperature, penalties, top-p, top-k."""


def probe_limits(vllm_config: Any, refusal: str = "") -> ProbeLimits:
    """What an engine of this configuration can be asked for, see `probes.Probed`; `refusal`: what else is known.

    Quantized weights or caches are not compared: vLLM alone computes with them.
    """
    config, cache = vllm_config.model_config, vllm_config.cache_config
    if config.quantization is not None:
        refusal = f"vLLM computes with weights in {config.quantization}, the trainer does not"
    elif cache.cache_dtype not in ("auto", str(config.dtype).removeprefix("torch.")):
        refusal = f"vLLM keeps keys and values in {cache.cache_dtype}"
    return ProbeLimits(refusal, config.max_model_len - 1, vocab_size=config.get_vocab_size())


# -- sampling ----------------------------------------------------------------------------------------------------------


def sampling_params(sampling: AnySampling | None, tokenizer: ModelTokenizer | None = None) -> Any:
    """vLLM's `SamplingParams` for one call; those of the caller are copied.

    vLLM detokenizes only where it must: text that nobody asks for is not made, see `Completion.text`.

    Args:
        sampling: of either kind; None: `Sampling()`.
        tokenizer: is loaded where requests need one; ConfigError where the model has none.

    Raises ArgumentError with vLLM's complaints (VLLM_MAX_N_SEQUENCES may limit n further), and with everything in
    `SamplingParams` that completions could not carry.
    """
    from vllm import SamplingParams

    sampling = Sampling() if sampling is None else sampling
    if isinstance(sampling, Sampling):
        params = _from_ours(sampling)
    elif not isinstance(sampling, SamplingParams):
        remedy = "Pass hybrid_engine.Sampling or vllm.SamplingParams, one for all prompts or a list with one for each"
        raise ArgumentError([Violation("sampling", f"got {shortened(sampling)}", remedy)])
    elif violations := [*_impossible(sampling)]:
        raise ArgumentError(violations)
    else:
        params = sampling.clone()
        is_plain = params.skip_special_tokens and not params.include_stop_str_in_output
        params.detokenize = params.detokenize and (bool(params.stop) or not is_plain)
    if tokenizer is not None and needs_tokenizer(params):
        _ = tokenizer.loaded
    return params


@dataclass(frozen=True)
class Asked:
    """How each prompt of a call is sampled.

    Attributes:
        each: parameters of each prompt, as what completes it takes them.
        shared: those of all prompts, where the caller passed one and not a list.
    """

    each: tuple[Any, ...]
    shared: Any

    @property
    def seeds(self) -> list[int | None] | int | None:
        """Of all prompts, or of each."""
        return [params.seed for params in self.each] if self.shared is None else self.shared.seed

    @property
    def max_tokens(self) -> list[int]:
        """Of each prompt's completions, at least."""
        return [params.max_tokens or 1 for params in self.each]

    def fields(self, data: Data) -> object:
        """What all ranks must pass alike: with local data, a list is each rank's own."""
        if self.shared is not None:
            return caller_fields(self.shared)
        return [caller_fields(params) for params in self.each] if data == "global" else "a list"

    def messages(self) -> list[bytes]:
        """For whoever completes the prompts: `sampling_of` reads it. Empty where all ranks have the same."""
        return [encode(params) if self.shared is None else b"" for params in self.each]


def asked_for(sampling: Samplings | None, num_prompts: int, taken: Callable[[AnySampling | None], Any]) -> Asked:
    """How so many prompts are sampled, by one for all or a list.

    `taken` checks one and says what is made of it. Raises ArgumentError with all that it says of every one, and for a
    list of another length.
    """
    if not isinstance(sampling, list | tuple):
        params = taken(sampling)
        return Asked((params,) * num_prompts, params)
    violations, each = [], []
    if len(sampling) != num_prompts:
        remedy = "Pass one for all prompts, or a list with one for each"
        violations.append(Violation("sampling", f"a list of {len(sampling)} for {num_prompts} prompts", remedy))
    for index, one in enumerate(sampling):
        try:
            each.append(taken(one))
        except ArgumentError as error:
            violations += [replace(found, key=_at(found.key, index)) for found in error.findings]
    if violations:
        raise ArgumentError(violations)
    return Asked(tuple(each), None)


def _at(key: str, index: int) -> str:
    """`sampling.n` of the list's element: `sampling[2].n`."""
    return key.replace("sampling", f"sampling[{index}]", 1)


def sampling_of(message: bytes, shared: Any, seed: int | None) -> Any:
    """vLLM's parameters of one prompt: of what `Asked.messages` says, or `shared`; completion i draws by seed + i."""
    from vllm import SamplingParams

    params = decode(message, SamplingParams) if message else shared
    if params.seed is None:
        return params
    own = params.clone()
    own.seed = seed
    return own


def caller_fields(params: SamplingParams) -> dict[str, Any]:
    """All that the caller decides, by name: the `repr` of `SamplingParams` leaves some of it out, as `logit_bias`."""
    return {name: getattr(params, name) for name in params.__struct_fields__ if not name.startswith("_")}


def needs_tokenizer(params: SamplingParams) -> bool:
    return bool(params.detokenize or params.bad_words or params.structured_outputs is not None)


@contextlib.contextmanager
def refusals_named() -> Iterator[None]:
    """What vLLM raises inside of a request that cannot be is an ArgumentError."""
    try:
        yield
    except internals.CLIENT_ERROR.load() as error:
        raise ArgumentError([Violation("sampling", f"vLLM refuses it: {error}", "Correct the value")]) from error


def _from_ours(sampling: Sampling) -> Any:
    from vllm import SamplingParams

    fields = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    fields |= {"logprobs": 0 if sampling.logprobs else None, "detokenize": bool(sampling.stop)}
    fields |= {name: list(fields[name]) for name in ("stop", "stop_token_ids")}
    with refusals_named():
        return SamplingParams(**fields)


def _impossible(params: SamplingParams) -> Iterator[Violation]:
    if params.output_kind.name == "DELTA":
        yield Violation("sampling.output_kind", "DELTA, but completions come back whole", STREAMING)
    if getattr(params, "prompt_logprob_token_ids", None) is not None:
        remedy = "Leave it out; prompt_logprobs asks for those of the prompt's own tokens"
        yield Violation("sampling.prompt_logprob_token_ids", "completions do not carry it", remedy)


# -- completions -------------------------------------------------------------------------------------------------------


def completions_of(output: Any, params: Any, tokenizer: Decoder) -> list[Completion]:
    prompt = tuple(output.prompt_token_ids)
    scored = _scored(output.prompt_logprobs[1:], prompt[1:]) if output.prompt_logprobs else ()
    top = _all_scored(output.prompt_logprobs[1:]) if params.prompt_logprobs else ()
    has_top = bool(params.logprobs or params.logprob_token_ids)
    return [
        Completion(
            tuple(choice.token_ids),
            _scored(choice.logprobs or (), choice.token_ids),
            str(choice.finish_reason),
            choice.stop_reason,
            prompt,
            _all_scored(choice.logprobs or ()) if has_top else (),
            choice.text if params.detokenize else None,
            tokenizer,
            params.temperature or 1.0,
            scored,
            top,
        )
        for choice in output.outputs
    ]


def _scored(positions: Sequence[Any], tokens: Sequence[int]) -> tuple[float, ...]:
    """Of each token, at its position; none where there are no positions."""
    return tuple(position[token].logprob for position, token in zip(positions, tokens, strict=False))


def _all_scored(positions: Sequence[Any]) -> tuple[dict[int, float], ...]:
    return tuple({each: at.logprob for each, at in position.items()} for position in positions)


def logprobs_of_prompt(rows: Sequence[Any], token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probability [length - 1] of each token but the first, from what vLLM says of a prompt."""
    values = [position[token].logprob for position, token in zip(rows[1:], token_ids[1:], strict=True)]
    return torch.tensor(values, dtype=torch.float32)


def distributions_of_prompt(rows: Sequence[Any]) -> torch.Tensor:
    """Log-probabilities [length - 1, vocabulary], from what vLLM says of a prompt."""
    table = torch.empty(len(rows) - 1, len(rows[1]), dtype=torch.float32)
    for index, position in enumerate(rows[1:]):
        table[index, list(position)] = torch.tensor([entry.logprob for entry in position.values()])
    return table


# -- vLLM's engine around a call ---------------------------------------------------------------------------------------


class _OneThread(contextlib.ContextDecorator):
    """Inside, the thread that entered first is the only one; the same may enter again. Another gets a StateError.

    It does not wait: which thread comes first would be another one on each rank, and ranks answer a call together.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise StateError(
                "another thread is generating: vLLM in this process answers one call at a time. That call goes on. "
                "Pass all prompts in one call, or take a lock around calls, in the same order on every rank"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


one_thread = _OneThread()
"""Of the process, as are the generator and the settings that a call of any engine changes meanwhile."""


@contextlib.contextmanager
def none_left(llm: Any) -> Iterator[None]:
    """Have `llm` answer inside; whatever ends the block early, KeyboardInterrupt too, leaves nothing behind.

    Raises StateError when there are requests before.
    """
    _require_none(llm, "generate")
    try:
        yield
    except BaseException:
        abandon(llm)
        raise


@contextlib.contextmanager
def calling_near_end(llm: Any, near_end: NearEnd | None) -> Iterator[None]:
    """Have `llm` answer inside, and call `near_end` once: before the step with few enough requests left, or at the end.

    On each rank by itself: replicas do not finish together.
    """
    if near_end is None:
        yield
        return
    engine, num_requests, is_called = llm.llm_engine, 0, False

    def watching(step: Callable[[], Any]) -> Callable[[], Any]:
        def watched_step() -> Any:
            nonlocal num_requests, is_called
            num_left = engine.get_num_unfinished_requests()
            num_requests = max(num_requests, num_left)
            if not is_called and num_left <= near_end.share * num_requests:
                is_called = True
                near_end.call()
            return step()

        return watched_step

    with internals.STEP.replaced(watching, engine):
        yield
    if not is_called:
        near_end.call()


def abandon(llm: Any) -> None:
    """Abort every request in every part of vLLM's engine, and forget cached prefixes. Raises StateError.

    On this rank only: ranks of a replica, or of replicas that step together, must all do so or end.
    """
    engine = llm.llm_engine
    core, outputs = internals.core_of(llm), engine.output_processor
    # Not through the engine's own abort: after an interruption its tables may disagree, and then that raises.
    for table in (outputs.request_states, outputs.parent_requests, outputs.external_req_ids):
        table.clear()
    core.abort_requests(list(core.scheduler.requests))
    if core.batch_queue is not None:
        core.batch_queue.clear()
    engine.should_execute_dummy_batch = False
    runner = internals.model_runner_of(llm)
    runner.execute_model_state = None  # a forward pass without its sampling, which vLLM would refuse to forget
    # A step that failed may have lost the word of earlier ends; the next one tells the runner of all that it holds.
    core.scheduler.finished_req_ids |= _requests_of_runner(runner)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # steps in flight read the weights
    reset_prefix_cache(llm)


def reset_prefix_cache(llm: Any) -> None:
    """Forget cached prefixes; StateError naming what is left when vLLM did not, or has requests."""
    _require_none(llm, "forget cached prefixes")
    if not llm.reset_prefix_cache():
        pool = internals.core_of(llm).scheduler.kv_cache_manager.block_pool
        num_used = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1  # one is always taken
        raise StateError(
            f"vLLM did not forget its cached prefixes: {num_used} blocks of the KV cache are in use, though it has no "
            "requests. They hold values of older weights: shut this engine down and build a new one"
        )


def zero_caches(runner: Any) -> None:
    """Zero all of the memory behind every cache: keys and values, latent vectors, states of linear attention.

    A block that a request leaves keeps what it held, and kernels read more of a block than what is valid in it: a
    masked score is zero, and zero times NaN is NaN. What a diverged policy left would spoil later requests there.
    """
    for storage in {each.data_ptr(): each for each in cache_storages(runner)}.values():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def cache_storages(runner: Any) -> list[torch.UntypedStorage]:
    """The memory behind every cache; some of it may be there more than once."""
    tree_leaves = internals.TREE_LEAVES.load()
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    held = [*runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)]
    # views of whatever shape, alone or in tuples
    return [leaf.untyped_storage() for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor)]


def require_answers(outputs: Sequence[Any], prompts: Sequence[Sequence[int]], num_each: Sequence[int]) -> None:
    """Raise StateError unless there is one output for each prompt, of this prompt, with as many completions, and
    GenerationError for NaN among the log-probabilities that were asked for."""
    problem = None
    if len(outputs) != len(prompts):
        problem = f"{len(outputs)} results for {len(prompts)} prompts"
    for index, (output, prompt, num) in enumerate(zip(outputs, prompts, num_each, strict=False)):
        if list(output.prompt_token_ids) != list(prompt):
            problem = problem or f"result {index} is of another prompt"
        elif len(output.outputs) != num:
            problem = problem or f"result {index} has {len(output.outputs)} completions in place of {num}"
    if problem:
        raise StateError(
            f"vLLM mixed up requests: {problem}. Is its engine used from elsewhere at the same time? "
            "If not, shut it down and build a new one"
        )
    _require_numbers(outputs)


def _require_numbers(outputs: Sequence[Any]) -> None:
    """Raise GenerationError, naming where it is, for NaN."""
    for index, output in enumerate(outputs):
        places = {f"completion {number}": choice.cumulative_logprob for number, choice in enumerate(output.outputs)}
        # a row is NaN as a whole, where a logit is
        rows = [next(iter(row.values())).logprob for row in output.prompt_logprobs or () if row]
        for place, logprob in {**places, "the prompt itself": math.fsum(rows)}.items():
            if logprob is not None and math.isnan(logprob):
                raise GenerationError(
                    f"vLLM computed NaN: log-probabilities of {place}, prompt {index} of {len(outputs)}. With these "
                    "weights its activations overflow, or a weight is NaN: go on from the last good checkpoint"
                )


def _require_none(llm: Any, purpose: str) -> None:
    requests = internals.core_of(llm).scheduler.requests
    left = sorted({*llm.llm_engine.output_processor.request_states, *requests})
    if left:
        raise StateError(
            f"vLLM cannot {purpose} while it has {len(left)} unfinished requests ({first_of(left, 8)}): finish those "
            "added to its engine, or call abandon_requests() on every rank; if neither helps, build a new engine"
        )


def _requests_of_runner(runner: Any) -> set[str]:
    """Ids of what the model runner, vLLM's first or its second one, still has a place for."""
    states = getattr(runner, "req_states", None)
    return set(runner.requests if states is None else states.req_id_to_index)
