"""Types of a configuration's values, and what its sections have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from hybrid_engine.layouts.parallelism import LARGEST_SIZE


def _not_a_flag(value: Any) -> Any:
    """Pydantic takes `true` for 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _beside_its_file(path: Path, info: ValidationInfo) -> Path:
    """A relative path begins at the configuration file's directory, which `load_config` gives as context."""
    directory = (info.context or {}).get("directory")
    return path if directory is None else directory / path


def _always_a_path(value: Any, info: ValidationInfo) -> Any:
    """`Path` would drop the `./`, and what is left may be an id on the Hub: somebody else's model."""
    if not isinstance(value, str) or not value.startswith("./"):
        return value
    return Path((info.context or {}).get("directory") or "").absolute() / value


# Upper bounds are far beyond any job, and small enough that nothing which is made of them takes long or overflows.
Number = BeforeValidator(_not_a_flag)
Count = Annotated[int, Number, Field(ge=1, le=LARGEST_SIZE)]
Position = Annotated[int, Number, Field(ge=0, lt=LARGEST_SIZE)]
Positions = Annotated[tuple[Position, ...], Field(max_length=10_000)]
StageLayout = Annotated[str, Field(max_length=10_000)]
Tokens = Annotated[int, Number, Field(ge=1, le=2**30)]
Seed = Annotated[int, Number, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Number, Field(gt=0, le=1e30)]
NonNegative = Annotated[float, Number, Field(ge=0, le=1e30)]
Share = Annotated[float, Number, Field(gt=0, le=1)]
Decay = Annotated[float, Number, Field(ge=0, lt=1)]
Steps = Annotated[int, Number, Field(ge=0, le=2**40)]
Seconds = Annotated[float, Number, Field(ge=1, le=30 * 24 * 3600)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
Names = Annotated[tuple[Name, ...], Field(max_length=1000)]
File = Annotated[Path, AfterValidator(_beside_its_file)]
"""A path; a relative one begins at the directory of the file that it is written in."""
Model = Annotated[Path, BeforeValidator(_always_a_path)]
"""A directory, or an id on the Hub, which `find_model` tells apart; none begins with `./`, `../`, `/` or `~`."""


class FromProgram(dict[str, pydantic.JsonValue]):
    """Engine arguments that a program gives in Python: `{"vllm": FromProgram(trust_remote_code=True)}`.

    Neither YAML nor JSON nor a command line can make one, so a configuration from elsewhere cannot name code to run.
    """


def _whose(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Pydantic would make a plain dictionary of it."""
    return FromProgram(check(value)) if isinstance(value, FromProgram) else check(value)


EngineArguments = Annotated[dict[Name, pydantic.JsonValue], Field(max_length=100), pydantic.WrapValidator(_whose)]
Fields = Annotated[dict[Name, pydantic.JsonValue], Field(max_length=1000)]
NOTHING: Final[dict[str, pydantic.JsonValue]] = {}
"""A default, of which pydantic gives each section a copy."""
OF_VLLM: Final = "engine argument"
"""Marks a key that vLLM gets under the same name: to pass another one, give it a key with this mark."""
Dtype = Literal["bfloat16", "float16", "float32"]
RecomputedModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, hide_input_in_errors=True
    )
