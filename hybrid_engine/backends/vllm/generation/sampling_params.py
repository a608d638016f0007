"""How tokens are drawn, in vLLM's terms: from our `Sampling`, or from vLLM's own `SamplingParams`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.errors import ArgumentError, Violation, shortened

if TYPE_CHECKING:
    from vllm import SamplingParams

    from hybrid_engine.backends.vllm.generation.model_tokenizer import ModelTokenizer

    AnySampling: TypeAlias = Sampling | SamplingParams

_NOT_IN_COMPLETIONS = ("prompt_logprobs", "prompt_logprob_token_ids")


def sampling_params(sampling: AnySampling | None, tokenizer: ModelTokenizer | None = None) -> Any:
    """vLLM's `SamplingParams` for one call; those of the caller are copied.

    vLLM detokenizes only where it must: text that nobody asks for is not made, see `Completion.text`.

    Args:
        sampling: of either kind; None: `Sampling()`.
        tokenizer: is loaded where requests need one; ConfigError where the model has none.

    Raises ArgumentError with vLLM's complaints (VLLM_MAX_N_SEQUENCES may limit n further), and with everything in
    `SamplingParams` that completions could not carry.
    """
    params = _own_params(Sampling() if sampling is None else sampling)
    if tokenizer is not None and needs_tokenizer(params):
        _ = tokenizer.loaded
    return params


def _own_params(sampling: AnySampling) -> Any:
    from vllm import SamplingParams

    if isinstance(sampling, Sampling):
        return _from_ours(sampling)
    if not isinstance(sampling, SamplingParams):
        remedy = "Pass hybrid_engine.Sampling or vllm.SamplingParams, one for all prompts"
        raise ArgumentError([Violation("sampling", f"got {shortened(sampling)}", remedy)])
    if violations := [*_impossible(sampling)]:
        raise ArgumentError(violations)
    params = sampling.clone()
    is_plain = params.skip_special_tokens and not params.include_stop_str_in_output
    params.detokenize = params.detokenize and (bool(params.stop) or not is_plain)
    return params


def told_fields(params: SamplingParams) -> dict[str, Any]:
    """All that the caller decides, by name: the `repr` of `SamplingParams` leaves some of it out, as `logit_bias`."""
    return {name: getattr(params, name) for name in params.__struct_fields__ if not name.startswith("_")}


def needs_tokenizer(params: SamplingParams) -> bool:
    """Whether vLLM needs a tokenizer for a request."""
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

    with refusals_named():
        return SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            seed=sampling.seed,
            logprobs=0 if sampling.logprobs else None,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            detokenize=bool(sampling.stop),
        )


def _impossible(params: SamplingParams) -> Iterator[Violation]:
    if params.output_kind.name == "DELTA":
        remedy = "Leave it out; to stream, use `inference.llm`"
        yield Violation("sampling.output_kind", "DELTA, but completions come back whole", remedy)
    for name in _NOT_IN_COMPLETIONS:
        if getattr(params, name, None) is not None:
            remedy = "Leave it out; `inference.prompt_logprobs(token_ids)` computes log-probabilities of prompts"
            yield Violation(f"sampling.{name}", "completions do not carry it", remedy)
