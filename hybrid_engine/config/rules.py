"""Rules of the configuration, the contexts they read, and the conversion of rules of parallel sizes.

A rule of training looks at a `TrainingContext`, a rule of inference at a `JobContext`, which has both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Literal, TypeVar

from hybrid_engine.config.keys import ActorConfig, Dtype, GenerateConfig, HybridConfig
from hybrid_engine.errors import Violation
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism, sizes_of
from hybrid_engine.layouts.size_rules import SizeRule
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable


@dataclass(frozen=True)
class TrainingContext:
    """A training model and the number of its ranks."""

    actor: ActorConfig
    table: ModelTable
    world_size: int

    @cached_property
    def train_sizes(self) -> TrainParallelism:
        """The training side's sizes; parameters lie as in megatron-core's local layer spec."""
        return self.actor.sizes(self.world_size, cuts_whole_projections=True)


@dataclass(frozen=True)
class JobContext(TrainingContext):
    """A training model that vLLM generates with."""

    generate: GenerateConfig

    @classmethod
    def of(cls, config: HybridConfig, world_size: int, num_mtp_layers: int | None = None) -> JobContext:
        """Raises ConfigError for a model without a table.

        `num_mtp_layers`: that the trainer has, where it is not the model's number. vLLM has none.
        """
        table, _ = read_model(config.model)
        if num_mtp_layers is not None:
            table = replace(table, dims=replace(table.dims, num_mtp_layers=num_mtp_layers))
        return cls(config.actor_config, table, world_size, config.generate_config)

    @cached_property
    def infer_sizes(self) -> InferenceParallelism:
        """The inference side's sizes, ranks in order."""
        return self.generate.sizes(self.world_size)

    @property
    def served_dtype(self) -> Dtype:
        """The dtype in which vLLM receives weights."""
        return self.generate.served_dtype(self.actor.params_dtype)


Context = TypeVar("Context", bound=TrainingContext)
Sizes = TypeVar("Sizes", TrainParallelism, InferenceParallelism)
Computing = Literal["", "here", "anywhere"]
Finding = tuple[str, str]
"""Problem and remedy, under the key of the rule."""


@dataclass(frozen=True)
class Constraint(Generic[Context]):
    """One rule.

    Attributes:
        key: the configuration key that is most often to change; a finding names its own.
        rule: what holds of a sound configuration; a sentence for the documentation.
        find: yields what breaks it.
        computing: of a rule that concerns training's computation only, which a model that just holds weights may
            break: whose. That of the trainers that are built here, or that of any.
    """

    key: str
    rule: str
    find: Callable[[Context], Iterator[Violation]]
    computing: Computing = ""


def constraint(
    table: list[Constraint[Context]], key: str, rule: str, *, computing: Computing = ""
) -> Callable[[Callable[[Context], Iterator[Finding] | Iterator[Violation]]], None]:
    """Decorator: the function yields what breaks a rule, under its key or another one; the rule joins `table`."""

    def register(find: Callable[[Context], Iterator[Finding] | Iterator[Violation]]) -> None:
        def violations(context: Context) -> Iterator[Violation]:
            for found in find(context):
                yield found if isinstance(found, Violation) else Violation(key, *found)

        table.append(Constraint(key, rule, violations, computing))

    return register


def size_constraints(
    section: str, side: type[Sizes], rules: Sequence[SizeRule[Sizes]], sizes: Callable[[Context], Sizes]
) -> list[Constraint[Context]]:
    """A side's rules of parallel sizes under the keys of the configuration.

    Args:
        section: that has the sizes of `side`.
        rules: of the layouts.
        sizes: takes them out of what a rule of the configuration looks at.
    """
    keys = {size.name: f"{section}.{size.key}" for size in sizes_of(side)}

    def rekeyed(rule: SizeRule[Sizes]) -> Callable[[Context], Iterator[Violation]]:
        return lambda context: (
            Violation(keys[found.key], found.problem, found.remedy)
            for found in rule.find(sizes(context), context.table)
        )

    return [Constraint(keys[rule.size], rule.text, rekeyed(rule)) for rule in rules]
