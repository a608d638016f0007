"""What config.json must say: types, ranges and relations of the keys that name tables read.

config.json is data from outside. `require_valid` reports everything that is wrong with it, before a table reads it.
Keys that no table reads are not looked at. `transformers.AutoConfig` would do for less: its import takes seconds and
needs torch, where `plan` needs neither; it fills in sizes that are missing, takes 3 key/value heads for 4 heads, and
raises the first of several faults alone. A test compares the defaults with those of its classes.

Here is what a schema consists of; family_schemas.py has one for each family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from hybrid_engine.errors import ConfigError, Violation, clipped, nearest, shortened

# The bounds are far beyond any model, and small enough that nothing which is made of them takes long or overflows.
Layers = Annotated[int, Field(ge=1, le=1000)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Heads = Annotated[int, Field(ge=1, le=2**12)]
HeadSize = Annotated[int, Field(ge=1, le=2**13)]
ExpertCount = Annotated[int, Field(ge=1, le=2**14)]
Window = Annotated[int, Field(ge=0, le=2**40)]
Positions = Annotated[int, Field(ge=1, le=2**40)]
Period = Annotated[int, Field(ge=1, le=2**20)]
Index = Annotated[int, Field(ge=0, le=2**20)]
Epsilon = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e15)]
NonNegative = Annotated[float, Field(ge=0, le=1e15)]
Share = Annotated[float, Field(gt=0, le=1)]
Flag = bool | None

ACTIVATIONS = frozenset(
    {
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "quick_gelu", "hardswish", "laplace", "leaky_relu", "linear"),
        *("mish", "prelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    }
)
"""transformers' names of activations."""
ROPE_TYPES = frozenset(
    {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su", "ntk", "mrope"}
)
"""Kinds of rotary scaling: transformers' names, and those that older files and vLLM have."""
NEEDED_FACTORS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kind of rotary scaling -> keys that it cannot do without."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Kinds of attention layers that the families here have; `attention` is an old name of the first."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(value: Any) -> Any:
    ids = value if isinstance(value, list) else [value]
    if value is not None and not all(_is_whole(token) and -(2**31) <= token < 2**31 for token in ids):
        raise ValueError("Input should be a token id, or a list of token ids")
    return value


def _known(names: frozenset[str]) -> AfterValidator:
    known = ", ".join(sorted(names))

    def check(name: str) -> str:
        if name not in names:
            close = nearest(name, names)
            raise ValueError(f"unknown name; did you mean {close}" if close else f"unknown name; known are {known}")
        return name

    return AfterValidator(check)


Tokens = Annotated[Any, AfterValidator(_tokens)]
Activation = Annotated[str, _known(ACTIVATIONS)]
RopeType = Annotated[str, _known(ROPE_TYPES)]
LayerTypes = Annotated[list[Annotated[str, _known(LAYER_TYPES)]], Field(max_length=1000)]


class Schema(pydantic.BaseModel):
    """Keys that are read; others are let through."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """What keys mean that are missing; without those that mean nothing then."""
        fields = ((name, field) for name, field in cls.model_fields.items() if not field.is_required())
        return {name: field.default for name, field in fields if field.default is not None}

    def relations(self) -> Iterator[Violation]:
        """What is wrong between keys that are right by themselves."""
        return iter(())


class Rope(Schema):
    """`rope_scaling` as transformers 4 writes it, or `rope_parameters` as transformers 5 does."""

    rope_type: RopeType | None = None
    type: RopeType | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    partial_rotary_factor: Share | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None
    attention_factor: Positive | None = None
    truncate: Flag = None
    full_attention: Rope | None = None
    sliding_attention: Rope | None = None

    @property
    def kind(self) -> str:
        """Of scaling."""
        return self.rope_type or self.type or "default"

    def relations(self) -> Iterator[Violation]:
        kind = self.kind
        for key in NEEDED_FACTORS.get(kind, ()):
            if getattr(self, key) is None:
                yield Violation(key, f"is missing, which scaling of type {kind!r} needs", "Add it")
        low, high = self.low_freq_factor, self.high_freq_factor
        if kind == "llama3" and low is not None and high is not None and low >= high:
            yield Violation("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}", "Use a larger one")


def below(key: str, violations: Iterator[Violation]) -> Iterator[Violation]:
    """The findings of a section under its key."""
    return (Violation(f"{key}.{found.key}", found.problem, found.remedy) for found in violations)


def require_valid(config: Mapping[str, Any], schema: type[Schema], source: str) -> None:
    """Raise ConfigError with everything that is wrong in `config`, the contents of the file `source`.

    Keys of the findings are config.json's own. First wrong values; where there are none, wrong relations.
    """
    try:
        found = list(schema.model_validate(config).relations())
    except pydantic.ValidationError as error:
        found = [_violation_of(item) for item in error.errors(include_url=False, include_context=False)]
    if found:
        raise ConfigError([Violation(one.key, f"{one.problem}, in {source}", one.remedy) for one in found])


def _violation_of(item: Mapping[str, Any]) -> Violation:
    key = clipped(".".join(map(str, item["loc"])))
    if item["type"] == "missing":
        return Violation(key, "is missing", "Name a model with a complete config.json")
    is_section = item["type"] == "model_type"  # pydantic names the class
    message = "Input should be keys and values" if is_section else item["msg"].removeprefix("Value error, ")
    return Violation(
        key, f"{message}, found {shortened(item.get('input'))}", "Correct the value, or name another model"
    )


def architectures_of(config: Mapping[str, Any], source: str) -> Sequence[str]:
    """Return the names in `architectures`. Raises ConfigError unless they are texts."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"Input should be a list of names, found {shortened(names)}, in {source}"
        raise ConfigError([Violation("architectures", problem, "Name one of transformers' model classes")])
    return names
