"""Settings of a run: a YAML file with `rl_config` and the engine's sections.

Paths in the file are relative to it. All errors are reported together, before a process group
exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from examples.gpt_rl import task
from hybrid_engine import HybridConfig, load_config
from hybrid_engine.config.keys import Count, File, NonNegative, Positive, Section, Seed, Steps
from hybrid_engine.config.loading import violations_of
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.files.documents import apply_overrides, read_yaml
from hybrid_engine.rl.config import shared_engine_settings
from hybrid_engine.rl.run_checks import staleness_violations


class WarmUpConfig(Section):
    """`rl_config.warm_up`: supervised steps on the demonstrations."""

    max_steps: Count = 800
    """Largest number of optimizer steps."""
    target_loss: NonNegative = 0.27
    """The warm-up ends when its smoothed loss (nats per token) is below this."""
    batch_size: Count = 128
    """Demonstrations per step."""
    learning_rate: Positive = 3e-3
    """Learning rate after the ramp."""
    ramp_steps: Count = 20
    """Steps in which the learning rate grows linearly."""


class PpoConfig(Section):
    """`rl_config.ppo`: settings of the critic, with `algorithm: ppo`."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of later rewards."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: Positive = 0.2
    """Clip range for the change of a value in an iteration."""
    learning_rate: Positive = 1e-3
    """Constant learning rate of the critic."""
    epochs: Count = 2
    """Passes of the critic over the completions of an iteration."""
    value_warm_up: Annotated[int, Field(ge=0, le=10_000)] = 2
    """Iterations at the start in which only the critic is trained."""


class RLConfig(Section):
    """`rl_config`: data, warm-up, and GRPO or PPO."""

    data: File
    """Directory with train.jsonl and held_out.jsonl."""
    seed: Seed = 0
    """Seed of weights, batches and samples; default of `seed` in the engine's sections."""
    iterations: Count = 30
    """Number of rollouts. Each is followed by `epochs` x `minibatches` optimizer steps."""
    warm_up: WarmUpConfig = WarmUpConfig()
    """Settings of the warm-up."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Source of advantages: other samples of the prompt, or a critic (`critic_config`)."""
    ppo: PpoConfig = PpoConfig()
    """Settings of PPO."""
    prompts_per_iteration: Count = 64
    """Problems in a rollout."""
    samples_per_prompt: Annotated[Count, Field(ge=2, le=16384)] = 8
    """Completions per problem: the group over which rewards are normalised."""
    max_tokens: Count = 5
    """Longest completion in tokens, including the end token."""
    temperature: Annotated[Positive, Field(ge=0.01, le=2)] = 1.0
    """Temperature of sampling and of all log-probabilities."""
    epochs: Count = 1
    """Passes over the completions of an iteration."""
    minibatches: Count = 2
    """Optimizer steps per epoch."""
    max_staleness: Steps = 0
    """With a server: publishes by which the weights that drew a token may be older."""
    importance_cap: Positive | None = None
    """Truncated importance sampling: the largest weight of a token."""
    learning_rate: Positive = 3e-4
    """Constant learning rate."""
    clip_ratio: Annotated[Positive, Field(lt=1)] = 0.2
    """PPO's epsilon: the probability ratio is clipped to [1 - epsilon, 1 + epsilon]."""
    kl_coefficient: NonNegative = 0.01
    """Weight of the KL divergence from the model after the warm-up."""
    evaluate_every: Count = 1
    """Iterations between measurements of held-out accuracy; the last iteration always has one."""
    checkpoint_every: Count = 10
    """Iterations between checkpoints; the end of a run and an interrupt also save one."""

    @property
    def batch_size(self) -> int:
        """Completions per iteration."""
        return self.prompts_per_iteration * self.samples_per_prompt


