"""A whole run in one YAML file: the engines' sections, and `run` with algorithm, data and reward.

    model: Qwen/Qwen2.5-0.5B-Instruct
    generate_config: {max_model_len: 768}
    run:
      data: {source: openai/gsm8k, subset: main, template: "{question} End with #### and a number."}
      reward: exact_answer
      grpo: {steps: 200, max_tokens: 512}
      out: runs/gsm8k

    settings = RunSettings.read("gsm8k.yaml", ["run.grpo.steps=10"])      everything that is wrong
    settings.train()                                                      rl.train

A file names code that is run, by `reward`, so it is trusted like a program.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.config.keys import Count, Name, Positive, Section
from hybrid_engine.config.loading import violations_of
from hybrid_engine.errors import (
    ConfigError,
    Violation,
    clipped,
    collect,
    first_of,
    needing_package,
    require_none,
    shortened,
)
from hybrid_engine.files.documents import apply_overrides, given_path, read_yaml
from hybrid_engine.rl.config import GrpoConfig, PpoConfig
from hybrid_engine.rl.loop import train
from hybrid_engine.rl.rewards import (
    NAMED_REWARDS,
    HeldOut,
    Rewards,
    named_rewards,
    reward_violations,
)
from hybrid_engine.rl.run_checks import RunArguments, run_violations
from hybrid_engine.rl.run_files import Row

SECTION = "run"
"""Key of a file that the engines alone do not have."""
_ALGORITHMS: Mapping[str, Any] = {"grpo": GrpoConfig, "ppo": PpoConfig}
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file -> name of its reader in datasets."""
_WHOLE = {"subset": None, "split": "train"}
"""Keys that name a part of a data set on the Hub -> value that names no part."""


class DataConfig(Section):
    """`run.data`: prompts, by the library datasets."""

    source: Name
    """Data set on the Hub (`org/name`), or a file: JSON Lines, Parquet or CSV."""
    subset: Name | None = None
    """Configuration of a data set that has several, such as main."""
    split: Name = "train"
    """Split of a data set on the Hub, such as train or train[:1000]."""
    prompt: Name = "prompt"
    """Column of the prompts: texts or chats."""
    template: Name | None = None
    """Text of the prompt with columns in braces, in place of the column `prompt`."""
    system: Name | None = None
    """Message of the system before a text."""
    chat: bool = True
    """Make a text a user's message. False: the model continues the text."""
    answer: Name = "answer"
    """Column that rewards find under "answer"; `exact_answer` and `math` need one."""


class EvaluationConfig(Section):
    """`run.evaluation`: prompts of the same form that are held out; see `HeldOut`."""

    source: Name
    """Split of `run.data.source`, such as test[:200], or a file."""
    samples: Count = 1
    """Completions of each prompt. With 1 it is the most probable one."""
    passing_reward: Positive = 1.0
    """Least reward of a completion that passes."""


class RunConfig(Section):
    """`run`, without the section of the algorithm."""

    data: DataConfig
    """Where the prompts are."""
    reward: Name | dict[Name, Name]
    """exact_answer, math, or `module:function`; or several by name."""
    evaluation: EvaluationConfig | None = None
    """Evaluation; default: none."""
    out: Name
    """Directory of the run, relative to the working directory."""
    trackers: tuple[Name, ...] = ("tensorboard",)
    """What records the rows, beside metrics.jsonl."""


@dataclass(frozen=True)
class RunSettings:
    """Arguments of `train`, from a file.

    Attributes:
        engines: settings of both engines.
        config: settings of the algorithm.
        run: the other settings.
        prompts, reward: as of `train`.
        evaluate: evaluation, if there is one.
    """

    engines: HybridConfig
    config: GrpoConfig | PpoConfig
    run: RunConfig
    prompts: Sequence[Mapping[str, Any]]
    reward: Rewards
    evaluate: HeldOut | None

    @classmethod
    def read(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        world_size: int | None = None,
    ) -> RunSettings:
        """Read a file, and the data that it names.

        Args:
            path: of the file. Relative paths in it, and modules of rewards, begin at its directory.
            overrides: `section.key=value`, as if the file contained it.
            world_size: number of ranks; default: WORLD_SIZE of the environment.

        Raises ConfigError with every violation; the data are read once the rest is valid.
        """
        directory = Path(path).absolute().parent
        values = read_yaml(path, "CONFIG")
        violations: list[Violation] = [*apply_overrides(values, overrides)]
        section = values.pop(SECTION, None)
        if not isinstance(section, dict):
            violations.append(
                Violation(
                    SECTION,
                    f"expected keys and values, found {shortened(section)}",
                    "Add the section, with data, reward, grpo or ppo, and out",
                    code="not-a-mapping",
                )
            )
            section = None
        engines = collect(violations, load_config, values, world_size, directory=directory)
        config = run = reward = None
        if section is not None:
            config = collect(violations, _algorithm_of, section)
            run = collect(violations, _run_of, section)
        if run is not None:
            reward = collect(violations, _reward_of, run, directory)
        if reward is not None and config is not None:
            violations += reward_violations(reward, config)
        if violations or engines is None or config is None or run is None or reward is None:
            raise ConfigError(violations, str(path))
        prompts = _prompts(run, run.data.source, directory)
        evaluate = None
        if run.evaluation is not None:
            evaluate = HeldOut(
                _prompts(run, run.evaluation.source, directory),
                reward,
                config,
                samples=run.evaluation.samples,
                passing_reward=run.evaluation.passing_reward,
            )
        return cls(engines, config, run, prompts, reward, evaluate)

    def require_runnable(self, num_ranks: int) -> None:
        """Raise ConfigError with everything that would end the run on so many ranks later."""
        arguments = RunArguments.of(
            self.prompts, self.reward, self.config, {}, evaluate=self.evaluate
        )
        require_none(
            run_violations(self.engines, arguments, num_ranks, given_path(self.run.out, "out"))
        )

    def train(self) -> list[Row]:
        """Train, or go on; see `train`."""
        return train(
            self.engines,
            self.prompts,
            self.reward,
            self.config,
            out=self.run.out,
            evaluate=self.evaluate,
            trackers=self.run.trackers,
        )


