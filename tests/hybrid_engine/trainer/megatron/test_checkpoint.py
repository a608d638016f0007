"""Checkpoints of Megatron trainers on two ranks, and skipped steps: state and later steps are
identical.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import StateError
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine
from tests.harness.errors import failing, refused
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.actors import actor
from tests.hybrid_engine.end_to_end.digests import digest
from tests.hybrid_engine.trainer.fsdp.test_distributed_checkpoint import check_failures
from tests.zoo.megatron_models import (
    ADAM_EPS,
    EP2,
    PP2,
    SP2,
    TP2,
    VPP2,
    WEIGHT_DECAY,
    negative_log_likelihood,
    running,
    whole_weights,
)
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import TinyModel, Zoo, token_batch

BFLOAT16 = {"params_dtype": "bfloat16"}
PLAIN = {"use_distributed_optimizer": False}

LAYOUTS: dict[str, tuple[TinyModel, Values]] = {
    "tp2, distributed optimizer": (TinyModel("qwen3"), TP2),
    "dp2, distributed optimizer, bfloat16": (TinyModel("qwen3"), BFLOAT16),
    "tp2, plain optimizer": (TinyModel("llama"), {**TP2, **PLAIN}),
    "dp2, plain optimizer, bfloat16": (TinyModel("llama"), {**BFLOAT16, **PLAIN}),
    "pp2 vpp2, tied": (
        TinyModel("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
        VPP2,
    ),
    "tp2, adapters": (TinyModel("qwen3"), {**TP2, "lora": {"rank": 4}}),
    "ep2, biases, no clipping": (
        TinyModel("deepseek_v3"),
        {**EP2, "optimizer": {"lr": 1e-2, "clip_grad": 0.0}},
    ),
}


def checkpoints_of(run: Any, job: Job) -> Any:
    from hybrid_engine.trainer.megatron.training_state import MegatronState
    from hybrid_engine.trainer.training_checkpoint import TrainingCheckpoints

    state = MegatronState(run.engine.model, run.engine.optimizer, run.actor, job)
    return TrainingCheckpoints(state, job, ExitStack())


@on_engines(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_state_equals_saved_state(zoo: Zoo, tmp_path: Path, layout: str) -> None:
    """Loaded by a run with another seed, which goes on as the first one does."""
    model, settings = LAYOUTS[layout]
    path = zoo.saved(model)
    job = Job.join(60)
    untrained_path = tmp_path / "untrained"
    with running(path, **settings) as run:
        checkpoints_of(run, job).save(untrained_path)
        untrained = state_of(run)
        for step in range(2):
            train(run, step)
        run.engine.optimizer.set_learning_rate(3e-3)  # must be restored too
        checkpoints = checkpoints_of(run, job)
        checkpoints.save(tmp_path / "trained", wait=False)  # written while training goes on
        saved = state_of(run)
        assert saved["version"] == 2
        skip(run)  # the resumed run does not see this step
        train(run, 2)
        checkpoints.close()
        continued = state_of(run)
    with running(path, **settings, seed=99) as run:  # other weights
        checkpoints = checkpoints_of(run, job)
        checkpoints.load(tmp_path / "trained")
        offload_and_back(run)
        assert state_of(run) == saved
        train(run, 2)
        assert state_of(run) == continued
        checkpoints.load(untrained_path)  # without optimizer state
        assert state_of(run) == untrained
        checkpoints.save(untrained_path)  # replaces the earlier checkpoint
        checkpoints.load(untrained_path)
        assert state_of(run) == untrained


SCHEDULE = {
    "lr_decay_style": "linear",
    "lr_warmup_steps": 2,
    "lr_decay_steps": 12,
    "lr_warmup_init": 1e-3,
}


@on_engines(2)
def test_a_schedule_resumes_where_it_was_saved(zoo: Zoo, tmp_path: Path) -> None:
    """A schedule makes the learning rate read-only."""
    path = zoo.path("qwen3")
    scheduled = {"lr": 1e-2, "schedule": SCHEDULE}
    other_limits = {
        "lr": 2e-2,
        "schedule": {"lr_decay_style": "linear", "lr_decay_steps": 10, "min_lr": 1e-3},
    }
    job = Job.join(60)
    of_schedule = pytest.approx([1e-3, 5.5e-3, 1e-2, 9e-3])
    with running(path, optimizer=scheduled) as run:
        assert [train(run, step)["learning_rate"] for step in range(4)] == of_schedule
        checkpoints_of(run, job).save(tmp_path / "scheduled")
        assert run.engine.optimizer.learning_rate == pytest.approx(8e-3)
        with refused(StateError, "learning-rate-is-scheduled"):
            run.engine.optimizer.set_learning_rate(1e-3)
    with running(path) as run:
        checkpoints_of(run, job).save(tmp_path / "plain")
        checkpoints_of(run, job).load(tmp_path / "scheduled")
        assert run.engine.optimizer.learning_rate == pytest.approx(8e-3)
        run.engine.optimizer.set_learning_rate(1e-3)
    with running(path, optimizer=scheduled) as run:
        checkpoints_of(run, job).load(tmp_path / "scheduled")
        assert run.engine.optimizer.learning_rate == pytest.approx(8e-3)
        checkpoints_of(run, job).load(tmp_path / "plain")  # which has no schedule
        assert [train(run, step)["learning_rate"] for step in range(4)] == of_schedule
    with running(path, optimizer=other_limits) as run:
        for name, rate in (("scheduled", 1e-3 + 0.6 * 1.9e-2), ("plain", 2e-2)):  # 4 steps of 10
            checkpoints_of(run, job).load(tmp_path / name)
            assert run.engine.optimizer.learning_rate == pytest.approx(rate)


@on_engines(2)
def test_failures_are_reported_on_all_ranks_and_change_nothing(zoo: Zoo, tmp_path: Path) -> None:
    from megatron_patches.optimizers import optimizer_tensors

    path = zoo.path("qwen3")
    job = Job.join(60)
    with running(path, **BFLOAT16) as run:
        optimizer = run.actor.optimizer
        check_failures(
            *(checkpoints_of(run, job), job, tmp_path),
            state=lambda: state_of(run),
            step=lambda step: train(run, step),
            moment=lambda: next(
                state.tensor for state in optimizer_tensors(optimizer) if state.key == "exp_avg"
            ),
            name_of_moment=r"optimizer\.\S+\.exp_avg on rank 1",
        )
    with running(zoo.path("qwen3", intermediate_size=48, num_hidden_layers=3), **BFLOAT16) as run:
        train(run, 0)
        before = state_of(run)
        with failing(StateError, "checkpoint-of-another-model", r"and \d+ more"):
            checkpoints_of(run, job).load(tmp_path / "saved")
        assert state_of(run) == before


def offload_and_back(run: Any) -> None:
    """Loaded state must be offloadable like any other."""
    offloader = Offloader(run.engine.model)
    offloader.offload({"param", "grad", "optimizer"})
    offloader.onload({"param", "grad", "optimizer"})


def train(run: Any, step: int) -> dict[str, float]:
    batch = token_batch(step, num_sequences=4, length=12)
    return run.engine.train_step(share_of(run.engine, batch), negative_log_likelihood)


def skip(run: Any) -> None:
    """Check that a step in which rank 1 alone has gradients that are not finite changes nothing on
    any rank.
    """
    from megatron_patches import iter_buffers

    def spoil(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        for record in iter_buffers(run.actor.chunks):
            record.grad_data.fill_(torch.nan if dist.get_rank() == 1 else 1.0)

    config = run.actor.transformer_config
    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, spoil
    before = state_of(run)
    assert train(run, 5)["skipped"] == 1
    assert state_of(run) == before
    config.finalize_model_grads_func = finalize


def state_of(run: Any) -> Values:
    """Return all state that a checkpoint must restore; tensors as digests."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_patches.optimizers import optimizer_tensors

    model = run.engine.model.weights.model
    tensors = dict((*model.named_parameters(), *model.named_weights()))
    for state in optimizer_tensors(run.actor.optimizer):
        if state.kind != "main_grad":
            tensors[f"{state.path}.{state.key}"] = state.tensor
    tensors["generator"] = torch.get_rng_state()
    tensors.update(
        {f"tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    )
    return {
        **{name: digest(tensor) for name, tensor in tensors.items()},
        "rates": [group["lr"] for group in run.actor.optimizer.param_groups],
        "version": run.engine.model.version,
    }


# -- other layouts, and the other trainer
# -------------------------------------------------------------

EP4 = {"expert_model_parallel_size": 4}
ETP1 = {**EP2, "expert_tensor_parallel_size": 1}
UNEVEN = {**PP2, "num_layers_in_first_pipeline_stage": 1}
BUCKETS = {"overlap_grad_reduce": True, "overrides": {"ddp": {"bucket_size": 2000}}}
PADDED = {"make_vocab_size_divisible_by": 512}
FSDP2: Values = {"fsdp": {}}
FOUR = {"num_hidden_layers": 4}
# The same for both trainers.
SETTINGS = {
    "micro_batch_size": 1,
    "optimizer": {"lr": 1e-2, "weight_decay": WEIGHT_DECAY, "clip_grad": 0.5, "adam_eps": ADAM_EPS},
}

# name -> model, and layouts: on four ranks each resumes in all others, on two in the next one.
MATRIX: dict[str, tuple[TinyModel, list[Values]]] = {
    "experts": (
        TinyModel("qwen3_moe", FOUR),
        [
            {**SP2, **VPP2, **ETP1},
            {**UNEVEN, **EP2, **PLAIN},
            {**SP2, **EP2},
            {**EP4, **BUCKETS, **PADDED},
            FSDP2,
        ],
    ),
}
RINGS: dict[str, tuple[TinyModel, list[Values]]] = {
    "tied": (
        TinyModel("qwen3", {"tie_word_embeddings": True, **FOUR}),
        [VPP2, TP2, FSDP2, PP2, {**TP2, **PLAIN}],
    ),
    "bfloat16": (TinyModel("llama"), [{**BFLOAT16, **layout} for layout in ({}, TP2, PLAIN, PP2)]),
    "router biases": (TinyModel("deepseek_v3"), [EP2, {}, SP2, {**SP2, **ETP1}, UNEVEN]),
    "shared gate": (TinyModel("qwen2_moe"), [EP2, FSDP2, SP2]),
    "transposed": (TinyModel("gpt2"), [TP2, {}]),
}


@contextmanager
def trainer_of(path: Path, layout: Values, seed: int) -> Iterator[Any]:
    """Build the actor of either trainer; yield its `engine` and `checkpoints`."""
    if "fsdp" in layout:
        with actor(path, **SETTINGS, **layout, seed=seed) as parts:
            yield parts
    else:
        job = Job.join(60)
        with running(path, **SETTINGS, **layout, seed=seed) as run:
            yield SimpleNamespace(**vars(run), checkpoints=checkpoints_of(run, job))


def whole_state(trainer: Any) -> TensorDict:
    """Return every weight, and every moment as if it were the weight."""
    from megatron_patches.optimizers import optimizer_members, stepped_parts

    engine = trainer.engine
    if isinstance(engine, FsdpTrainEngine):
        members = chunks = []
        stepped = list(engine.optimizer.inner.state.items())
    else:
        chunks = trainer.actor.chunks
        optimizer = trainer.actor.optimizer
        members = [member for _, member in optimizer_members(optimizer)]
        stepped = [
            (part.tensor, part.optimizer.state[part.tensor]) for part in stepped_parts(optimizer)
        ]
    whole = {}
    kept = [tensor.detach().clone() for tensor, _ in stepped]
    for kind in ("exp_avg", "exp_avg_sq", ""):
        with torch.no_grad():
            for (tensor, state), weight in zip(stepped, kept, strict=True):
                tensor.copy_(state[kind] if kind else weight)
            for member in members:
                if hasattr(member, "_copy_main_params_to_model_params"):
                    member._copy_main_params_to_model_params()
            for chunk in chunks:
                if chunk.ddp_config.use_distributed_optimizer:
                    chunk.start_param_sync(force_sync=True)
        whole |= {
            name + kind: tensor for name, tensor in whole_weights(engine.model.weights).items()
        }
    return whole


def train_on(trainer: Any, steps: range) -> TensorDict:
    """Take steps; return their losses, and the weights."""
    losses = [train(trainer, step)["loss"] for step in steps]
    assert trainer.engine.model.version == steps.stop
    return {"losses": torch.tensor(losses), **whole_weights(trainer.engine.model.weights)}


def distance(first: TensorDict, second: TensorDict) -> float:
    return math.hypot(*((first[name] - tensor).norm().item() for name, tensor in second.items()))


@on_engines({4: MATRIX, 2: RINGS})
def test_training_goes_on_in_another_layout(zoo: Zoo, tmp_path: Path, case: str) -> None:
    """Weights and moments are equal bit by bit; five more steps differ by rounding.

    The run that changed its layout is at most twice as far from one that was always in the second
    layout as that is from one that stays in the first.
    """
    model, layouts = {**MATRIX, **RINGS}[case]
    path = zoo.saved(model)
    states = []
    runs = []
    for number, layout in enumerate(layouts):
        with trainer_of(path, layout, seed=1) as trainer:
            if number:
                trainer.checkpoints.load(tmp_path / "initial")
            else:
                trainer.checkpoints.save(tmp_path / "initial")
            train_on(trainer, range(2))
            trainer.checkpoints.save(tmp_path / str(number))
            states.append(whole_state(trainer))
            runs.append(train_on(trainer, range(2, 7)))
    numbers = range(len(layouts))
    in_turn = zip(numbers, [*numbers[1:], 0], strict=True)
    for source, target in itertools.permutations(numbers, 2) if case in MATRIX else in_turn:
        with trainer_of(path, layouts[target], seed=2) as trainer:
            trainer.checkpoints.load(tmp_path / str(source))
            loaded = whole_state(trainer)
            saved = states[source].items()
            different = [name for name, tensor in saved if not torch.equal(tensor, loaded[name])]
            assert not different, (layouts[source], layouts[target], different)
            resumed = train_on(trainer, range(2, 7))
        limit = 2 * distance(runs[source], runs[target])
        assert distance(resumed, runs[target]) <= limit, (layouts[source], layouts[target])


@on_engines(2)
def test_adapters_are_read_in_their_layout_only(zoo: Zoo, tmp_path: Path) -> None:
    job = Job.join(60)
    path = zoo.path("qwen3")
    adapted = {**TP2, "lora": {"rank": 4}}
    with running(path, **adapted) as run:
        train(run, 0)
        checkpoints_of(run, job).save(tmp_path / "adapted")
    for layout in (TP2, {"lora": {"rank": 4}}):
        with running(path, **layout) as run:
            before = state_of(run)
            with failing(StateError, "checkpoint-of-another-layout", "resume with that layout"):
                checkpoints_of(run, job).load(tmp_path / "adapted")
            assert state_of(run) == before
