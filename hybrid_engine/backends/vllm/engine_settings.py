"""What the colocated engine can be told, and what it answers; plain data, no vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from hybrid_engine.errors import ArgumentError, ConfigError, StateError, Violation, nearest, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.size_rules import count_violations, infer_rank_violations

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules of a layer that LoRA usually changes; a model need not have them all."""


@dataclass(frozen=True)
class InferenceSettings:
    """How vLLM is built in the ranks that train.

    Attributes:
        model_dir: directory with `config.json` of the model; weights in it are not read.
        tokenizer_dir: directory with the model's tokenizer; None: model_dir.
        sizes: parallel sizes, and which rank takes which place.
        dtype: of the weights and activations: "bfloat16", "float16" or "float32".
        quantization: vLLM's name of a method that quantises while loading, e.g. "fp8_per_channel"; None for none,
            whatever the model's config says of its checkpoint.
        max_loras: LoRAs that one batch may use; 0 builds vLLM without them.
        lora_target_modules: last parts of the names of modules that LoRA may change. Without the output head,
            whose LoRA vLLM cannot combine with log-probabilities of prompts.
        max_lora_rank: largest rank of a LoRA, one of vLLM's: 1, 8, 16, 32, 64, …
        max_model_len: longest prompt plus completion, in tokens; None takes the model's.
        max_num_seqs: sequences that are decoded together.
        seed: of the sampler; replica d draws with seed + d, all ranks of a replica alike.
        enforce_eager: no graph capture and no compilation; None means True on CPU and False on GPU.
        kv_cache_bytes: size of this rank's KV cache; None means 256 MiB on CPU and, on GPU, what
            `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the device that vLLM may use while it generates.
        release_weights: free the weights' memory when they are released; False keeps it for the next ones.
        enable_sleep_mode: let weights and KV cache be given back on GPU; None means True on GPU. No effect on CPU.
        enable_prefix_caching: share KV cache among prompts with the same beginning.
        timeout_seconds: longest wait for a rank in vLLM's process groups; None takes torch's, half an hour.
        allow_version: take a vLLM that was not tested, if it has every name that is used (acceptance.py).
        log_level: vLLM's own log messages below this level are not shown.
        extra: further arguments of vLLM's `EngineArgs`, none of which follows from these settings.
    """

    model_dir: str
    sizes: InferenceParallelism = field(default_factory=lambda: InferenceParallelism(world_size=1))
    dtype: str = "bfloat16"
    quantization: str | None = None
    max_loras: int = 0
    max_lora_rank: int = 16
    lora_target_modules: tuple[str, ...] = LINEAR_MODULES
    max_model_len: int | None = None
    max_num_seqs: int = 128
    seed: int = 0
    enforce_eager: bool | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.5
    release_weights: bool = True
    enable_sleep_mode: bool | None = None
    enable_prefix_caching: bool = True
    timeout_seconds: float | None = None
    allow_version: bool = False
    log_level: str = "ERROR"
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_dir: str | None = None

    def __post_init__(self) -> None:
        violations = list(count_violations(self.sizes)) or list(infer_rank_violations(self.sizes))
        if self.max_num_seqs < 1:
            violations.append(Violation("max_num_seqs", f"{self.max_num_seqs} is not positive", "Use 1 or more"))
        if self.dtype not in ("bfloat16", "float16", "float32"):
            violations.append(Violation("dtype", f"{self.dtype!r} is unknown", "Use bfloat16, float16 or float32"))
        if violations:
            raise ConfigError(violations)


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; temperature 0 is greedy. Raises ArgumentError with every value that cannot be.

    Attributes:
        n: completions per prompt; 1 when greedy.
        temperature: 0 to 2.
        top_p: sample from the most probable tokens that together have this probability.
        top_k: sample from so many of the most probable tokens; 0 takes all.
        max_tokens: most tokens of a completion; None: as many as fit beside the prompt into max_model_len.
        seed: of each prompt's own generator, seed + i for completion i: equal prompts get equal completions. None takes
            the engine's generator.
        logprobs: also return the log-probability of every sampled token, of the model itself: before temperature,
            top-p and top-k.
        stop_token_ids: a completion ends with any of these, which it keeps.
        ignore_eos: do not end at the end tokens of the model's generation_config.json or, without one, config.json.
        stop: a completion ends before any of these texts. Its request also ends at the tokenizer's end token.
        min_p: sample from tokens with at least this share of the most probable one's probability.
        repetition_penalty: above 1, tokens of prompt and completion so far become less probable.
        min_tokens: a completion has so many tokens before it may end.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 16
    seed: int | None = None
    logprobs: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0

    def __new__(cls, *_: object, **given: object) -> Sampling:
        """Raise ArgumentError for unknown names, proposing ours where a name is another library's."""
        known = [field.name for field in fields(cls)]
        if violations := [_unknown(name, known) for name in given if name not in known]:
            raise ArgumentError(violations)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        if violations := [*_violations_of(self)]:
            raise ArgumentError(violations)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", tuple(self.stop))


