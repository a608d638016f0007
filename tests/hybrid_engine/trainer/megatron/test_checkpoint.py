"""Checkpoints of Megatron trainers on two ranks, and skipped steps: state and later steps are identical."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ReshardError, StateError
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.ranks.job import Job
from tests.harness.errors import Refusal, check_refusals, has_code, refusal_of
from tests.harness.launch import Outcomes, Ranks
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.zoo.megatron_models import DENSE_FLOAT32, negative_log_likelihood, running
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import save_model, token_batch

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
BFLOAT16 = {"params_dtype": "bfloat16"}
PLAIN = {"use_distributed_optimizer": False}

# name -> (family, model changes, actor settings)
LAYOUTS: dict[str, tuple[str, Values, Values]] = {
    "tp2, distributed optimizer": ("qwen3", {}, TP2),
    "dp2, distributed optimizer, bfloat16": ("qwen3", {}, BFLOAT16),
    "tp2, plain optimizer": ("llama", {}, {**TP2, **PLAIN}),
    "dp2, plain optimizer, bfloat16": ("llama", {}, {**BFLOAT16, **PLAIN}),
    "pp2 vpp2, tied": (
        "qwen3",
        {"tie_word_embeddings": True, "num_hidden_layers": 4},
        {**PP2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "tp2, adapters": ("qwen3", {}, {**TP2, "lora": {"rank": 4}}),
    "ep2, biases, no clipping": (
        "deepseek_v3",
        {},
        {"expert_model_parallel_size": 2, "optimizer": {"lr": 1e-2, "clip_grad": 0.0}},
    ),
}


# name -> changes and settings; the checkpoint is of "dp2, distributed optimizer, bfloat16"
OTHERS: dict[str, tuple[Values, Values]] = {
    "layout": ({}, {**BFLOAT16, **TP2, **PLAIN}),
    "model": ({"intermediate_size": 48, "num_hidden_layers": 3}, BFLOAT16),
}


def fail_to_save_and_load(paths: dict[str, Path], root: Path) -> dict[str, Refusal]:
    """Return the error of each case on this rank. Raises if any bit of the state has changed."""
    from megatron_patches.optimizers import optimizer_tensors

    results = {}
    saved = root / "saved"

    def unchanged_by(run: Any, action: Callable[[], None]) -> Refusal:
        before = state_of(run)
        refusal = refusal_of(action)
        assert_same(before, state_of(run))
        return refusal

    job = Job.join(60)
    with running(paths["same"], configured(BFLOAT16)) as run:
        train(run, 0)
        checkpoints_of(run, job).save(saved)
        kept = state_of(run)
        train(run, 1)
        with file_size_limit(5000) if dist.get_rank() == 1 else nullcontext():
            results["full"] = unchanged_by(run, lambda: checkpoints_of(run, job).save(saved))
        checkpoints_of(run, job).load(saved)
        assert_same(kept, state_of(run))
        moment = next(state.tensor for state in optimizer_tensors(run.actor.optimizer) if state.key == "exp_avg")
        moment.view(-1)[0] = float("inf") if dist.get_rank() == 1 else 0.0
        results["not finite"] = unchanged_by(run, lambda: checkpoints_of(run, job).save(saved))
        checkpoints_of(run, job).save(root / "infinite", check_nan=False)
        checkpoints_of(run, job).load(saved)
        job.agreement.conclude("all ranks are here")
        if dist.get_rank() == 1:
            path = saved / (saved / "latest").read_text().strip() / "__1_0.distcp"
            path.write_bytes(path.read_bytes()[:-1])  # one byte short
        job.agreement.conclude("all ranks are here")
        results["damaged"] = unchanged_by(run, lambda: checkpoints_of(run, job).load(saved))
        results["nothing"] = unchanged_by(run, lambda: checkpoints_of(run, job).load(root / "nothing"))
        checkpoints_of(run, job).save(saved)
    for name, (_, settings) in OTHERS.items():
        with running(paths[name], configured(settings)) as run:
            train(run, 0)
            results[name] = unchanged_by(run, lambda run=run: checkpoints_of(run, job).load(saved))
    return results


def checkpoints_of(run: Any, job: Job) -> Any:
    from hybrid_engine.trainer.megatron.rank_checkpoint import RankCheckpoints

    return RankCheckpoints(run.engine.model, run.engine.optimizer, run.actor, job)


def configured(settings: Values, **changes: Any) -> ActorConfig:
    return ActorConfig(**{**DENSE_FLOAT32, "optimizer": {"lr": 1e-2}, **settings, **changes})


def save_and_load(paths: dict[str, Path], root: Path) -> dict[str, Values]:
    """Return, by layout, states of a run and of a new run that loads its checkpoint."""
    return {name: round_trip(paths[name], settings, root / name) for name, (_, _, settings) in LAYOUTS.items()}


def round_trip(path: Path, settings: Values, root: Path) -> Values:
    config = configured(settings)
    result: Values = {}
    with running(path, config) as run:
        job = Job.join(60)
        checkpoints_of(run, job).save(root / "untrained")
        result["untrained"] = state_of(run)
        for step in range(2):
            train(run, step)
        run.engine.optimizer.set_learning_rate(3e-3)  # must be restored too
        checkpoints_of(run, job).save(root / "trained")
        result["saved"] = state_of(run)
        skip(run)  # the resumed run does not see this step
        train(run, 2)
        result["continued"] = state_of(run)
    with running(path, ActorConfig(**{**config.model_dump(), "seed": 99})) as run:  # other weights
        checkpoints_of(run, job).load(root / "trained")
        offload_and_back(run)
        result["loaded"] = state_of(run)
        train(run, 2)
        result["resumed"] = state_of(run)
        checkpoints_of(run, job).load(root / "untrained")  # without optimizer state
        result["reloaded"] = state_of(run)
        checkpoints_of(run, job).save(root / "untrained")  # replaces the earlier checkpoint
        checkpoints_of(run, job).load(root / "untrained")
        result["replaced"] = state_of(run)
    return result


SCHEDULE = {"lr_decay_style": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 12, "lr_warmup_init": 1e-3}


def resume_schedule(path: Path, root: Path) -> Values:
    """Return learning rates of a run, of a resumed run, and of a run resumed without a schedule.

    A schedule makes the learning rate read-only.
    """
    plain = configured({})
    config = configured({}, optimizer={"lr": 1e-2, "schedule": SCHEDULE})
    other_limits = {"lr": 2e-2, "schedule": {"lr_decay_style": "linear", "lr_decay_steps": 10, "min_lr": 1e-3}}
    changed = configured({}, optimizer=other_limits)
    job = Job.join(60)
    rates = {}
    with running(path, config) as run:
        rates["rates"] = [train(run, step)["learning_rate"] for step in range(4)]
        checkpoints_of(run, job).save(root / "scheduled")
        rates["next"] = run.engine.optimizer.learning_rate
        with pytest.raises(StateError, check=has_code("learning-rate-is-scheduled")):
            run.engine.optimizer.set_learning_rate(1e-3)
    with running(path, plain) as run:
        checkpoints_of(run, job).save(root / "plain")
        checkpoints_of(run, job).load(root / "scheduled")
        rates["by hand"] = run.engine.optimizer.learning_rate
        run.engine.optimizer.set_learning_rate(1e-3)
    with running(path, config) as run:
        checkpoints_of(run, job).load(root / "scheduled")
        rates["resumed"] = run.engine.optimizer.learning_rate
        checkpoints_of(run, job).load(root / "plain")
        rates["begun"] = [train(run, step)["learning_rate"] for step in range(4)]
    with running(path, changed) as run:
        for name in ("scheduled", "plain"):
            checkpoints_of(run, job).load(root / name)
            rates[f"changed, from {name}"] = run.engine.optimizer.learning_rate
    return rates


def offload_and_back(run: Any) -> None:
    """Loaded state must be offloadable like any other."""
    offloader = MegatronOffloader(run.engine.model)
    offloader.offload({"param", "grad", "optimizer"})
    offloader.onload({"param", "grad", "optimizer"})


def train(run: Any, step: int) -> dict[str, float]:
    batch = token_batch(step, num_sequences=4, length=12)
    return run.engine.train_step(share_of(run.engine, batch), negative_log_likelihood)


def skip(run: Any) -> None:
    """Check that a step in which rank 1 alone has gradients that are not finite changes nothing on any rank."""
    from megatron_patches import iter_buffers

    def spoil(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        for record in iter_buffers(run.actor.chunks):
            record.grad_data.fill_(torch.nan if dist.get_rank() == 1 else 1.0)

    config = run.actor.transformer_config
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, spoil
    before = state_of(run)
    assert train(run, 5)["skipped"] == 1
    assert_same(before, state_of(run))
    config.finalize_model_grads_func = finalize


def state_of(run: Any) -> Values:
    """Return a copy of all state that a checkpoint must restore."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_patches.optimizers import optimizer_tensors

    model = run.engine.model.weights.model
    tensors = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_weights())}
    for state in optimizer_tensors(run.actor.optimizer):
        if state.kind != "main_grad":
            tensors[f"{state.path}.{state.key}"] = state.tensor.detach().clone()
    tensors["generator"] = torch.get_rng_state()
    tensors.update({f"tracker.{name}": s.clone() for name, s in get_cuda_rng_tracker().get_states().items()})
    groups = [{k: v for k, v in group.items() if k != "params"} for group in run.actor.optimizer.param_groups]
    return {"tensors": tensors, "groups": groups, "version": run.engine.model.version}


