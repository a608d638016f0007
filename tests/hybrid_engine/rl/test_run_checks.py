"""Arguments of `train` that would end a run later are refused before its engines are built."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine import load_config
from hybrid_engine.errors import ConfigError
from hybrid_engine.rl import GrpoConfig, PpoConfig, run_checks, train
from tests.harness.errors import has_violations, violated, violations_of
from tests.hybrid_engine.rl.test_starting import MODEL, PROMPTS, start
from tests.zoo.families import read_config, write_config
from tests.zoo.tokenizers import save_characters


def with_tokenizer(directory: Path) -> Path:
    """Return a model whose vocabulary has the tokens of `save_characters`."""
    shutil.copytree(MODEL, directory, dirs_exist_ok=True)
    config = read_config(directory)
    write_config(directory, {**config, "vocab_size": 256})
    save_characters(directory)
    return directory


CHAT = [{"role": "user", "content": "2 + 2"}]
OF_TRL = (lambda prompts, completions, **columns: [1.0], lambda completions, **columns: [1.0])


async def late(*_: Any) -> Any: ...


LATE = dict.fromkeys(("evaluate", "on_step", "should_stop", "loss", "advantages"), late)
OF_NOTHING = ("evaluate", "on_step", "loss", "environment", "advantages")
"""Functions that have arguments."""


@pytest.mark.parametrize(
    ("arguments", "violations"),
    [
        ({"prompts": []}, "prompts no-prompts"),
        ({"prompts": "data/train.jsonl"}, "prompts not-a-list"),
        ({"prompts": {"train": PROMPTS}}, "prompts not-a-list"),
        ({"prompts": 5}, "prompts not-a-list"),
        ({"prompts": [{"question": [1]}]}, "prompts[0] invalid-prompt"),
        ({"prompts": ["a text"]}, "model no-tokenizer"),
        ({"stop": ("x",)}, "GrpoConfig.stop needs-tokenizer"),
        ({"prompts": [[1], [5, -1]]}, "prompts[1] out-of-vocabulary"),
        ({"prompts": [[1, 10**6]]}, "prompts[0] out-of-vocabulary"),
        ({"prompts": [[1] * 60]}, "prompts[0] prompt-too-long"),
        ({"engines": {"actor_config": {"seq_length": 9}}}, "prompts prompts-too-long"),
        ({"prompts_per_step": 3, "minibatches": 5}, "GrpoConfig.minibatches not-divisible"),
        ({"algorithm": PpoConfig}, "critic_config needs-critic"),
        ({"algorithm": SimpleNamespace}, "config not-a-config"),
        ({"evaluate_first": True}, "GrpoConfig.evaluate_first needs-evaluate"),
        ({"overlong_tokens": 9}, "GrpoConfig.overlong_tokens beyond-max-tokens"),
        ({"max_tokens_per_turn": 5}, "GrpoConfig.max_tokens_per_turn needs-environment"),
        ({"pack": True, "ratio": "sequence"}, "GrpoConfig.pack conflicting-keys"),
        ({"pack": True, "loss": max}, "GrpoConfig.pack conflicting-keys"),
        ({"clipping": "cispo", "dual_clip": 3.0}, "GrpoConfig.dual_clip has-no-effect"),
        ({"ratio": "sequence", "loss": print}, "GrpoConfig.ratio has-no-effect"),
        ({"baseline": "step", "advantages": print}, "GrpoConfig.baseline has-no-effect"),
        (
            {"algorithm": PpoConfig, "advantages": print, "reward_failures": "skip"},
            "advantages conflicting-keys; PpoConfig.reward_failures "
            "conflicting-keys; critic_config needs-critic",
        ),
        ({"enviroment": print}, "enviroment unknown-argument"),
        ({"reward": lambda completion: 1.0}, "reward wrong-signature"),
        ({"reward": lambda completion, answer: 1.0}, "reward wrong-signature"),
        ({"loss": lambda log_probs, micro_batch: 1.0}, "loss wrong-signature"),
        *(({"reward": function}, "reward wrong-signature") for function in OF_TRL),
        ({"reward": None}, "reward not-callable"),
        ({"reward": {"length": 5}}, "reward length not-callable"),
        *(({name: lambda: {}}, f"{name} wrong-signature") for name in OF_NOTHING),
        ({"should_stop": lambda row: False}, "should_stop wrong-signature"),
        (
            {"prompts": late, **LATE},
            "; ".join(f"{name} coroutine-function" for name in ("prompts", *LATE)),
        ),
        ({"trackers": ["wand"]}, "trackers unknown-tracker"),
        ({"trackers": "wandb"}, "trackers not-a-list"),
        (
            {"engines": {"actor_config": {"optimizer": {"schedule": {"lr_decay_steps": 5}}}}},
            "actor_config.optimizer.schedule conflicting-keys",
        ),
        (
            {"prompts": [], "reward": lambda: 1.0, "algorithm": PpoConfig},
            "prompts no-prompts; reward wrong-signature; critic_config needs-critic",
        ),
    ],
)
def test_arguments_that_would_end_a_run_are_refused(
    arguments: dict[str, Any], violations: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(**arguments)
    assert sorted(map(" ".join, violations_of(caught.value))) == sorted(violations.split("; "))
    assert ("BatchReward" in str(caught.value)) == (arguments.get("reward") in OF_TRL)
    assert ("mean environment?" in str(caught.value)) == ("enviroment" in arguments)


def test_a_wrong_configuration_is_named_with_the_arguments() -> None:
    refused = has_violations(
        ("configuration", "unreadable-file"), ("prompts", "coroutine-function")
    )
    with pytest.raises(ConfigError, check=refused):
        train("no such configuration", late, lambda prompt, completion: 1.0, GrpoConfig())  # type: ignore[arg-type]


def test_chats_need_a_template_and_valid_messages(tmp_path: Path) -> None:
    model = with_tokenizer(tmp_path / "model")
    with violated(ConfigError, ("prompts[0]", "invalid-prompt")):
        start(model=model, prompts=[[{"rolle": "user", "content": "x"}]])
    with pytest.raises(Exception, match="engines are built"):
        start(model=model, prompts=[CHAT], stop=("x",))


def test_a_full_disk_is_seen_before_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    out = tmp_path / "new" / "run"
    with violated(ConfigError, ("out", "disk-full")) as caught:
        start(out=out)
    assert str(tmp_path) in str(caught.value)
    # A run that is resumed replaces files; this one has lost its settings.
    (out / "checkpoints" / "step-000001").mkdir(parents=True)
    with violated(ConfigError, ("out", "not-a-run")):
        start(out=out)


def decorated(function: Callable[[str], float]) -> Callable[..., float]:
    @functools.wraps(function)
    def reward(prompt: Any, completion: Any) -> float:
        return function(completion.text)

    return reward


class Judge:
    def __call__(self, prompt: Any, completion: Any, strict: bool = True) -> float:
        return 1.0

    def method(self, *arguments: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", lambda prompt, completion: 1.0),
        ("reward", lambda prompt, completion, completions=(): 1.0),
        ("reward", {"a": lambda *_: 1.0}),
        ("reward", max),
        ("reward", decorated(len)),
        ("reward", Judge()),
        ("reward", Judge().method),
        ("reward", functools.partial(Judge(), strict=False)),
        ("prompts", torch.ones(4, 3).long()),
        ("prompts", (row for row in PROMPTS)),
        ("prompts", tuple(PROMPTS)),
    ],
)
def test_valid_arguments_reach_the_engines(name: str, value: Any) -> None:
    with pytest.raises(Exception, match="engines are built"):
        start(**{name: value})


@pytest.mark.parametrize(
    ("changed", "bound"),
    [
        ({}, 64),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, 2**31),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"max_position_embeddings": None}, 2**31),
    ],
)
def test_lengths_are_bounded_by_what_the_engines_may_accept(
    changed: dict[str, Any], bound: int
) -> None:
    config = read_config(MODEL)
    engines = load_config({"model": str(MODEL), "random_weights": True}, 1)
    with mock.patch.object(type(engines), "hf_config", return_value=config | changed):
        assert run_checks._longest_sequence(engines) == bound


def test_a_model_that_computes_one_sequence_a_row_is_not_packed() -> None:
    arguments = run_checks.RunArguments.of(
        PROMPTS, lambda prompt, completion: 1.0, GrpoConfig(max_tokens=8, pack=True), {}
    )
    engines = load_config({"model": str(MODEL), "random_weights": True}, 1)
    limits = run_checks.RunLimits.of_config(engines, 1)
    assert not any(run_checks.limit_violations(arguments, limits))
    mamba = dataclasses.replace(limits, no_packing="MambaLayer mixes tokens of different sequences")
    (violation,) = run_checks.limit_violations(arguments, mamba)
    assert (violation.key, violation.code) == ("GrpoConfig.pack", "packing-unsupported")


def test_virtual_stages_take_micro_batches_in_groups() -> None:
    actor = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    engines = load_config({"model": str(MODEL), "random_weights": True, "actor_config": actor}, 2)
    limits = run_checks.RunLimits.of_config(engines, 2)
    for pack, num_violations in ((False, 1), (True, 0)):
        config = GrpoConfig(prompts_per_step=1, samples_per_prompt=3, pack=pack)
        assert len([*run_checks._size_violations(config, limits)]) == num_violations
