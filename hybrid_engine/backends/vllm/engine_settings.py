"""Settings, sampling parameters and completions of the colocated engine; plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Protocol, get_type_hints

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from hybrid_engine.config import GenerateConfig
from hybrid_engine.config.keys import Dtype
from hybrid_engine.errors import (
    ArgumentError,
    StateError,
    Violation,
    nearest,
    require_none,
    shortened,
)
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.size_rules import count_violations, infer_rank_violations

TokenIds = Sequence[Sequence[int]]
"""Token ids of each sequence."""

TokenLists = list[list[int]]

OwnDtypes = Mapping[str, str] | None
"""Canonical name -> dtype, if it differs from that of the weights (`ModelTable.dtypes`)."""

Message = Mapping[str, Any]
Chat = Sequence[Message]

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules of a layer that LoRA usually changes; a model need not have them all."""


@dataclass(frozen=True)
class InferenceSettings:
    """Settings of the vLLM that is built in the training ranks: configuration keys, job and model.

    Attributes:
        model_dir: directory with `config.json` of the model; weights in it are not read.
        sizes: parallel sizes from the keys of `generate`, and the placement of ranks.
        generate: the keys, with their defaults and checks (config/keys.py).
        dtype: dtype of weights and activations.
        max_loras: maximum number of LoRAs in one batch; 0 builds vLLM without LoRA.
        max_lora_rank: largest rank of a LoRA, one of vLLM's: 1, 8, 16, 32, 64, …
        lora_target_modules: last parts of the names of modules that LoRA may change. The output
            head is not among them: vLLM cannot combine its LoRA with log-probabilities of prompts.
        tokenizer_dir: directory with the model's tokenizer; None: model_dir.
        quantization_config: that of a checkpoint, if its weights arrive quantised by it; None: they
            arrive unquantised, also if config.json has one.
    """

    model_dir: str
    sizes: InferenceParallelism = field(default_factory=lambda: InferenceParallelism(world_size=1))
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    dtype: Dtype = "bfloat16"
    max_loras: int = 0
    max_lora_rank: int = 16
    lora_target_modules: tuple[str, ...] = LINEAR_MODULES
    tokenizer_dir: str | None = None
    quantization_config: HfConfig | None = None

    def __post_init__(self) -> None:
        # The order of ranks is meaningful only if the sizes divide the world.
        require_none(count_violations(self.sizes))
        require_none(infer_rank_violations(self.sizes))


def _listed(value: Any) -> Any:
    """Return a list as a tuple; a single string counts as a list of one.

    pydantic would accept a set as well, which has no order.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError("Input should be a list")
    return tuple(value)


def _require_precise(temperature: float) -> float:
    # Logits overflow below 0.01, and vLLM would silently raise the temperature to it.
    if 0 < temperature < 0.01:
        raise ValueError("Input should be 0 or at least 0.01, with which vLLM would sample")
    return temperature


_Whole = Annotated[int, Field(ge=0, lt=2**31)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a call; temperature 0 is greedy.

    `vllm.SamplingParams` is made of it at the call, and checks combinations of values.

    Raises ArgumentError with every invalid value.

    Attributes:
        n: completions per prompt; 1 when greedy.
        temperature: 0, or 0.01 to 2.
        top_p: sample from the most probable tokens that together have this probability.
        top_k: sample from this many of the most probable tokens; 0 takes all.
        max_tokens: maximum number of tokens of a completion; None: as many as fit into
            max_model_len after the prompt.
        seed: seeds a random stream per completion, derived from the seed, the prompt and the number
            of the completion. The stream depends neither on the layout nor on other prompts. None
            draws from the engine's generator.
        logprobs: return the log-probability of every sampled token, in the distribution that it was
            drawn from.
        stop_token_ids: a completion ends with any of these, which it includes.
        ignore_eos: do not end at the end tokens of the model's generation_config.json or, without
            that file, of its config.json.
        stop: a completion ends before any of these texts. Its request also ends at the tokenizer's
            end token.
        min_p: sample from tokens with at least this share of the most probable token's probability.
        repetition_penalty: above 1, tokens of prompt and completion so far become less probable.
        min_tokens: minimum number of tokens of a completion.
    """

    n: Annotated[int, Field(ge=1, le=2**14)] = 1
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_require_precise)] = 1.0
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

    def __new__(cls, *_: object, **values: object) -> Sampling:
        """Raise ArgumentError for unknown names, with a suggestion for names of other libraries."""
        known = [field.name for field in fields(cls)]
        unknown = (_unknown(name, known) for name in values if name not in known)
        require_none(unknown, ArgumentError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        violations = []
        for name, field_type in _field_types().items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, field_type.validate_python(value))
            except pydantic.ValidationError as error:
                first = error.errors(include_url=False)[0]
                message = first["msg"].removeprefix("Value error, ")
                violations.append(
                    Violation(
                        f"sampling.{name}",
                        f"{message}, found {shortened(value)}",
                        "Correct the value",
                        code="invalid-value",
                    )
                )
        require_none(violations, ArgumentError)


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
"""Names in transformers, TRL and other libraries -> names here."""


