"""FSDP2 -> vLLM: families, layouts and casts, each over several switches with training steps between, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.assembly import build_inference_engine, parts_with_engine
from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.config import ActorConfig, FsdpConfig, HybridConfig, load_config
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import differences
from hybrid_engine.switch.setup import gather_side
from hybrid_engine.tools.plan.cluster_plan import Cluster, JobPlan, plan_job
from tests.harness.launch import Outcomes, Ranks
from tests.zoo import sharded_models
from tests.zoo.families import read_config, served_config, write_config
from tests.zoo.tiny_models import label_log_probs, token_batch


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        family: one of the zoo's.
        replicas: of the sharded model; the other ranks of the job shard it.
        infer: parallel sizes of vLLM, as in `generate_config`.
        dtype: what vLLM computes in.
        model: changes of config.json.
        shard: options of `fully_shard`.
        num_steps: of training, with a switch to vLLM and back before each.
        tensor_parallel: two ranks share each sequence and cut the matrices, before FSDP2 does.
    """

    family: str
    replicas: int = 1
    infer: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    model: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 2
    tensor_parallel: bool = False

    @property
    def name(self) -> str:
        sizes = " ".join(f"{key.removeprefix('infer_').partition('_')[0]} {n}" for key, n in self.infer.items())
        train = "tensor parallel" if self.tensor_parallel else f"{self.replicas} replicas"
        return f"{self.family}, {train} -> {sizes or 'dp'}, {self.dtype}"

    def data_of(self, rank: int) -> int:
        """The number of the sequences that this rank trains on."""
        return rank // 2 if self.tensor_parallel else rank


@dataclass
class Switched:
    """What one rank saw.

    Attributes:
        different: parameters of vLLM that differ in a bit from its own load of the same checkpoint.
        num_compared: how many parameters were compared, over all switches.
        received, least: bytes of the last switch.
        misplaced: tensors that this rank holds otherwise than `plan` computes from config.json and sizes alone.
        planned: bytes that this rank receives, by the same plan. planned_memory, memory: bytes of parameters, of
            gradients and of optimizer state, by the plan and as they are.
        losses: of the steps between.
        changed: parameters and optimizer state that differ in a bit from those of the same steps without an engine.
        elastic: share of the parameters' bytes whose memory comes and goes page by page.
        offloaded: share of the training bytes that were off the device while vLLM generated.
    """

    different: list[str] = field(default_factory=list)
    num_compared: int = 0
    received: int = 0
    least: int = 0
    misplaced: list[str] = field(default_factory=list)
    planned: int = 0
    planned_memory: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    losses: list[float] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    elastic: float = 0.0
    offloaded: float = 0.0


def run_cases(directory: str, cases: list[Case]) -> dict[str, Switched]:
    """Each case in turn, in one job."""
    with closing(Job.join(120)) as job:
        return {case.name: _run(job, Path(directory) / str(number), case) for number, case in enumerate(cases)}