def assert_same(first: Values, second: Values) -> None:
    assert first["version"] == second["version"]
    assert [group["lr"] for group in first["groups"]] == [group["lr"] for group in second["groups"]]
    assert first["tensors"].keys() == second["tensors"].keys()
    different = [name for name, tensor in first["tensors"].items() if not torch.equal(tensor, second["tensors"][name])]
    assert not different


def test_one_rank_resumes_with_all_bits(job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model(tmp_path / "model", "qwen3")
    alone = Job.join(60)
    with running(path, configured(BFLOAT16)) as run:
        train(run, 0)
        checkpoints_of(run, alone).save(tmp_path / "saved")
        saved = state_of(run)
        with monkeypatch.context() as patch:
            patch.setattr("megatron.core.parallel_state.get_data_parallel_rank", lambda: 1)
            checkpoints_of(run, alone).save(tmp_path / "another order")
    with running(path, configured(BFLOAT16, seed=99)) as run:
        checkpoints_of(run, alone).load(tmp_path / "saved")
        assert_same(saved, state_of(run))
        with pytest.raises(StateError, check=has_code("checkpoint-of-another-layout", "data_parallel_rank 1, now 0")):
            checkpoints_of(run, alone).load(tmp_path / "another order")
        run.actor.chunks[0].to(torch.float64)
        with pytest.raises(ReshardError, check=has_code("parameters-moved")):
            checkpoints_of(run, alone).save(tmp_path / "saved")


@pytest.fixture(scope="module")
def launched(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Results by call and rank: states by layout, learning rates, errors by case."""
    paths = {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes, _) in LAYOUTS.items()
    }
    others = {
        name: save_model(tmp_path_factory.mktemp("other"), "qwen3", **changes) for name, (changes, _) in OTHERS.items()
    }
    others["same"] = paths["dp2, distributed optimizer, bfloat16"]
    root = tmp_path_factory.mktemp("checkpoints")
    calls = {
        "good": (save_and_load, (paths, root)),
        "schedule": (resume_schedule, (paths["tp2, distributed optimizer"], root)),
        "wrong": (fail_to_save_and_load, (others, root)),
    }
    return engines.launch_in_turn(2, calls)


@pytest.fixture
def results(launched: Outcomes) -> list[dict[str, Values]]:
    """States by rank and layout."""
    return launched["good"]


# name -> (types of the errors of both ranks, code on the rank at fault, part of both messages)
WRONG: dict[str, tuple[set[str], str, str]] = {
    "full": ({"FileError", "RemoteError"}, "file-failed", r"saved/save-000002"),
    "not finite": (
        {"WeightError", "RemoteError"},
        "",
        r"rank1/optimizer\.0\.\d+\.exp_avg: 1 Inf of .*check_nan=False",
    ),
    "damaged": ({"FileError", "RemoteError"}, "different-checksum", r"saved/save-\d+/__1_0\.distcp"),
    "nothing": ({"StateError"}, "no-checkpoint", "nothing/latest"),
    "layout": ({"StateError"}, "checkpoint-of-another-layout", "tensor_parallel 1, now 2; .*; optimizers Dist"),
    "model": ({"StateError"}, "checkpoint-of-another-model", r"and \d+ more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_failures_are_reported_on_all_ranks_and_change_nothing(launched: Outcomes, name: str) -> None:
    check_refusals([results[name] for results in launched["wrong"]], *WRONG[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("expected", "actual"),
    [("saved", "loaded"), ("continued", "resumed"), ("untrained", "reloaded"), ("untrained", "replaced")],
)
def test_states_are_bit_identical(results: list[dict[str, Values]], layout: str, expected: str, actual: str) -> None:
    for by_layout in results:
        states = by_layout[layout]
        assert_same(states[expected], states[actual])
        assert states["saved"]["version"] == 2


def test_a_schedule_resumes_where_it_was_saved(launched: Outcomes) -> None:
    for rates in launched["schedule"]:
        assert rates["rates"] == pytest.approx([1e-3, 5.5e-3, 1e-2, 9e-3])
        assert rates["next"] == rates["resumed"] == rates["by hand"] == pytest.approx(8e-3)
        assert rates["begun"] == pytest.approx(rates["rates"])  # the checkpoint has no schedule
        assert rates["changed, from scheduled"] == pytest.approx(1e-3 + 0.6 * 1.9e-2)  # 4 of 10
        assert rates["changed, from plain"] == pytest.approx(2e-2)
