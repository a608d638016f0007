"""Settings of a run: `rl_config`, beside the engine's `model`, `actor_config` and `generate_config`, in one YAML file.

Paths in the file are relative to it. Everything that is wrong is reported at once, before any process group exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from examples.gpt_rl import task
from hybrid_engine import HybridConfig, load_config
from hybrid_engine.config.keys import Count, File, NonNegative, Positive, Section, Seed
from hybrid_engine.config.loading import violations_of
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.files.documents import apply_overrides, read_yaml
from hybrid_engine.rl.config import shared_engine_settings
from hybrid_engine.rl.run_files import defaults_of


class WarmUpConfig(Section):
    """`rl_config.warm_up`: supervised steps on the demonstrations."""

    max_steps: Count = 800
    """Optimizer steps, at most."""
    target_loss: NonNegative = 0.27
    """The warm-up ends when its smoothed loss (nats per token) is below this."""
    batch_size: Count = 128
    """Demonstrations per step."""
    learning_rate: Positive = 3e-3
    """Reached in `ramp_steps` equal steps, then constant."""
    ramp_steps: Count = 20
    """See `learning_rate`."""


class PpoConfig(Section):
    """`rl_config.ppo`: with `algorithm: ppo`, the critic's part."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of later rewards."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: Positive = 0.2
    """A value that moved further than this in an iteration is not pushed further."""
    learning_rate: Positive = 1e-3
    """Of the critic, constant."""
    epochs: Count = 2
    """Times the critic learns from each completion."""
    value_warm_up: Annotated[int, Field(ge=0, le=10_000)] = 2
    """Iterations at the start in which only the critic learns."""


class RLConfig(Section):
    """`rl_config`: the task, and GRPO or PPO."""

    data: File
    """Directory with train.jsonl and held_out.jsonl."""
    seed: Seed = 0
    """Of everything: weights, batches, samples. Sections without a `seed` of their own take this one."""
    iterations: Count = 30
    """Rollouts; each is followed by `epochs` x `minibatches` optimizer steps."""
    warm_up: WarmUpConfig = WarmUpConfig()
    """See below."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Where advantages come from: from other samples of the same prompt, or from a critic (`critic_config`)."""
    ppo: PpoConfig = PpoConfig()
    """See below."""
    prompts_per_iteration: Count = 64
    """Problems sampled for a rollout."""
    samples_per_prompt: Annotated[Count, Field(ge=2, le=16384)] = 8
    """Completions of each: the group over which rewards are normalised."""
    max_tokens: Count = 5
    """Longest completion, in tokens, with its end token."""
    temperature: Annotated[Positive, Field(ge=0.01, le=2)] = 1.0
    """Of sampling, and of all log-probabilities."""
    epochs: Count = 1
    """Times each completion is learned from."""
    minibatches: Count = 2
    """Optimizer steps per epoch."""
    learning_rate: Positive = 3e-4
    """Constant."""
    clip_ratio: Annotated[Positive, Field(lt=1)] = 0.2
    """PPO's epsilon: a token whose probability changed by more than this share is not pushed further."""
    kl_coefficient: NonNegative = 0.01
    """Weight of the KL to the model after the warm-up."""
    evaluate_every: Count = 1
    """Iterations between two measurements of held-out accuracy; the last iteration is always measured."""
    checkpoint_every: Count = 10
    """Iterations between two checkpoints; there is one at the end and when the run is interrupted, too."""

    @property
    def batch_size(self) -> int:
        """Completions per iteration."""
        return self.prompts_per_iteration * self.samples_per_prompt