class Settings(pydantic.BaseModel):
    """A complete, valid configuration."""

    model_config = pydantic.ConfigDict(frozen=True)

    engine: HybridConfig
    rl: RLConfig
    world_size: int

    def title(self) -> str:
        """Return the title of the plot."""
        trainer = "Megatron" if self.engine.actor_config.fsdp is None else "FSDP2"
        train = _sizes_text(self.engine.train_sizes(self.world_size))
        infer = _sizes_text(self.engine.generate_config.sizes(self.world_size))
        return f"Two-digit sums: {trainer} {train} to vLLM {infer}, seed {self.rl.seed}"

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with its earlier part."""
        free = {"iterations", "evaluate_every", "checkpoint_every", "data"}
        engines = shared_engine_settings(self.engine, self.world_size)
        return engines | {"rl_config": self.rl.model_dump(mode="json", exclude=free)}


def load_settings(source: str | Path, world_size: int, overrides: Sequence[str] = ()) -> Settings:
    """Read a YAML file and overrides `section.key=value`.

    Raises ConfigError with all violations.
    """
    path = Path(source)
    directory = path.absolute().parent
    values = read_yaml(path, "--config")
    violations: list[Violation] = [*apply_overrides(values, overrides)]
    rl: RLConfig | None = None
    try:
        section = values.pop("rl_config", None) or {}
        rl = RLConfig.model_validate(section, context={"directory": directory})
    except pydantic.ValidationError as error:
        violations += violations_of(error, RLConfig, "rl_config.")
    for name in ("actor_config", "generate_config"):
        section = values.setdefault(name, {})
        if rl is not None and isinstance(section, Mapping):
            values[name] = {"seed": rl.seed, **section}
    try:
        engine = load_config(values, world_size, directory=directory)
    except ConfigError as error:
        raise ConfigError([*error.findings, *violations], str(path)) from None
    if rl is not None:
        violations += _violations(engine, rl, world_size)
    if rl is None or violations:
        raise ConfigError(violations, str(path))
    return Settings(engine=engine, rl=rl, world_size=world_size)


def _sizes_text(sizes: Any) -> str:
    """Format parallel sizes; omit sizes of 1."""
    names = {"TP": "tensor", "PP": "pipeline", "EP": "expert", "DP": "data"}
    by_name = {short: getattr(sizes, name, 1) for short, name in names.items()}
    shown = [f"{short}={size}" for short, size in by_name.items() if size > 1]
    return " x ".join(shown) or "on 1 rank"


def _violations(engine: HybridConfig, rl: RLConfig, world_size: int) -> Iterator[Violation]:
    """Yield conflicts between settings, data and model."""
    try:
        train = task.load_problems(rl.data / "train.jsonl")
        held_out = task.load_problems(rl.data / "held_out.jsonl")
    except ConfigError as error:
        yield from error.findings
        return
    actor = engine.actor_config
    max_model_len = engine.generate_config.max_model_len
    rows = actor.micro_batch_size * engine.train_sizes(world_size).data
    vocab_size = engine.hf_config().get("vocab_size")
    prompt = max(len(problem.prompt) for problem in [*train, *held_out])
    targets = [problem.demonstration or problem.answer for problem in train]
    response = max(rl.max_tokens, *(len(target) + 1 for target in targets))
    seq_length = prompt + response - 1  # the last token is predicted, but never an input
    context = prompt + rl.max_tokens
    if rl.warm_up.batch_size % rows:
        problem = (
            f"{rl.warm_up.batch_size} is not a multiple of micro_batch_size x data parallel ranks"
        )
        yield Violation("rl_config.warm_up.batch_size", problem, f"Use a multiple of {rows}")
    if rl.batch_size % (rl.minibatches * rows):
        problem = (
            f"{rl.batch_size} completions in {rl.minibatches} minibatches: "
            f"not multiples of {rows}, micro_batch_size x data parallel ranks"
        )
        remedy = "Change it, prompts_per_iteration or samples_per_prompt"
        yield Violation("rl_config.minibatches", problem, remedy)
    if rl.prompts_per_iteration > len(train):
        problem = f"{rl.prompts_per_iteration}, but train.jsonl has {len(train)} problems"
        yield Violation("rl_config.prompts_per_iteration", problem, f"Use {len(train)} or fewer")
    yield from staleness_violations(rl, engine.generate_config, "rl_config")
    has_critic = engine.critic_config is not None
    if has_critic != (rl.algorithm == "ppo"):
        problem = f"{rl.algorithm} {'with' if has_critic else 'without'} critic_config"
        remedy = "Use ppo with critic_config (may be {}), grpo without"
        yield Violation("rl_config.algorithm", problem, remedy)
    if vocab_size != task.VOCAB_SIZE:
        problem = (
            f"vocab_size {vocab_size} in config.json, but the task has {task.VOCAB_SIZE} tokens"
        )
        yield Violation("model", problem, f"Set vocab_size to {task.VOCAB_SIZE}")
    if actor.seq_length < seq_length:
        problem = f"{actor.seq_length}, but prompt and response need {seq_length}"
        yield Violation("actor_config.seq_length", problem, f"Use {seq_length} or more")
    if max_model_len is not None and max_model_len < context:
        problem = f"{max_model_len}, but prompt and completion need {context} tokens"
        yield Violation("generate_config.max_model_len", problem, f"Use {context} or more")