def _algorithm_of(section: Mapping[str, Any]) -> GrpoConfig | PpoConfig:
    """Return the algorithm's settings in `run`."""
    named = [name for name in _ALGORITHMS if name in section]
    if len(named) != 1:
        raise ConfigError.of(
            SECTION,
            f"has {' and '.join(named) or 'neither grpo nor ppo'}",
            "Give one of them",
            code="no-algorithm",
        )
    key = f"{SECTION}.{named[0]}"
    values = section[named[0]] or {}
    if not isinstance(values, Mapping):
        raise ConfigError.of(
            key,
            f"expected keys and values, found {shortened(values)}",
            "Write keys",
            code="not-a-mapping",
        )
    return _ALGORITHMS[named[0]](key, **values)


def _run_of(section: Mapping[str, Any]) -> RunConfig:
    others = {key: value for key, value in section.items() if key not in _ALGORITHMS}
    try:
        return RunConfig.model_validate(others)
    except pydantic.ValidationError as error:
        raise ConfigError(violations_of(error, RunConfig, f"{SECTION}.")) from None


def _reward_of(run: RunConfig, directory: Path) -> Rewards:
    """Return the functions that are named."""
    if isinstance(run.reward, str):
        return _function(run.reward, f"{SECTION}.reward", directory)
    return {
        name: _function(function, f"{SECTION}.reward.{name}", directory)
        for name, function in run.reward.items()
    }


def _function(name: str, key: str, directory: Path) -> Any:
    if name in NAMED_REWARDS:
        return NAMED_REWARDS[name]
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # last, so that no file there replaces a library
    try:
        return pkgutil.resolve_name(name.replace(".py:", ":"))
    except Exception as error:  # the module is the user's, and can raise anything
        raise ConfigError.of(
            key,
            f"{shortened(name)}: {type(error).__name__}: {clipped(str(error))}",
            f"Use {', '.join(NAMED_REWARDS)}, or module:function",
            code="unknown-reward",
        ) from error


def _prompts(run: RunConfig, source: str, directory: Path) -> list[dict[str, Any]]:
    """Return the prompts of a source: `data.source`, one of its splits, or a file."""
    data = run.data
    rows = _rows(data, source, directory)
    # Rewards of ours read the answer. Otherwise a row may lack it,
    # unless the file names its column.
    is_read = bool(NAMED_REWARDS.keys() & named_rewards(run.reward).values())
    needs_answer = is_read or "answer" in data.model_fields_set
    try:
        prompts = [
            {
                **row,
                "prompt": _prompt(data, row),
                "answer": row[data.answer] if needs_answer else row.get(data.answer),
            }
            for row in rows
        ]
        problem = "" if prompts else "is empty"
    except KeyError as error:
        problem = f"has no column {error}"
    if problem:
        raise ConfigError.of(
            f"{SECTION}.data",
            f"{shortened(source)} {problem}",
            f"Its columns are {first_of(rows.column_names, 20)}",
            code="unknown-column",
        )
    return prompts


def _prompt(data: DataConfig, row: Mapping[str, Any]) -> Any:
    prompt = row[data.prompt] if data.template is None else data.template.format_map(row)
    if isinstance(prompt, str) and data.chat:
        prompt = [{"role": "user", "content": prompt}]
        if data.system is not None:
            prompt.insert(0, {"role": "system", "content": data.system})
    return prompt


def _rows(data: DataConfig, source: str, directory: Path) -> Any:
    """Return a `datasets.Dataset`."""
    with needing_package(f"{SECTION}.data needs datasets: pip install '.[data]'"):
        import datasets
    datasets.disable_progress_bars()  # each rank would draw its own
    reader = _BUILDERS.get(Path(source).suffix)
    # An evaluation names another split of the same data set, such as test[:200].
    is_training = source == data.source
    options: dict[str, Any] = {
        "path": data.source,
        "name": data.subset,
        "split": data.split if is_training else source,
    }
    key = f"{SECTION}.data.source" if is_training else f"{SECTION}.evaluation.source"
    if Path(data.source).suffix in _BUILDERS:
        parts = [f"{SECTION}.data.{name}" for name in _WHOLE if getattr(data, name) != _WHOLE[name]]
        problem = f"names a part of a data set, but {SECTION}.data.source is a file"
        require_none(
            Violation(part, problem, "Leave it out, or name a file", code="part-of-a-file")
            for part in parts + [key] * (reader is None)
        )
    if reader is not None:
        # datasets calls the only split of a file "train".
        options = {"path": reader, "data_files": str(directory / source), "split": "train"}
    try:
        return datasets.load_dataset(**options)
    except Exception as error:  # of a network, a file or a script of theirs
        raise ConfigError.of(
            key,
            f"{shortened(source)}: {type(error).__name__}: {clipped(str(error))}",
            "Name a data set of the Hub, with its subset and split, or a file",
            code="unreadable-data",
        ) from error