def _run(job: Job, path: Path, case: Case) -> Switched:
    if job.rank == 0:
        write_config(path, served_config(case.family, torch_dtype=case.dtype, **case.model))
    job.agreement.conclude("writing the config")
    values = {
        "model": str(path),
        "random_weights": True,
        "actor_config": {"params_dtype": "float32", "seq_length": 64},
        "generate_config": {
            **{"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, "timeout_seconds": job.timeout_seconds},
            **case.infer,
            **_narrower(case.dtype),
        },
    }
    config = load_config(values, job.world_size)
    table = table_for(read_config(path))
    model, optimizer = _sharded(path, case)
    trainer = ShardedModel(model, table, job.rank, [optimizer])
    plan = None if case.tensor_parallel else _plan(config, case, job)  # before any rank writes the model's directory
    side = gather_side(job, trainer.weights)
    inference = build_inference_engine(config, table, side, job)
    engine = HybridEngine.from_parts(parts_with_engine(trainer, inference, config, training_side=side))
    found = Switched()
    if plan is not None:
        state = plan.memory.state
        found.misplaced = differences(plan.source.layout_of(job.rank), side.of_rank(job.rank))
        found.planned = int(plan.bytes.received[job.rank])
        found.planned_memory = tuple(int(each[job.rank]) for each in (state.params, state.grads, state.optimizer))
    try:
        for step in range(case.num_steps):
            with engine.train_context():
                sharded_models.save(model, path, getattr(torch, case.dtype))
            _compare(engine, path, found)
            with engine.train_context():
                found.losses.append(_train(model, optimizer, step, case.data_of(job.rank)))
        found.elastic = _elastic_share(trainer)
        found.memory = tuple(_nbytes(trainer, kind) for kind in ("param", "grad", "optimizer"))
        found.changed = _differences(model, optimizer, *_trained_alone(path, case, job.rank))
    finally:
        engine.sharding.close()
        inference.shutdown()
    return found


def _plan(config: HybridConfig, case: Case, job: Job) -> JobPlan:
    """What the command line would say of this job; ranks of one host."""
    actor = ActorConfig(params_dtype="float32", fsdp=FsdpConfig(replicas=case.replicas))
    return plan_job(
        config.model_copy(update={"actor_config": actor}), job.world_size, Cluster(ranks_per_host=job.world_size)
    )


def _nbytes(trainer: ShardedModel, kind: str) -> int:
    """Of a kind of state; memory that several tensors share counts once."""
    storages = {
        item.tensor.untyped_storage().data_ptr(): item.tensor.untyped_storage().nbytes()
        for item in trainer.offload_items()
        if item.kind == kind
    }
    return sum(storages.values())


def _sharded(path: Path, case: Case) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    whole = sharded_models.from_config(path)
    if case.tensor_parallel:
        model = sharded_models.shard_over_tensor_parallel(whole)
    else:
        model = sharded_models.shard(whole, case.replicas, **case.shard)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _trained_alone(path: Path, case: Case, rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same steps without an engine."""
    model, optimizer = _sharded(path, case)
    for step in range(case.num_steps):
        _train(model, optimizer, step, case.data_of(rank))
    return model, optimizer


def _differences(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    other_model: torch.nn.Module,
    other_optimizer: torch.optim.Optimizer,
) -> list[str]:
    """Names of what differs on this rank between two models and their optimizers."""
    one, other = (_state(*pair) for pair in ((model, optimizer), (other_model, other_optimizer)))
    assert len(one) > 2 * len(list(model.parameters()))
    return [name for name in sorted(one | other) if not same_bits(one.get(name), other.get(name))]


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {name: local_of(tensor) for name, tensor in model.state_dict().items()}
    for parameter, values in optimizer.state.items():
        state |= {f"{key} of {names[parameter]}": local_of(value) for key, value in values.items()}
    return state


def _elastic_share(trainer: ShardedModel) -> float:
    sizes = {name: flat.nbytes for name, flat in trainer.weights.buffers().items()}
    elastic = [name for name, flat in trainer.weights.buffers().items() if exported_buffer_of(flat) is not None]
    return sum(sizes[name] for name in elastic) / sum(sizes.values())


def _narrower(dtype: str) -> dict[str, Any]:
    return {} if dtype == "float32" else {"compress_reshard": True, "compression_dtype": dtype}


def _compare(engine: HybridEngine[ShardedModel], path: Path, found: Switched) -> None:
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        seen[name] = tensor.detach().clone()

    before = _resident(engine)
    with engine.inference.adaptor.observed(keep), engine.rollout_context():
        found.offloaded = 1 - _resident(engine) / before
        native = native_parameters(engine.inference, str(path))
    found.different += [name for name in sorted({*seen, *native}) if not same_bits(seen.get(name), native.get(name))]
    found.num_compared += len(native)
    report = engine.sharding.last_report
    assert report is not None
    found.received, found.least = report.bytes_received, report.bytes_least


def _resident(engine: HybridEngine[ShardedModel]) -> int:
    """Bytes of training state on the device."""
    return sum(sum(owners.values()) for owners in engine.sharding.offloader.resident_nbytes().values())


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, data: int) -> float:
    vocab_size = model.get_input_embeddings().num_embeddings
    batch = token_batch(100 * step + data, num_sequences=2, length=16)
    tokens, labels = batch["tokens"] % vocab_size, batch["labels"] % vocab_size
    loss = -label_log_probs(model(tokens).logits, labels).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


TP2 = {"infer_tensor_parallel_size": 2}
PP2 = {"infer_pipeline_parallel_size": 2}
TP2_EP2 = {**TP2, "infer_expert_parallel_size": 2}
DP2_EP2 = {"infer_data_parallel_size": 2, "infer_expert_parallel_size": 2}
BF16 = {"dtype": "bfloat16"}
CASES = {
    2: [
        Case("llama tied", num_steps=5),
        Case("qwen2 tied", infer=TP2, **BF16),
        Case("gemma2", infer=TP2, shard={"reshard_after_forward": False}),
        Case("gpt2", infer=PP2),
        Case("qwen3_moe", infer=TP2_EP2),
        Case("mixtral", infer=DP2_EP2, **BF16),
        Case("deepseek_v3", infer=TP2),
    ],
    3: [Case("qwen3"), Case("qwen3_moe", **BF16)],  # neither the vocabulary nor the experts split evenly
    4: [
        Case("llama", replicas=2, infer=TP2, num_steps=5, shard={"reshard_after_forward": False}),
        Case("qwen3_moe", infer={**TP2, "infer_expert_parallel_size": 4}),
        Case("deepseek_v3", replicas=2, infer={**TP2, **PP2}, **BF16),
        Case("llama", tensor_parallel=True, infer=TP2),
    ],
}
ALL = [pytest.param(num_ranks, case, id=case.name) for num_ranks, cases in CASES.items() for case in cases]
PLANNED = [each for each in ALL if not each.values[1].tensor_parallel]  # the command line knows no meshes of users'

Runs = Callable[[int], Outcomes]
"""Number of ranks -> under "cases", by rank, what became of each."""


@pytest.fixture(scope="module")
def runs(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = str(tmp_path_factory.mktemp("fsdp"))

    @functools.cache
    def launched(num_ranks: int) -> Outcomes:
        return engines.launch_in_turn(num_ranks, {"cases": (run_cases, (directory, CASES[num_ranks]))})

    return launched


@pytest.fixture
def by_rank(runs: Runs, num_ranks: int, case: Case) -> list[Switched]:
    return [switched[case.name] for switched in runs(num_ranks)["cases"]]


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_vllm_has_the_bits_of_its_own_load(by_rank: list[Switched], case: Case) -> None:
    for switched in by_rank:
        assert switched.different == []
        assert switched.num_compared > 5 * case.num_steps


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_the_fewest_bytes_are_sent(by_rank: list[Switched]) -> None:
    assert sum(switched.received for switched in by_rank) == sum(switched.least for switched in by_rank) > 0


@pytest.mark.parametrize(("num_ranks", "case"), PLANNED)
def test_the_plan_of_the_command_line_is_the_one_that_runs(by_rank: list[Switched]) -> None:
    for switched in by_rank:
        assert switched.misplaced == []
        assert switched.received == switched.planned
        if switched.elastic > 0.99:  # FSDP2 pads other parts, which shows in such small models
            assert switched.memory == pytest.approx(switched.planned_memory, rel=0.02)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_training_is_as_without_switches(by_rank: list[Switched], case: Case) -> None:
    for switched in by_rank:
        assert switched.changed == []
        assert len(set(switched.losses)) == case.num_steps


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_everything_leaves_the_device_while_vllm_generates(by_rank: list[Switched], num_ranks: int) -> None:
    for switched in by_rank:
        assert switched.offloaded > 0.99
        assert switched.elastic > 0.99 or num_ranks > 2  # all of these models' tensors split evenly over 2 ranks