def _unknown(name: str, known: Iterable[str]) -> Violation:
    intended = OTHER_NAMES.get(name) or nearest(name, known)
    if intended:
        remedy = f"Use {intended}"
    else:
        remedy = f"Use one of {', '.join(known)}, or pass vllm.SamplingParams"
    return Violation(
        f"sampling.{name}", "is not an attribute of Sampling", remedy, code="unknown-key"
    )


class TokenDecoder(Protocol):
    """A converter of token ids to text (prompts.py)."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...


@dataclass(frozen=True)
class RoutedExperts:
    """Experts of the first tokens of a prompt and its completion; `build_batch` reads them.

    Attributes:
        numbers: of the experts, int16 [tokens, layers, k]; 0 in layers without experts.
        num_layers: layers of the model, including those without experts.
        top_k: experts of each token.
    """

    numbers: bytes
    num_layers: int
    top_k: int

    def followed_by(self, other: RoutedExperts) -> RoutedExperts:
        """Return these experts, and those of `other` for the tokens after them."""
        return replace(self, numbers=self.numbers + other.numbers[len(self.numbers) :])


@dataclass(frozen=True)
class Completion:
    """A sampled completion of a prompt.

    Attributes:
        token_ids: sampled tokens, including the stop token or the tokens of a stop string.
        logprobs: log-probability of each token in the distribution that it was drawn from; empty if
            not requested.
        finish_reason: "stop" or "length".
        stop_reason: the stop or end token, or the text, that ended it. None for "length", and for
            the tokenizer's end token, at which requests with stop strings end as well.
        prompt_token_ids: token ids of the prompt.
        top_logprobs: {token id: log-probability} per token, for the sampled token and the
            `SamplingParams.logprobs` most probable ones; empty if not requested.
        drawn_text: text made by vLLM itself, if it looked for stop strings.
        tokenizer: makes the text otherwise.
        temperature: temperature of `logprobs`, for `build_batch`: 1 if sampling is greedy.
        prompt_logprobs: log-probability of each prompt token but the first, given the tokens before
            it, at temperature 1; empty unless `SamplingParams.prompt_logprobs` requests them.
        prompt_top_logprobs: {token id: log-probability} at each of these tokens, for the token and
            the `SamplingParams.prompt_logprobs` most probable ones; empty if that number is 0.
        routed_experts: experts that computed the tokens of prompt and completion, all but the last
            one, with `generate_config.router_replay`.
        image_inputs: tensors of the prompt's images for transformers' model, such as
            `pixel_values`, for `build_batch`; all completions of a prompt share them.
        versions: of a server's completion: version of the weights that drew each token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    drawn_text: str | None = field(default=None, repr=False)
    tokenizer: TokenDecoder | None = field(default=None, repr=False, compare=False)
    temperature: float = 1.0
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[Mapping[int, float], ...] = ()
    routed_experts: RoutedExperts | None = field(default=None, repr=False)
    image_inputs: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    versions: tuple[int, ...] = field(default=(), repr=False, compare=False)

    @property
    def text(self) -> str:
        """Text of the tokens, without special tokens, stop token and stop string; made on access.

        Raises ConfigError if the model's directory has no tokenizer, and StateError if the
        completion was not made by an engine.
        """
        if self.drawn_text is not None:
            return self.drawn_text
        if self.tokenizer is None:
            raise StateError(
                "this completion was not made by an engine, so it has no tokenizer to decode its "
                "tokens; set Completion.tokenizer",
                code="no-tokenizer",
            )
        # The last token of a stopped completion is the stop token.
        ends_with_stop = self.finish_reason == "stop"
        token_ids = self.token_ids[:-1] if ends_with_stop else self.token_ids
        return self.tokenizer.decode(token_ids)
