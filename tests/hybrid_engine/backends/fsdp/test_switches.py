"""FSDP2 -> vLLM, bitwise: families, layouts and casts over several switches with training."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ReshardReport
from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.config import ActorConfig, FsdpConfig, HybridConfig, load_config
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import differences
from hybrid_engine.switch.setup import gather_side
from hybrid_engine.tools.plan.cluster_plan import Cluster, JobPlan, plan_job
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm import support
from tests.zoo import sharded_models
from tests.zoo.families import read_config, served_config, write_config
from tests.zoo.tiny_models import label_log_probs, token_batch


@dataclass(frozen=True)
class Case:
    """A model, its sharding and vLLM's layout.

    Attributes:
        family: name in the zoo.
        replicas: of the sharded model; the other ranks of the job shard it.
        infer: parallel sizes of vLLM, as in `generate_config`.
        dtype: of vLLM's computation.
        model: changes of config.json.
        shard: options of `fully_shard`.
        num_steps: training steps, with a switch to vLLM and back before each.
        tensor_parallel: whether matrices are split over two ranks before FSDP2 shards them.
    """

    family: str
    replicas: int = 1
    infer: Values = field(default_factory=dict)
    dtype: str = "float32"
    model: Values = field(default_factory=dict)
    shard: Values = field(default_factory=dict)
    num_steps: int = 2
    tensor_parallel: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{key.removeprefix('infer_').partition('_')[0]} {n}" for key, n in self.infer.items())
        train = "tensor parallel" if self.tensor_parallel else f"{self.replicas} replicas"
        return f"{self.family}, {train} -> {sizes or 'dp'}, {self.dtype}"

    def data_of(self, rank: int) -> int:
        """Return the seed of the sequences that `rank` trains on."""
        return rank // 2 if self.tensor_parallel else rank


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


@on_engines(CASES)
def test_switches(tmp_path: Path, case: Case) -> None:
    """Train and switch. test_odd_models.py and end_to_end/ compare training with that of a model alone."""
    with closing(Job.join(120)) as job:
        check_switches(job, tmp_path, case)


def check_switches(job: Job, path: Path, case: Case) -> None:
    if job.rank == 0:
        write_config(path, served_config(case.family, torch_dtype=case.dtype, **case.model))
    job.agreement.conclude("writing the config")  # other ranks read it next
    values = {
        "model": str(path),
        "random_weights": True,
        "actor_config": {"params_dtype": "float32", "seq_length": 64},
        "generate_config": {
            **{"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, "timeout_seconds": job.timeout_seconds},
            **case.infer,
            **_compression(case.dtype),
        },
    }
    config = load_config(values, job.world_size)
    table = table_for(read_config(path))
    model, optimizer = _sharded(path, case)
    trainer = ShardedModel(model, table, job.rank, [optimizer])
    # The plan reads the model's directory, so it comes before any rank writes to it. The command
    # line cannot plan for meshes made by users.
    plan = None if case.tensor_parallel else _plan(config, case, job)
    side = gather_side(job, trainer.weights)
    with ExitStack() as ends:
        with job.agreement.building():
            engine = HybridEngine.beside(trainer, config, table, job, ends)
        for step in range(case.num_steps):
            with engine.train_context():
                sharded_models.save(model, path, getattr(torch, case.dtype))  # for vLLM's own load
            report = _switch(engine, path)
            with engine.train_context():
                train(model, optimizer, step, case.data_of(job.rank))
        received = job.agreement.total(report.bytes_received)
        assert received == job.agreement.total(report.bytes_least) > 0
        is_even = _elastic_share(trainer) > 0.99
        assert is_even or job.world_size > 2  # over two ranks all tensors of these models split evenly
        if plan is not None:
            assert differences(plan.source.layout_of(job.rank), side.of_rank(job.rank)) == []
            assert report.bytes_received == int(plan.bytes.received[job.rank])
            if is_even:  # FSDP2's padding of uneven parts counts in such small models
                state = plan.memory.state
                planned = [nbytes[job.rank] for nbytes in (state.params, state.grads, state.optimizer)]
                memory = [_nbytes(trainer, kind) for kind in ("param", "grad", "optimizer")]
                assert memory == pytest.approx(planned, rel=0.02)


def _plan(config: HybridConfig, case: Case, job: Job) -> JobPlan:
    """Return the plan of the command line for this job, with all ranks on one host."""
    actor = ActorConfig(params_dtype="float32", fsdp=FsdpConfig(replicas=case.replicas))
    return plan_job(
        config.model_copy(update={"actor_config": actor}), job.world_size, Cluster(ranks_per_host=job.world_size)
    )


def _nbytes(trainer: ShardedModel, kind: str) -> int:
    """Return the bytes of one kind of state; memory shared by tensors counts once."""
    # Items may share storage; its address identifies it.
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


def _elastic_share(trainer: ShardedModel) -> float:
    sizes = {name: flat.nbytes for name, flat in trainer.weights.buffers().items()}
    elastic = [name for name, flat in trainer.weights.buffers().items() if exported_buffer_of(flat) is not None]
    return sum(sizes[name] for name in elastic) / sum(sizes.values())


def _compression(dtype: str) -> Values:
    return {} if dtype == "float32" else {"compress_reshard": True, "compression_dtype": dtype}


def _switch(engine: HybridEngine, path: Path) -> ReshardReport:
    """Compare vLLM's parameters with its own load; check that training state is offloaded."""
    parameters: TensorDict = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        parameters[name] = tensor.detach().clone()

    before = _resident(engine)  # all training state is on the device
    with engine.inference.adaptor.observed(keep), engine.rollout_context():
        assert _resident(engine) < 0.01 * before
        native = native_parameters(engine.inference, str(path))
    assert support.differences(parameters, native) == []
    assert len(native) > 5
    assert engine.sharding.last_report is not None
    return engine.sharding.last_report


def _resident(engine: HybridEngine) -> int:
    """Return the bytes of training state on the device."""
    return sum(sum(owners.values()) for owners in engine.sharding.offloader.resident_nbytes().values())


def train(model: Any, optimizer: torch.optim.Optimizer, step: int, data: int) -> None:
    batch = token_batch(100 * step + data, num_sequences=2, length=16)
    tokens = batch["tokens"] % model.config.vocab_size
    labels = batch["labels"] % model.config.vocab_size
    loss = -label_log_probs(model(input_ids=tokens).logits, labels).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
