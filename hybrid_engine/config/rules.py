"""Rules of the configuration, the contexts they read, and the conversion of parallel size rules.

A training rule reads a `TrainingContext`. An inference rule reads a `JobContext`, which has both
sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Literal, TypeVar

from hybrid_engine.config.keys import ActorConfig, Dtype, GenerateConfig, HybridConfig
from hybrid_engine.errors import Violations
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism, sizes_of
from hybrid_engine.layouts.size_rules import SizeRule
from hybrid_engine.models.families import read_model, require_rules
from hybrid_engine.models.table import ModelTable


@dataclass(frozen=True)
class TrainingContext:
    """Settings of a training model, its parameter table and its number of ranks."""

    actor: ActorConfig
    table: ModelTable
    world_size: int

    @cached_property
    def train_sizes(self) -> TrainParallelism:
        """Parallel sizes of the training side, for megatron-core's local layer spec."""
        return self.actor.sizes(self.world_size, cuts_whole_projections=True)


@dataclass(frozen=True)
class JobContext(TrainingContext):
    """Settings of a whole job: the training model, and vLLM that generates with its weights."""

    generate: GenerateConfig

    @classmethod
    def of(
        cls, config: HybridConfig, world_size: int, num_mtp_layers: int | None = None
    ) -> JobContext:
        """Return the context of a configuration on `world_size` ranks.

        Args:
            config: a configuration whose keys and types were checked.
            world_size: number of ranks.
            num_mtp_layers: MTP layers of the trainer's model if their number differs from
                config.json.

        Raises:
            ConfigError: if the model has no parameter table, or Megatron trains one without rules.
        """
        table, _ = read_model(config.model)
        table = config.generate_config.served(table)
        if config.actor_config.fsdp is None:
            require_rules(table)
        if num_mtp_layers is not None:
            table = replace(table, dims=replace(table.dims, num_mtp_layers=num_mtp_layers))
        return cls(config.actor_config, table, world_size, config.generate_config)

    @cached_property
    def infer_sizes(self) -> InferenceParallelism:
        """Parallel sizes of the inference side, with ranks in sequential order."""
        return self.generate.sizes(self.world_size)

    @property
    def served_dtype(self) -> Dtype:
        """Dtype of the weights that vLLM receives."""
        return self.generate.served_dtype(self.actor.params_dtype)


Context = TypeVar("Context", bound=TrainingContext)
Sizes = TypeVar("Sizes", TrainParallelism, InferenceParallelism)
Computing = Literal["", "here", "anywhere"]


@dataclass(frozen=True)
class Constraint(Generic[Context]):
    """A rule of the configuration.

    Attributes:
        key: configuration key that most often has to change; a violation may name another key.
        rule: the condition that a valid configuration satisfies, as a sentence for the
            documentation.
        find: yields the violations of the rule.
        computing: set if the rule concerns only the computation of training, so that a model that
            merely holds weights may break it: "here" for trainers built by this package,
            "anywhere" for every trainer.
    """

    key: str
    rule: str
    find: Callable[[Context], Violations]
    computing: Computing = ""


def constraint(
    table: list[Constraint[Context]], key: str, rule: str, *, computing: Computing = ""
) -> Callable[[Callable[[Context], Violations]], None]:
    """Return a decorator that adds the rule checked by a function to `table`; see `Constraint`."""

    def register(find: Callable[[Context], Violations]) -> None:
        table.append(Constraint(key, rule, find, computing))

    return register


def size_constraints(
    section: str,
    side: type[Sizes],
    rules: Sequence[SizeRule[Sizes]],
    sizes: Callable[[Context], Sizes],
) -> list[Constraint[Context]]:
    """Return the parallel size rules of one side as rules of the configuration.

    Args:
        section: configuration section that contains the sizes of `side`.
        side: class of the sizes.
        rules: rules of the layouts; their keys are attributes of `side`.
        sizes: returns the sizes of a context.
    """
    keys = {size.name: f"{section}.{size.key}" for size in sizes_of(side)}

    def with_config_keys(rule: SizeRule[Sizes]) -> Callable[[Context], Violations]:
        def find(context: Context) -> Violations:
            for violation in rule.find(sizes(context), context.table):
                yield replace(violation, key=keys[violation.key])

        return find

    return [Constraint(keys[rule.size], rule.text, with_config_keys(rule)) for rule in rules]
