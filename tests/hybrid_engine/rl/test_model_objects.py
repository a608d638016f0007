"""Runs of `train` with a model of transformers or PEFT, or with adapters of the configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybrid_engine import ActorHybridWorker, Completion
from hybrid_engine.backends.fsdp.adaptor import FsdpAdaptor
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import ConfigError, StateError
from hybrid_engine.rl import GrpoConfig, PpoConfig, train
from hybrid_engine.rl.run_files import Row
from hybrid_engine.trainer.fsdp import actor
from tests.harness.errors import refused, violated, violations_of
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.rl.test_loop import rows_of
from tests.zoo import sharded_models, workers

peft = pytest.importorskip("peft", reason="pip install peft")
pytestmark = pytest.mark.timeout(600)

PROMPTS = [[first, 3, 4] for first in range(5, 10)]
SETTINGS: Values = {
    **{
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_tokens": 4,
        "minibatches": 2,
    },
    **{"learning_rate": 1e-2, "kl_coefficient": 0.01, "evaluate_every": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = workers.write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    sharded_models.from_config(path).save_pretrained(path)
    return path


def loaded(model: Path, dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)


def adapted(model: Path, dtype: str = "float32", **settings: Any) -> Any:
    torch.manual_seed(7)  # of A; B is zero
    values = {
        "r": 4,
        "lora_dropout": 0.5,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        **settings,
    }
    return peft.get_peft_model(
        loaded(model, dtype), peft.LoraConfig(task_type="CAUSAL_LM", **values)
    )


def reward(prompt: list[int], completion: Completion) -> float:
    return sum(token % 2 for token in completion.token_ids) / 4


def evaluate(worker: ActorHybridWorker) -> dict[str, float]:
    return {
        "moments": len(worker.actor.engine.optimizer.inner.state),
        "is_apart": worker.adapter is not None,
    }


def run(
    model: Any,
    out: Path,
    generate: Values | None = None,
    fsdp: Values | None = None,
    critic: Values | None = None,
    actor: Values | None = None,
    **functions: Any,
) -> list[Row]:
    settings = workers.settings(model, {"fsdp": fsdp or {}, **(actor or {})}, generate)
    config: Any = GrpoConfig(**SETTINGS)
    if critic is not None:
        settings["critic_config"] = critic
        config = PpoConfig(**SETTINGS)
    return train(settings, PROMPTS, reward, config, out=out, evaluate=evaluate, **functions)


@on_engines(
    {
        1: ["merge checkpointed", "whole"],
        2: ["merge", "adapter", "bfloat16 merge, ppo", "bfloat16 adapter", "whole"],
    }
)
def test_trained_parameters_change_and_no_others(model: Path, tmp_path: Path, case: str) -> None:
    dtype = "bfloat16" if "bfloat16" in case else "float32"
    is_apart = "adapter" in case
    trained = loaded(model) if case == "whole" else adapted(model, dtype)
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    num_trained = sum(parameter.requires_grad for parameter in trained.parameters())
    generate = {"lora_delivery": "adapter"} if is_apart else {}
    critic = {"params_dtype": "float32"} if "ppo" in case else None
    fsdp = {"activation_checkpointing": "checkpointed" in case}
    rows = run(trained, tmp_path / "run", generate, fsdp, critic)
    check_rows(rows, dtype, num_trained, is_apart)
    assert [row for row in rows if ("explained_variance" in row) != ("ppo" in case)] == []
    rank, num_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    for name, tensor in trained.state_dict().items():
        is_same = local_of(tensor).equal(before[name].chunk(num_ranks)[rank])
        assert is_same == (case != "whole" and "lora_" not in name), name
    with violated(ConfigError, ("model", "already-sharded")):
        run(trained, tmp_path / "again")
    adapters = tmp_path / "run" / "adapter"
    assert adapters.exists() == (case != "whole")
    if rank == 0 and case != "whole":
        check_files(model, tmp_path / "run", dtype)


def check_rows(rows: list[Row], dtype: str, num_trained: int, is_apart: bool) -> None:
    for row in rows:
        assert row["logprob_diff"] < (1e-4 if dtype == "float32" else 0.2)
        assert (row["moments"], row["is_apart"]) == (num_trained, is_apart)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["kl"] > 1e-4


def check_files(model: Path, out: Path, dtype: str) -> None:
    """PEFT loads the adapters, and transformers the sums with the weights of `model`."""
    merged = peft.PeftModel.from_pretrained(loaded(model, dtype), out / "adapter")
    sums = merged.merge_and_unload().state_dict()
    torch.testing.assert_close(sums, loaded(out / "model", dtype).state_dict())


@on_engines({1: ["float32 merge"], 2: ["float32 adapter", "bfloat16 merge"]})
def test_adapters_of_the_configuration(model: Path, tmp_path: Path, case: str) -> None:
    dtype, delivery = case.split()
    settings: Values = {
        "generate": {"lora_delivery": delivery},
        "critic": {} if delivery == "adapter" else None,
        "actor": {"lora": {"rank": 4}, "params_dtype": dtype},
    }
    rows = run(model, tmp_path / "run", **settings)
    # A and B of 7 linear layers in each of 2 layers
    check_rows(rows, dtype, 2 * 7 * 2, delivery == "adapter")
    done: list[Row] = []
    for stops in ({"on_step": done.append, "should_stop": lambda: bool(done)}, {}):
        run(model, tmp_path / "resumed", **settings, **stops)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "resumed")
    if os.environ["RANK"] == "0":
        assert [row["step"] for row in done] == [1]
        check_files(model, tmp_path / "run", dtype)
        saved = peft.PeftConfig.from_pretrained(tmp_path / "run" / "adapter")
        assert saved.base_model_name_or_path == str(model)


@on_engines(2)
def test_adapters_that_megatron_trains(model: Path, tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 8}
    actor = {"fsdp": None, "params_dtype": "float32", "lora": {"rank": 4}, **sizes}
    run(model, tmp_path / "run", {"lora_delivery": "adapter"}, actor=actor)
    if os.environ["RANK"] == "0":
        check_files(model, tmp_path / "run", "float32")


@on_engines(1)
def test_the_reference_needs_no_copy(model: Path, tmp_path: Path) -> None:
    with mock.patch.object(
        actor, "build_sharded_model", wraps=actor.build_sharded_model
    ) as build_copy:
        rows = run(adapted(model), tmp_path / "whole")
        build_copy.assert_not_called()
        with mock.patch.object(FsdpAdaptor, "adapters_add_nothing", False):
            copied = run(adapted(model), tmp_path / "copied")
        assert [row["kl"] for row in rows] == [row["kl"] for row in copied]
        # Adapters that add something, and trained copies of weights, are part of the initial model.
        for settings in ({"init_lora_weights": False}, {"modules_to_save": ["lm_head"]}):
            first, _ = run(adapted(model, **settings), tmp_path / "-".join(settings))
            assert first["kl"] == pytest.approx(0, abs=1e-9)
        assert build_copy.call_count == 3
    with refused(StateError, "checkpoint-of-another-model", "scaling"):
        run(adapted(model, lora_alpha=9), tmp_path / "whole")


@pytest.mark.slow  # imports transformers' models
@pytest.mark.parametrize(
    ("make", "settings", "violations"),
    [
        (lambda path: torch.nn.Linear(2, 2), {}, "model wrong-value"),
        (lambda path: loaded(path).requires_grad_(False), {}, "model nothing-is-trained"),
        (lambda path: loaded(path, "bfloat16"), {}, "model not-float32"),
        (
            lambda path: adapted(path, "bfloat16", target_modules=["embed_tokens"]),
            {},
            "model several-dtypes",
        ),
        (
            lambda path: adapted(path, "bfloat16"),
            {"critic_config": {"params_dtype": "bfloat16"}},
            "critic_config.params_dtype not-float32",
        ),
        (adapted, {"actor_config": 5}, "actor_config wrong-value"),
        (
            adapted,
            {
                "random_weights": True,
                "actor_config": {
                    "fsdp": None,
                    "params_dtype": "bfloat16",
                    "frozen_parameters": ["embedding.*"],
                    "lora": {},
                },
            },
            "actor_config.frozen_parameters conflicting-keys; actor_config.fsdp conflicting-keys; "
            "actor_config.lora conflicting-keys; "
            "actor_config.params_dtype conflicting-keys; random_weights conflicting-keys",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, make: Any, settings: Values, violations: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as caught:
        train({"model": make(model), **settings}, PROMPTS, reward, GrpoConfig())
    assert sorted(map(" ".join, violations_of(caught.value))) == violations.split("; ")
    assert not dist.is_initialized()
