"""What the colocated engine can be told, and what it answers; plain data, without vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Protocol, get_type_hints

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from hybrid_engine.config import GenerateConfig
from hybrid_engine.config.keys import Dtype
from hybrid_engine.errors import ArgumentError, ConfigError, StateError, Violation, nearest, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.size_rules import count_violations, infer_rank_violations

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules of a layer that LoRA usually changes; a model need not have them all."""


@dataclass(frozen=True)
class InferenceSettings:
    """How vLLM is built in the ranks that train: the keys, and what the job and its model say besides.

    Attributes:
        model_dir: directory with `config.json` of the model; weights in it are not read.
        sizes: parallel sizes by the keys of `generate`, and which rank takes which place.
        generate: the keys, with their defaults and checks (config/keys.py).
        dtype: of the weights and activations.
        max_loras: LoRAs that one batch may use; 0 builds vLLM without them.
        max_lora_rank: largest rank of a LoRA, one of vLLM's: 1, 8, 16, 32, 64, …
        lora_target_modules: last parts of the names of modules that LoRA may change. Without the output head,
            whose LoRA vLLM cannot combine with log-probabilities of prompts.
        tokenizer_dir: directory with the model's tokenizer; None: model_dir.
    """

    model_dir: str
    sizes: InferenceParallelism = field(default_factory=lambda: InferenceParallelism(world_size=1))
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    dtype: Dtype = "bfloat16"
    max_loras: int = 0
    max_lora_rank: int = 16
    lora_target_modules: tuple[str, ...] = LINEAR_MODULES
    tokenizer_dir: str | None = None

    def __post_init__(self) -> None:
        if violations := list(count_violations(self.sizes)) or list(infer_rank_violations(self.sizes)):
            raise ConfigError(violations)


def _listed(value: Any) -> Any:
    """A text alone is a list of one; pydantic would take a set too, which has no order."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError("Input should be a list")
    return tuple(value)


def _as_vllm_has_it(temperature: float) -> float:
    if 0 < temperature < 0.01:  # where logits overflow
        raise ValueError("Input should be 0 or at least 0.01, with which vLLM would sample")
    return temperature


_Whole = Annotated[int, Field(ge=0, lt=2**31)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; temperature 0 is greedy. Raises ArgumentError with every value that cannot be.

    `vllm.SamplingParams` is made of it where it is used, which checks what values mean together.

    Attributes:
        n: completions per prompt; 1 when greedy.
        temperature: 0, or 0.01 to 2.
        top_p: sample from the most probable tokens that together have this probability.
        top_k: sample from so many of the most probable tokens; 0 takes all.
        max_tokens: most tokens of a completion; None: as many as fit beside the prompt into max_model_len.
        seed: of a random stream for each completion, made of it, the prompt, and the completion's number, whatever the
            layout and whoever else is asked. None takes the engine's generator.
        logprobs: also return the log-probability of every sampled token, in the distribution that it was drawn from.
        stop_token_ids: a completion ends with any of these, which it keeps.
        ignore_eos: do not end at the end tokens of the model's generation_config.json or, without one, config.json.
        stop: a completion ends before any of these texts. Its request also ends at the tokenizer's end token.
        min_p: sample from tokens with at least this share of the most probable one's probability.
        repetition_penalty: above 1, tokens of prompt and completion so far become less probable.
        min_tokens: a completion has so many tokens before it may end.
    """

    n: Annotated[int, Field(ge=1, le=2**14)] = 1
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_as_vllm_has_it)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: _Whole = 0
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = 16
    seed: Annotated[int, Field(ge=0, le=2**62)] | None = None
    logprobs: bool = True
    stop_token_ids: Annotated[tuple[_Whole, ...], BeforeValidator(_listed)] = ()
    ignore_eos: bool = False
    stop: Annotated[tuple[_Text, ...], BeforeValidator(_listed)] = ()
    min_p: _Share = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    min_tokens: _Whole = 0

    def __new__(cls, *_: object, **given: object) -> Sampling:
        """Raise ArgumentError for unknown names, proposing ours where a name is another library's."""
        known = [field.name for field in fields(cls)]
        if violations := [_unknown(name, known) for name in given if name not in known]:
            raise ArgumentError(violations)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        violations = []
        for name, field_type in _field_types().items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, field_type.validate_python(value))
            except pydantic.ValidationError as error:
                message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
                problem = f"{message}, found {shortened(value)}"
                violations.append(Violation(f"sampling.{name}", problem, "Correct the value"))
        if violations:
            raise ArgumentError(violations)


@cache
def _field_types() -> Mapping[str, pydantic.TypeAdapter[Any]]:
    config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)
    hints = get_type_hints(Sampling, include_extras=True)
    return {name: pydantic.TypeAdapter(hint, config=config) for name, hint in hints.items()}


OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "num_generations": "n",
    "num_return_sequences": "n",
    "num_samples": "n",
    "stop_strings": "stop",
}
"""Names in transformers, TRL and elsewhere -> ours."""


def _unknown(name: str, known: Iterable[str]) -> Violation:
    meant = OTHER_NAMES.get(name) or nearest(name, known)
    remedy = f"Use {meant}" if meant else f"Use one of {', '.join(known)}, or pass vllm.SamplingParams"
    return Violation(f"sampling.{name}", "is no attribute of Sampling", remedy)


class Decoder(Protocol):
    """What makes text of token ids (prompts.py)."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        ...


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: sampled tokens, with the stop token or the tokens of a stop string.
        logprobs: one per token, in the distribution that it was drawn from, or empty when they were not asked for.
        finish_reason: "stop" or "length".
        stop_reason: the stop or end token, or the text, that ended it; None for "length", and for the tokenizer's end
            token, at which requests with stop strings end too.
        prompt_token_ids: what was completed.
        top_logprobs: per token {token id: log-probability} of the sampled one and of as many of the most probable ones
            as `SamplingParams.logprobs` says; empty when none were asked for.
        drawn_text: the text that vLLM itself has made, where it looked for stop strings.
        tokenizer: makes the text otherwise.
        temperature: of `logprobs`, for `build_batch`: 1 where sampling is greedy.
        prompt_logprobs: of each token of the prompt but the first, after those before it, at temperature 1; empty
            unless `SamplingParams.prompt_logprobs` asks for them.
        prompt_top_logprobs: at each of these {token id: log-probability} of the token itself and of as many of the most
            probable ones as that says; empty when it says 0.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    drawn_text: str | None = field(default=None, repr=False)
    tokenizer: Decoder | None = field(default=None, repr=False, compare=False)
    temperature: float = 1.0
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[Mapping[int, float], ...] = ()

    @property
    def text(self) -> str:
        """The text of the tokens, without special tokens, stop token and stop string; made when it is asked for.

        Raises ConfigError where the model's directory has no tokenizer.
        """
        if self.drawn_text is not None:
            return self.drawn_text
        if self.tokenizer is None:
            raise StateError("this completion comes from no engine, so nothing can make text of its tokens")
        return self.tokenizer.decode(self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids)