_OTHER_NAMES = {"max_new_tokens": "max_tokens", "num_return_sequences": "n", "num_generations": "n"}
"""Names in transformers and TRL -> ours."""


def _unknown(name: str, known: Iterable[str]) -> Violation:
    meant = _OTHER_NAMES.get(name) or nearest(name, known)
    remedy = f"Use {meant}" if meant else f"Use one of {', '.join(known)}, or pass vllm.SamplingParams"
    return Violation(f"sampling.{name}", "is no attribute of Sampling", remedy)


_LARGEST = 2**31 - 1
_WHOLE_NUMBERS = {
    "n": (1, 16384),
    "top_k": (0, _LARGEST),
    "max_tokens": (1, _LARGEST),
    "min_tokens": (0, _LARGEST),
    "seed": (0, 2**62),
}
"""Field of `Sampling` -> smallest and largest value. The limit of n is vLLM's; completion i draws with seed + i."""

_NO_NUMBER = {"max_tokens", "seed"}
"""Fields that may be None."""
_ALSO = {"top_k": "; 0 takes all tokens", "max_tokens": ", or None for as many as fit"}
"""Field -> what else its remedy says."""


def _violations_of(sampling: Sampling) -> Iterator[Violation]:
    def found(key: str, remedy: str) -> Violation:
        return Violation(f"sampling.{key}", f"{shortened(getattr(sampling, key))} is not possible", remedy)

    for key, (least, most) in _WHOLE_NUMBERS.items():
        value = getattr(sampling, key)
        if not (_is_whole(value) and least <= value <= most) and not (key in _NO_NUMBER and value is None):
            yield found(key, f"Use a whole number from {least} to {most}{_ALSO.get(key, '')}")
    if not (_is_number(sampling.temperature) and 0 <= sampling.temperature <= 2):
        yield found("temperature", "Use a number from 0, which is greedy, to 2")
    elif sampling.temperature < 1e-5 and sampling.n != 1:
        problem = f"{shortened(sampling.n)} completions, but greedy ones are all the same"
        yield Violation("sampling.n", problem, "Use 1, or a temperature above 0")
    if not (_is_number(sampling.top_p) and 0 < sampling.top_p <= 1):
        yield found("top_p", "Use a number above 0, at most 1")
    if not (_is_number(sampling.min_p) and 0 <= sampling.min_p <= 1):
        yield found("min_p", "Use a number from 0 to 1")
    if not (_is_number(sampling.repetition_penalty) and 0 < sampling.repetition_penalty < math.inf):
        yield found("repetition_penalty", "Use a number above 0; 1 is none")
    most_tokens = sampling.max_tokens
    if _is_whole(sampling.min_tokens) and isinstance(most_tokens, int) and 1 <= most_tokens < sampling.min_tokens:
        yield found("min_tokens", f"Use max_tokens at most, which is {sampling.max_tokens}")
    for key in ("logprobs", "ignore_eos"):
        if not isinstance(getattr(sampling, key), bool):
            yield found(key, "Use true or false")
    tokens, texts = sampling.stop_token_ids, sampling.stop
    if not (_is_list(tokens) and all(_is_whole(token) and 0 <= token <= _LARGEST for token in tokens)):
        yield found("stop_token_ids", "Use a list of token ids")
    if not (_is_list(texts) and all(isinstance(text, str) and text for text in texts)):
        yield found("stop", "Use a list of texts, none of them empty")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


class Decoder(Protocol):
    """What makes text of token ids (generation/model_tokenizer.py)."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        ...


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: sampled tokens, with the stop token or the tokens of a stop string.
        logprobs: one per token, or empty when they were not asked for.
        finish_reason: "stop" or "length".
        stop_reason: the stop or end token, or the text, that ended it; None for "length", and for the tokenizer's end
            token, at which requests with stop strings end too.
        prompt_token_ids: what was completed.
        top_logprobs: per token {token id: log-probability} of the sampled one and of as many of the most probable ones
            as `SamplingParams.logprobs` says; empty when none were asked for.
        drawn_text: the text that vLLM itself has made, where it looked for stop strings.
        tokenizer: makes the text otherwise.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    drawn_text: str | None = field(default=None, repr=False)
    tokenizer: Decoder | None = field(default=None, repr=False, compare=False)

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
