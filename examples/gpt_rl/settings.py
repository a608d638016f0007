"""Settings of a run: `rl_config`, beside the engine's `model`, `actor_config` and `generate_config`, in one YAML file.

Paths in the file are relative to it. Everything that is wrong is reported at once, before any process group exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from examples.gpt_rl import task
from hybrid_engine import HybridConfig, load_config
from hybrid_engine.config.values import Count, File, NonNegative, Positive, Seed
from hybrid_engine.errors import ConfigError, Violation, clipped, shortened
from hybrid_engine.files.documents import apply_overrides, read_yaml

SHARED_SEED_SECTIONS = ("actor_config", "generate_config")


class _Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class WarmUpConfig(_Section):
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


class PpoConfig(_Section):
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


class RLConfig(_Section):
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
    temperature: Annotated[Positive, Field(le=2)] = 1.0
    """Of sampling. Log-probabilities are the model's own, so other values than 1 make the ratio approximate."""
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
        sides = {
            "FSDP2" if actor.fsdp is not None else "Megatron": train,
            "vLLM": infer,
        }
        layouts = " to ".join(f"{name} {_sizes_text(sizes)}" for name, sizes in sides.items())
        return f"Two-digit sums: {layouts}, seed {self.rl.seed}"

    def fingerprint(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """What a resumed run must have in common with the one it continues: all but how long it runs, what it looks at,
        when memory moves and how much there is, and which weights it began with; `exclude_defaults`: only what differs
        from the defaults."""
        free = {"iterations", "evaluate_every", "checkpoint_every", "data"}
        has_any_size = self.engine.actor_config.fsdp is not None  # its checkpoints fit any number of ranks
        unasked = {"prefetch", "prefetch_share", "prefetch_mb", "verify", "trace"}
        values = {
            "world_size": "any" if has_any_size else self.world_size,
            **self.engine.model_dump(
                exclude=dict.fromkeys(("model", "revision", "random_weights", "device_budget_gib"), True)
                | {"generate_config": unasked},
                exclude_defaults=exclude_defaults,
            ),
            "rl_config": self.rl.model_dump(exclude=free, exclude_defaults=exclude_defaults),
        }
        return json.loads(json.dumps(values, default=str, sort_keys=True))


def load_settings(
    source: str | Path,
    world_size: int,
    iterations: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
) -> Settings:
    """Read and check a YAML file.

    Args:
        source: the file.
        world_size: number of ranks.
        iterations, seed: in place of the file's.
        overrides: `section.key=value`, each as if it stood in the file.

    Raises ConfigError with every violation, those of the engine's sections included.
    """
    path = Path(source)
    values = read_yaml(path, "--config")
    violations: list[Violation] = [*apply_overrides(values, overrides)]
    rl = _parse_rl(
        values.pop("rl_config", None) or {},
        path.absolute().parent,
        {"iterations": iterations, "seed": seed},
        violations,
    )
    if rl is not None:
        for name in SHARED_SEED_SECTIONS:
            section = values.setdefault(name, {})
            if isinstance(section, Mapping) and (seed is not None or "seed" not in section):
                values[name] = {**section, "seed": rl.seed}
    try:
        engine = load_config(values, world_size, directory=path.absolute().parent)
    except ConfigError as error:
        raise ConfigError([*error.findings, *violations], str(path)) from None
    if rl is not None:
        violations.extend(_violations(engine, rl, world_size))
    if violations:
        raise ConfigError(violations, str(path))
    return Settings(engine=engine, rl=rl, world_size=world_size)


def _sizes_text(sizes: Any) -> str:
    """Those that are not 1."""
    named = {"TP": "tensor", "PP": "pipeline", "EP": "expert", "DP": "data"}
    shown = [f"{short}={size}" for short, name in named.items() if (size := getattr(sizes, name, 1)) > 1]
    return " x ".join(shown) or "on 1 rank"


def _parse_rl(
    values: Any, directory: Path, overrides: Mapping[str, Any], violations: list[Violation]
) -> RLConfig | None:
    """The section with command-line values in place; adds violations and gives None when it is wrong."""
    if not isinstance(values, Mapping):
        violations.append(Violation("rl_config", f"is {shortened(values)}", "Make it a section of keys and values"))
        return None
    merged = {**values, **{key: value for key, value in overrides.items() if value is not None}}
    try:
        return RLConfig.model_validate(merged, context={"directory": directory})
    except pydantic.ValidationError as error:
        violations.extend(_violation_of(item) for item in error.errors())
        return None


def _violation_of(item: Mapping[str, Any]) -> Violation:
    key = clipped(".".join(("rl_config", *map(str, item["loc"]))))
    if item["type"] == "extra_forbidden":
        sections: dict[object, type[_Section]] = {"warm_up": WarmUpConfig, "ppo": PpoConfig}
        section = sections.get(item["loc"][0], RLConfig)
        return Violation(key, "unknown key", f"Known keys: {', '.join(section.model_fields)}")
    if item["type"] == "missing":
        return Violation(key, "is missing", "Add it")
    return Violation(key, f"{item['msg']}, found {shortened(item.get('input'))}", "Correct the value")


def _violations(engine: HybridConfig, rl: RLConfig, world_size: int) -> Iterator[Violation]:
    """What cannot go together."""
    actor = engine.actor_config
    data = engine.train_sizes(world_size).data
    multiple = actor.micro_batch_size * data
    reason = f"not a multiple of micro_batch_size {actor.micro_batch_size} x {data} data parallel ranks"
    if rl.warm_up.batch_size % multiple:
        problem = f"{rl.warm_up.batch_size} is {reason}"
        yield Violation("rl_config.warm_up.batch_size", problem, f"Use a multiple of {multiple}")
    if rl.batch_size % (rl.minibatches * multiple):
        problem = f"{rl.batch_size} completions in {rl.minibatches} minibatches: {reason}"
        yield Violation("rl_config.minibatches", problem, "Change it, prompts_per_iteration or samples_per_prompt")
    yield from _schedule_violations(engine)
    yield from _critic_violations(engine, rl, data)
    vocab_size = engine.hf_config().get("vocab_size")
    if vocab_size != task.VOCAB_SIZE:
        problem = (
            f"vocab_size {vocab_size} in {engine.model / 'config.json'}, but the task has {task.VOCAB_SIZE} tokens"
        )
        yield Violation("model", problem, f"Set vocab_size to {task.VOCAB_SIZE}")
    yield from _data_violations(engine, rl)


def _schedule_violations(engine: HybridConfig) -> Iterator[Violation]:
    for section in ("actor_config", "critic_config"):
        trained = getattr(engine, section)
        if trained is not None and trained.optimizer.schedule is not None:
            problem = "this example sets the learning rates by itself"
            yield Violation(f"{section}.optimizer.schedule", problem, "Use rl_config.learning_rate")


def _critic_violations(engine: HybridConfig, rl: RLConfig, num_replicas: int) -> Iterator[Violation]:
    critic = engine.critic_config
    if (critic is not None) != (rl.algorithm == "ppo"):
        problem = f"{rl.algorithm}, and there is {'a' if critic is not None else 'no'} critic_config"
        yield Violation("rl_config.algorithm", problem, "Use ppo and a critic_config, if only {}, or neither")
        return
    if critic is None:
        return
    if critic.model is not None:
        yield Violation("critic_config.model", "this example's critic begins as the policy does", "Leave it out")
    if critic.micro_batch_size is not None:
        multiple = rl.minibatches * critic.micro_batch_size * num_replicas
        if rl.batch_size % multiple:
            problem = f"{critic.micro_batch_size}, but {rl.batch_size} completions are not a multiple of {multiple}: "
            problem += f"{rl.minibatches} minibatches on {num_replicas} data parallel ranks"
            yield Violation("critic_config.micro_batch_size", problem, "Change one of them")


def _data_violations(engine: HybridConfig, rl: RLConfig) -> Iterator[Violation]:
    files = [rl.data / name for name in ("train.jsonl", "held_out.jsonl")]
    missing = [path.name for path in files if not os.path.isfile(path)]  # unlike Path's, for any name
    if missing:
        problem = f"no {' and no '.join(missing)} in {rl.data}"
        yield Violation("rl_config.data", problem, "Run python -m examples.gpt_rl.make_data")
        return
    try:
        train, held_out = (task.load_problems(path) for path in files)
    except ConfigError as error:
        yield from error.findings
        return
    if shared := {problem.prompt for problem in train} & {problem.prompt for problem in held_out}:
        problem = f"{len(shared)} held-out prompts are in train.jsonl, e.g. {min(shared)!r}"
        yield Violation("rl_config.data", problem, "Keep the two apart")
    if any(problem.demonstration is None for problem in train):
        yield Violation("rl_config.data", "train.jsonl has problems without a demonstration", "Give every one")
    if rl.prompts_per_iteration > len(train):
        problem = f"{rl.prompts_per_iteration}, but train.jsonl has {len(train)} problems"
        yield Violation("rl_config.prompts_per_iteration", problem, f"Use {len(train)} or fewer")
    yield from _length_violations(engine, rl, [*train, *held_out])


def _length_violations(engine: HybridConfig, rl: RLConfig, problems: list[task.Problem]) -> Iterator[Violation]:
    prompt = max(len(problem.prompt) for problem in problems)
    response = max(len(problem.demonstration or problem.answer) + 1 for problem in problems)
    needed = prompt + max(response, rl.max_tokens)
    seq_length = engine.actor_config.seq_length
    if seq_length < needed - 1:  # the last token is only predicted
        problem = f"{seq_length}, but a prompt of {prompt} tokens and its response need {needed - 1}"
        yield Violation("actor_config.seq_length", problem, f"Use {needed - 1} or more")
    max_model_len = engine.generate_config.max_model_len
    if max_model_len is not None and max_model_len < prompt + rl.max_tokens:
        problem = f"{max_model_len}, but prompt and completion reach {prompt + rl.max_tokens} tokens"
        yield Violation("generate_config.max_model_len", problem, f"Use {prompt + rl.max_tokens} or more")