class Settings(pydantic.BaseModel):
    """A whole, checked configuration."""

    model_config = pydantic.ConfigDict(frozen=True)

    engine: HybridConfig
    rl: RLConfig
    world_size: int

    def title(self) -> str:
        """What the curves are of."""
        actor, generate = self.engine.actor_config, self.engine.generate_config
        train, infer = self.engine.train_sizes(self.world_size), generate.sizes(self.world_size)
        sides = {"FSDP2" if actor.fsdp is not None else "Megatron": train, "vLLM": infer}
        layouts = " to ".join(f"{name} {_sizes_text(sizes)}" for name, sizes in sides.items())
        return f"Two-digit sums: {layouts}, seed {self.rl.seed}"

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one it continues: all but how long it runs, what it looks at,
        when memory moves and how much there is, and which weights it began with."""
        free = {"iterations", "evaluate_every", "checkpoint_every", "data"}
        engines = shared_engine_settings(self.engine, self.world_size)
        return engines | {"rl_config": self.rl.model_dump(mode="json", exclude=free)}

    def defaults(self) -> dict[str, Any]:
        """What a setting is that a run began without: it is older than the option."""
        return {**defaults_of(self.engine), "rl_config": defaults_of(self.rl)}


def load_settings(source: str | Path, world_size: int, overrides: Sequence[str] = ()) -> Settings:
    """Read and check a YAML file.

    Args:
        source: the file.
        world_size: number of ranks.
        overrides: `section.key=value`, each as if it stood in the file.

    Raises ConfigError with every violation, those of the engine's sections included.
    """
    path = Path(source)
    directory = path.absolute().parent
    values = read_yaml(path, "--config")
    violations: list[Violation] = [*apply_overrides(values, overrides)]
    rl: RLConfig | None = None
    try:
        rl = RLConfig.model_validate(values.pop("rl_config", None) or {}, context={"directory": directory})
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
    """Those that are not 1."""
    named = {"TP": "tensor", "PP": "pipeline", "EP": "expert", "DP": "data"}
    shown = [f"{short}={size}" for short, name in named.items() if (size := getattr(sizes, name, 1)) > 1]
    return " x ".join(shown) or "on 1 rank"


def _violations(engine: HybridConfig, rl: RLConfig, world_size: int) -> Iterator[Violation]:
    """What cannot go together."""
    try:
        train, held_out = (task.load_problems(rl.data / name) for name in ("train.jsonl", "held_out.jsonl"))
    except ConfigError as error:
        yield from error.findings
        return
    actor, critic, max_model_len = engine.actor_config, engine.critic_config, engine.generate_config.max_model_len
    rows = actor.micro_batch_size * engine.train_sizes(world_size).data
    vocab_size = engine.hf_config().get("vocab_size")
    prompt = max(len(problem.prompt) for problem in [*train, *held_out])
    response = max(rl.max_tokens, *(len(problem.demonstration or problem.answer) + 1 for problem in train))
    seq_length, context = prompt + response - 1, prompt + rl.max_tokens  # the last token is only predicted
    if rl.warm_up.batch_size % rows:
        problem = f"{rl.warm_up.batch_size} is not a multiple of micro_batch_size x data parallel ranks"
        yield Violation("rl_config.warm_up.batch_size", problem, f"Use a multiple of {rows}")
    if rl.batch_size % (rl.minibatches * rows):
        problem = f"{rl.batch_size} completions in {rl.minibatches} minibatches: not multiples of {rows}, "
        problem += "micro_batch_size x data parallel ranks"
        yield Violation("rl_config.minibatches", problem, "Change it, prompts_per_iteration or samples_per_prompt")
    if rl.prompts_per_iteration > len(train):
        problem = f"{rl.prompts_per_iteration}, but train.jsonl has {len(train)} problems"
        yield Violation("rl_config.prompts_per_iteration", problem, f"Use {len(train)} or fewer")
    if (critic is not None) != (rl.algorithm == "ppo"):
        problem = f"{rl.algorithm}, and there is {'no' if critic is None else 'a'} critic_config"
        yield Violation("rl_config.algorithm", problem, "Use ppo and a critic_config, if only {}, or neither")
    if vocab_size != task.VOCAB_SIZE:
        problem = f"vocab_size {vocab_size} in its config.json, but the task has {task.VOCAB_SIZE} tokens"
        yield Violation("model", problem, f"Set vocab_size to {task.VOCAB_SIZE}")
    if actor.seq_length < seq_length:
        problem = f"{actor.seq_length}, but prompt and response need {seq_length}"
        yield Violation("actor_config.seq_length", problem, f"Use {seq_length} or more")
    if max_model_len is not None and max_model_len < context:
        problem = f"{max_model_len}, but prompt and completion reach {context} tokens"
        yield Violation("generate_config.max_model_len", problem, f"Use {context} or more")
