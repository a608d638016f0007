"""The critic built next to an actor, and violations about it or its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.config import HybridConfig, find_violations
from hybrid_engine.config.job_rules import critic_of, memory_plan, require_room
from hybrid_engine.errors import ConfigError
from hybrid_engine.models.table import VALUE_HEAD
from tests.harness.errors import has_violations, violated
from tests.harness.values import Values
from tests.hybrid_engine.config.test_constraints import DENSE, EXPERTS, PP2, TP2, VPP2
from tests.hybrid_engine.models.small_configs import small_config
from tests.zoo.families import write_config

SP = {"sequence_parallel": True}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_config(tmp_path / "dense", DENSE)


def configured(model: Path, actor: Values, critic: Values, **others: Any) -> HybridConfig:
    return HybridConfig(model=model, actor_config=actor, critic_config=critic, **others)


def keys_of(config: HybridConfig, world_size: int) -> set[str]:
    return {violation.key for violation in find_violations(config, world_size)}


def test_missing_keys_have_the_values_of_the_actor(dense: Path) -> None:
    actor = {**TP2, **PP2, "params_dtype": "float32", "micro_batch_size": 4, "seed": 7, "lora": {}}
    actor |= {
        "optimizer": {"lr": 1e-3},
        "num_layers_in_first_pipeline_stage": 1,
        "frozen_parameters": ["embedding.*"],
    }
    critic = critic_of(
        configured(dense, actor, {"micro_batch_size": 2, "optimizer": {"lr": 1e-2}}), 4
    )
    built = critic.actor
    assert (
        built.tensor_model_parallel_size,
        built.num_layers_in_first_pipeline_stage,
        built.seed,
    ) == (2, 1, 7)
    assert (built.micro_batch_size, built.optimizer.lr, built.params_dtype) == (2, 1e-2, "float32")
    assert (built.lora, built.frozen_parameters) == (None, ())
    assert critic.table.shapes[VALUE_HEAD] == (1, 64)


def test_rules_of_a_step_apply_to_the_critic_by_its_keys(dense: Path) -> None:
    critic = {"optimizer": {"lr": 1e-3, "schedule": {"lr_decay_style": "linear", "min_lr": 1.0}}}
    assert keys_of(configured(dense, {}, critic), 1) == {
        "critic_config.optimizer.schedule.lr_decay_steps",
        "critic_config.optimizer.schedule.min_lr",
    }


def test_the_plan_counts_gradients_in_their_dtype(dense: Path) -> None:
    def train_nbytes(num_ranks: int, dtype: str, ddp: dict[str, bool]) -> tuple[int, int]:
        config = HybridConfig(
            model=dense, actor_config={"params_dtype": dtype, "overrides": {"ddp": ddp}}
        )
        phases = memory_plan(config, num_ranks).phases
        return int(phases["train"].total.max()), int(phases["forward"].total.max())

    for num_ranks in (1, 2, 4):
        usual, parameters = train_nbytes(num_ranks, "bfloat16", {})
        nbytes, _ = train_nbytes(num_ranks, "bfloat16", {"grad_reduce_in_fp32": False})
        # 2 bytes less per parameter, 4 more for the shard that the step converts.
        assert nbytes - usual == pytest.approx(parameters * (-1 + 2 / num_ranks), abs=8)
        in_float32 = [
            train_nbytes(num_ranks, "float32", ddp) for ddp in ({}, {"grad_reduce_in_fp32": False})
        ]
        assert in_float32[0] == in_float32[1]


def test_a_critic_with_another_model_has_its_own_stages(dense: Path, tmp_path: Path) -> None:
    deep = write_config(tmp_path / "deep", {**DENSE, "num_hidden_layers": 8})
    actor = {**PP2, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
    config = configured(dense, actor, {"model": deep})
    assert critic_of(config, 4).actor.num_layers_in_first_pipeline_stage is None
    assert find_violations(config, 4) == []  # 1 + 3 layers would not fit eight
    interleaved = critic_of(configured(dense, {**PP2, **VPP2}, {"model": deep}), 4).actor
    assert interleaved.virtual_pipeline_model_parallel_size == 2
    experts = write_config(tmp_path / "experts", EXPERTS)
    with_experts = configured(
        experts, {**TP2, **SP, "expert_model_parallel_size": 2}, {"model": dense}
    )
    assert critic_of(with_experts, 4).actor.expert_model_parallel_size == 1
    assert find_violations(with_experts, 4) == []


def test_mtp_layers_are_removed_from_the_stages(tmp_path: Path) -> None:
    latent = {"architectures": ["DeepseekV3ForCausalLM"]}
    from tests.zoo.families import tiny_config

    model = write_config(
        tmp_path / "mtp", {**tiny_config("deepseek_v3", num_nextn_predict_layers=1), **latent}
    )
    config = configured(model, {**PP2, "pipeline_model_parallel_layout": "Ett|tmL"}, {})
    assert critic_of(config, 2).actor.pipeline_model_parallel_layout == "Ett|tL"
    assert find_violations(config, 2) == []


def test_violations_of_the_critic_are_marked(dense: Path, tmp_path: Path) -> None:
    odd = write_config(tmp_path / "odd", {**DENSE, "num_hidden_layers": 5, "intermediate_size": 97})
    assert keys_of(configured(dense, {**TP2, **PP2}, {"model": odd}), 4) == {
        "actor_config.pipeline_model_parallel_size (of the critic)",
        "actor_config.tensor_model_parallel_size (of the critic)",
    }
    uneven = configured(dense, PP2, {"model": dense, "pipeline_model_parallel_layout": "E|t|t|tL"})
    assert len(find_violations(uneven, 4)) == 1  # the layers; not the chunks, too
    (violation,) = find_violations(configured(dense, {}, {"model": tmp_path / "nowhere"}), 4)
    assert violation.key == "critic_config.model"


def test_every_phase_over_the_budget_is_named(tmp_path: Path) -> None:
    small = {**DENSE, "vocab_size": 128}
    model, deep = (
        write_config(tmp_path / f"{n}", {**small, "num_hidden_layers": n}) for n in (4, 16)
    )
    config = configured(model, TP2, {"model": deep})
    plan = memory_plan(config, 4)
    train = plan.phases["train"].total.max()
    assert plan.phases["critic train"].total.max() > train
    budget = float(train) / 2**30  # just enough for the actor
    limited = config.model_copy(update={"device_budget_gib": budget})
    (violation,) = find_violations(limited, 4)
    assert violation.key == "device_budget_gib"
    assert "the phase critic train takes" in str(violation)
    assert find_violations(config, 4) == []


def test_weights_that_may_stay_count_in_all_phases(dense: Path) -> None:
    for megabytes in (0, 100):
        generate = {"incremental": "auto", "incremental_mb": megabytes}
        plan = memory_plan(HybridConfig(model=dense, generate_config=generate), 2)
        assert ("vLLM" in plan.phases["train"].by_model) == bool(megabytes)


def test_a_job_that_exceeds_its_device_for_certain_is_refused(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", DENSE)
    stays = {f"offload_train_{kind}": False for kind in ("param", "grad", "optimizer")}
    config = HybridConfig(model=model, generate_config={**stays, "infer_tensor_parallel_size": 4})
    nbytes = {name: int(phase.total.max()) for name, phase in memory_plan(config, 4).phases.items()}
    room = max(nbytes[name] for name in nbytes if name != "reference")
    assert nbytes["reference"] > room
    require_room(config, 4, room)  # a reference exists with a KL term only
    with pytest.raises(
        ConfigError, check=has_violations(("actor_config", "over-budget"), exactly=False)
    ):
        require_room(config, 4, room // 2)
    for changes in (
        {"actor_config": {"frozen_parameters": ["decoder.*"]}},
        {"critic_config": {"model": model}},
        {"generate_config": {"servers": ["http://localhost:1"]}},
    ):
        require_room(HybridConfig(model=model, **changes), 4, room // 2)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"actor_config": {"lora": {}}}, ""),
        ({"actor_config": {"fsdp": {}, "params_dtype": "float32"}}, ""),
        ({"generate_config": {"quantization": "fp8"}}, ""),
        ({}, "GptOssForCausalLM"),
    ],
    ids=["lora", "fsdp", "blocks", "experts in one tensor"],
)
def test_a_budget_needs_planned_memory(
    dense: Path, tmp_path: Path, changes: Values, name: str
) -> None:
    model = write_config(tmp_path / name, small_config(name)) if name else dense
    config = HybridConfig(model=model, device_budget_gib=1, **changes)
    assert [violation.key for violation in find_violations(config, 2, own_loop=True)] == [
        "device_budget_gib"
    ]
    with violated(ConfigError, ("device_budget_gib", "not-planned")):
        memory_plan(config, 2)
