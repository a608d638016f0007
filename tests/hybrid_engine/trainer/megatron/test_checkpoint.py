"""Checkpoints of Megatron trainers on two ranks, and skipped steps: state and later steps are identical."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import FileError, ReshardError, StateError, WeightError
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.ranks.job import Job
from tests.harness.errors import failing, has_code
from tests.harness.launch import on_engines
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


def checkpoints_of(run: Any, job: Job) -> Any:
    from hybrid_engine.trainer.megatron.training_state import MegatronState
    from hybrid_engine.trainer.training_checkpoint import TrainingCheckpoints

    return TrainingCheckpoints(MegatronState(run.engine.model, run.engine.optimizer, run.actor, job), job)


def configured(settings: Values, **changes: Any) -> ActorConfig:
    return ActorConfig(**{**DENSE_FLOAT32, "optimizer": {"lr": 1e-2}, **settings, **changes})


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by layout, and another one."""
    models = {name: (family, changes) for name, (family, changes, _) in LAYOUTS.items()}
    models["another"] = ("qwen3", {"intermediate_size": 48, "num_hidden_layers": 3})
    return {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes) in models.items()
    }


@on_engines(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_state_equals_saved_state(paths: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """Loaded by a run with another seed, which goes on as the first one does."""
    path = paths[layout]
    settings = LAYOUTS[layout][2]
    job = Job.join(60)
    untrained_path = tmp_path / "untrained"
    with running(path, configured(settings)) as run:
        checkpoints_of(run, job).save(untrained_path)
        untrained = state_of(run)
        for step in range(2):
            train(run, step)
        run.engine.optimizer.set_learning_rate(3e-3)  # must be restored too
        checkpoints_of(run, job).save(tmp_path / "trained")
        saved = state_of(run)
        assert saved["version"] == 2
        skip(run)  # the resumed run does not see this step
        train(run, 2)
        continued = state_of(run)
    with running(path, configured(settings, seed=99)) as run:  # other weights
        checkpoints = checkpoints_of(run, job)
        checkpoints.load(tmp_path / "trained")
        offload_and_back(run)
        assert_same(saved, state_of(run))
        train(run, 2)
        assert_same(continued, state_of(run))
        checkpoints.load(untrained_path)  # without optimizer state
        assert_same(untrained, state_of(run))
        checkpoints.save(untrained_path)  # replaces the earlier checkpoint
        checkpoints.load(untrained_path)
        assert_same(untrained, state_of(run))


SCHEDULE = {"lr_decay_style": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 12, "lr_warmup_init": 1e-3}


@on_engines(2)
def test_a_schedule_resumes_where_it_was_saved(paths: dict[str, Path], tmp_path: Path) -> None:
    """A schedule makes the learning rate read-only."""
    path = paths["tp2, distributed optimizer"]
    plain = configured({})
    config = configured({}, optimizer={"lr": 1e-2, "schedule": SCHEDULE})
    other_limits = {"lr": 2e-2, "schedule": {"lr_decay_style": "linear", "lr_decay_steps": 10, "min_lr": 1e-3}}
    changed = configured({}, optimizer=other_limits)
    job = Job.join(60)
    of_schedule = pytest.approx([1e-3, 5.5e-3, 1e-2, 9e-3])
    with running(path, config) as run:
        assert [train(run, step)["learning_rate"] for step in range(4)] == of_schedule
        checkpoints_of(run, job).save(tmp_path / "scheduled")
        assert run.engine.optimizer.learning_rate == pytest.approx(8e-3)
        with pytest.raises(StateError, check=has_code("learning-rate-is-scheduled")):
            run.engine.optimizer.set_learning_rate(1e-3)
    with running(path, plain) as run:
        checkpoints_of(run, job).save(tmp_path / "plain")
        checkpoints_of(run, job).load(tmp_path / "scheduled")
        assert run.engine.optimizer.learning_rate == pytest.approx(8e-3)
        run.engine.optimizer.set_learning_rate(1e-3)
    with running(path, config) as run:
        checkpoints_of(run, job).load(tmp_path / "scheduled")
        assert run.engine.optimizer.learning_rate == pytest.approx(8e-3)
        checkpoints_of(run, job).load(tmp_path / "plain")  # which has no schedule
        assert [train(run, step)["learning_rate"] for step in range(4)] == of_schedule
    with running(path, changed) as run:
        for name, rate in (("scheduled", 1e-3 + 0.6 * 1.9e-2), ("plain", 2e-2)):  # 4 steps of 10
            checkpoints_of(run, job).load(tmp_path / name)
            assert run.engine.optimizer.learning_rate == pytest.approx(rate)


@contextmanager
def unchanged(run: Any) -> Iterator[None]:
    before = state_of(run)
    yield
    assert_same(before, state_of(run))


@on_engines(2)
def test_failures_are_reported_on_all_ranks_and_change_nothing(paths: dict[str, Path], tmp_path: Path) -> None:
    from megatron_patches.optimizers import optimizer_tensors

    saved = tmp_path / "saved"
    job = Job.join(60)
    path = paths["dp2, distributed optimizer, bfloat16"]
    with running(path, configured(BFLOAT16)) as run:
        checkpoints = checkpoints_of(run, job)
        train(run, 0)
        checkpoints.save(saved)
        kept = state_of(run)
        train(run, 1)
        full = failing(FileError, "file-failed", "saved/save-000002", on=1)
        with unchanged(run), full, file_size_limit(5000) if job.rank == 1 else nullcontext():
            checkpoints.save(saved)
        checkpoints.load(saved)
        assert_same(kept, state_of(run))
        moment = next(state.tensor for state in optimizer_tensors(run.actor.optimizer) if state.key == "exp_avg")
        moment.view(-1)[0] = torch.inf if job.rank == 1 else 0.0
        not_finite = r"optimizer\.\S+\.exp_avg on rank 1: 1 Inf of .*check_nan=False"
        with unchanged(run), failing(WeightError, "", not_finite, on=1):
            checkpoints.save(saved)
        checkpoints.save(tmp_path / "infinite", check_nan=False)
        checkpoints.load(saved)
        job.agreement.conclude("all ranks are here")
        if job.rank == 1:
            data = saved / (saved / "latest").read_text().strip() / "__1_0.distcp"
            data.write_bytes(data.read_bytes()[:-1])  # one byte short
        job.agreement.conclude("all ranks are here")
        with unchanged(run), failing(FileError, "different-checksum", r"saved/save-\d+/__1_0\.distcp", on=0):
            checkpoints.load(saved)
        with unchanged(run), failing(StateError, "no-checkpoint", "nothing/latest"):
            checkpoints.load(tmp_path / "nothing")
        checkpoints.save(saved)
    with running(paths["another"], configured(BFLOAT16)) as run:
        train(run, 0)
        with unchanged(run), failing(StateError, "checkpoint-of-another-model", r"and \d+ more"):
            checkpoints_of(run, job).load(saved)


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


def test_one_rank_resumes_with_all_bits(job: None, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "qwen3")
    alone = Job.join(60)
    with running(path, configured(BFLOAT16)) as run:
        train(run, 0)
        checkpoints_of(run, alone).save(tmp_path / "saved")
        saved = state_of(run)
    with running(path, configured(BFLOAT16, seed=99)) as run:
        checkpoints_of(run, alone).load(tmp_path / "saved")
        assert_same(saved, state_of(run))
        run.actor.chunks[0].to(torch.float64)
        with pytest.raises(ReshardError, check=has_code("parameters-moved")):
            checkpoints_of(run, alone).save(tmp_path / "saved")
