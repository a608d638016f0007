"""Rules of the configuration, the contexts they read, and the conversion of parallel size rules.

A training rule reads a `TrainingContext`. An inference rule reads a `JobContext`, which has both
sides. A rule is a sentence, what breaks it, and a code:

    Constraint(
        "actor_config.sequence_parallel",
        "sequence_parallel needs tensor_model_parallel_size > 1.",
        lambda context: context.actor.sequence_parallel and context.train_sizes.tensor == 1,
        code="needs-tensor-parallelism",
    )

Its violation names the key, the values of all keys in the sentence, and the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Generic, Literal, TypeVar

from hybrid_engine.config.keys import (
    ActorConfig,
    Dtype,
    FsdpConfig,
    GenerateConfig,
    HybridConfig,
    LoraConfig,
    ScheduleConfig,
)
from hybrid_engine.errors import Violation, Violations, shortened
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism, sizes_of
from hybrid_engine.layouts.parameters import linear_modules
from hybrid_engine.layouts.size_rules import SizeRule
from hybrid_engine.layouts.stages import Chunk, chunks_of, split_violations
from hybrid_engine.models.families import read_model, require_rules
from hybrid_engine.models.table import ModelDims, ModelTable


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

    @property
    def dims(self) -> ModelDims:
        """Dimensions of the model."""
        return self.table.dims

    @property
    def schedule(self) -> ScheduleConfig:
        """Schedule of the optimizer; without one, the defaults, which keep every rule."""
        return self.actor.optimizer.schedule or ScheduleConfig()

    @cached_property
    def named(self) -> dict[str, object]:
        """Values that the sentence of a rule may name: keys of the actor, and dimensions."""
        # Sections of pydantic iterate over pairs of key and value. The last pair of a key counts.
        sections = (
            self.schedule,
            self.fsdp,
            self.actor.lora or (),
            self.actor.optimizer,
            self.actor,
        )
        return dict(chain(*sections), **asdict(self.dims), world_size=self.world_size)

    @property
    def fsdp(self) -> FsdpConfig:
        """How FSDP2 splits the model; the defaults if Megatron trains."""
        return self.actor.fsdp or FsdpConfig()

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Chunks of Megatron's model; none for an impossible split, which a size rule reports."""
        split = (self.train_sizes, self.dims.num_layers, self.dims.num_mtp_layers)
        return [] if any(split_violations(*split)) else chunks_of(*split)


@dataclass(frozen=True)
class JobContext(TrainingContext):
    """Settings of a whole job: the training model, and vLLM that generates with its weights."""

    generate: GenerateConfig

    @classmethod
    def of(
        cls,
        config: HybridConfig,
        world_size: int,
        num_mtp_layers: int | None = None,
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

    @cached_property
    def named(self) -> dict[str, object]:
        """Values that the sentence of a rule may name: also keys of `generate_config`."""
        return super().named | dict(self.generate)

    @property
    def served_dtype(self) -> Dtype:
        """Dtype of the weights that vLLM receives."""
        return self.generate.served_dtype(self.actor.params_dtype)

    @property
    def adapter(self) -> LoraConfig | None:
        """LoRA of the configuration that vLLM gets as an adapter; None if it is merged."""
        return self.actor.lora if self.generate.lora_delivery == "adapter" else None


Context = TypeVar("Context", bound=TrainingContext)
Sizes = TypeVar("Sizes", TrainParallelism, InferenceParallelism)
Computing = Literal["", "stored", "here", "anywhere"]
Broken = bool | Iterable[str | Violation]
"""How a context breaks a rule.

True if the values that the sentence names say it all; the problems at the rule's key; a mapping of
key to problem; or violations with codes and remedies of their own. False or nothing if it keeps
the rule.
"""


@dataclass(frozen=True)
class Constraint(Generic[Context]):
    """A rule of the configuration.

    Attributes:
        key: configuration key that most often has to change; a violation may name another key.
        rule: the condition that a valid configuration satisfies, as a sentence for the
            documentation. It is also the remedy of a violation.
        check: returns how a context breaks the rule.
        code: of the violations; "" if each has its own.
        computing: set if the rule concerns only the computation of training, so that a model that
            merely holds weights may break it: "here" for trainers built by this package, "stored"
            for those of them whose weights are allocated here too, "anywhere" for every trainer.
    """

    key: str
    rule: str
    check: Callable[[Context], Broken]
    _: KW_ONLY
    code: str = ""
    computing: Computing = ""

    def find(self, context: Context) -> Violations:
        """Yield the violations of the rule."""
        broken = self.check(context)
        if isinstance(broken, bool):
            broken = [self._values(context)] if broken else []
        for problem in broken:
            if isinstance(problem, Violation):
                yield problem
            # The problems of a mapping are its keys.
            elif isinstance(broken, Mapping):
                yield Violation(problem, broken[problem], self.rule, code=self.code)
            else:
                yield Violation(self.key, problem, self.rule, code=self.code)

    def _values(self, context: Context) -> str:
        """Return the values of the keys and dimensions that the sentence names."""
        words = dict.fromkeys(re.findall(r"\w+", self.rule))
        named = [word for word in words if word in context.named]
        return ", ".join(f"{word} {shortened(context.named[word])}" for word in named)


def without_peft_form(table: ModelTable, lora: LoraConfig | None) -> list[str]:
    """Return the target modules of Megatron whose adapters have no form of PEFT's."""
    have_form = linear_modules(table)
    targets = () if lora is None else lora.target_modules
    return [target for target in targets if not have_form.get(target, True)]


def given(reasons: Mapping[str, object]) -> list[str]:
    """Return the reasons that are true."""
    return [reason for reason, is_given in reasons.items() if is_given]


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

    def with_config_keys(rule: SizeRule[Sizes]) -> Callable[[Context], Broken]:
        return lambda context: [
            replace(violation, key=keys[violation.key])
            for violation in rule.find(sizes(context), context.table)
        ]

    return [Constraint(keys[rule.size], rule.text, with_config_keys(rule)) for rule in rules]
