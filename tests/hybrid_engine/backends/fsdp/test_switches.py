"""FSDP2 -> vLLM: bytes of switches and state in memory are the planned ones.

Weights are compared with vLLM's own load in test_derived_models.py and the matrix (tools/verify),
their places in test_odd_models.py, which trains with and without switches as end_to_end/ does.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.fsdp import ShardedModel
from hybrid_engine.config import ActorConfig, FsdpConfig, HybridConfig, load_config
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import differences
from hybrid_engine.switch.setup import gather_side
from hybrid_engine.tools.plan.cluster_plan import Cluster, JobPlan, plan_job
from tests.harness.launch import on_engines
from tests.harness.values import Values
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
    """

    family: str
    replicas: int = 1
    infer: Values = field(default_factory=dict)
    dtype: str = "float32"

    def __str__(self) -> str:
        sizes = " ".join(
            f"{key.removeprefix('infer_').partition('_')[0]} {n}" for key, n in self.infer.items()
        )
        return f"{self.family}, {self.replicas} replicas -> {sizes or 'dp'}, {self.dtype}"


TP2 = {"infer_tensor_parallel_size": 2}
PP2 = {"infer_pipeline_parallel_size": 2}
TP2_EP2 = {**TP2, "infer_expert_parallel_size": 2}
BF16 = {"dtype": "bfloat16"}
CASES = {
    2: [
        Case("llama tied"),
        Case("qwen2 tied", infer=TP2, **BF16),
        Case("gpt2", infer=PP2),
        Case("qwen3_moe", infer=TP2_EP2),
        Case("deepseek_v3", infer=TP2),
    ],
    3: [
        Case("qwen3"),
        Case("qwen3_moe", **BF16),
    ],  # neither the vocabulary nor the experts split evenly
    4: [
        Case("llama", replicas=2, infer=TP2),
        Case("deepseek_v3", replicas=2, infer={**TP2, **PP2}, **BF16),
    ],
}


@on_engines(CASES)
def test_switches(tmp_path: Path, case: Case) -> None:
    with closing(Job.join(120)) as job, ExitStack() as ends:
        if job.rank == 0:
            write_config(tmp_path, served_config(case.family, torch_dtype=case.dtype))
        job.agreement.conclude("writing the config")  # other ranks read it next
        values = {
            "model": str(tmp_path),
            "random_weights": True,
            "actor_config": {"params_dtype": "float32", "seq_length": 64},
            "generate_config": {
                **{
                    "max_model_len": 64,
                    "max_num_seqs": 8,
                    "kv_cache_mb": 16,
                    "timeout_seconds": job.timeout_seconds,
                },
                **case.infer,
                **_compression(case.dtype),
            },
        }
        config = load_config(values, job.world_size)
        table = table_for(read_config(tmp_path))
        model = sharded_models.shard(sharded_models.from_config(tmp_path), case.replicas)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = ShardedModel(model, table, job.rank, [optimizer])
        plan = _plan(config, case, job)
        side = gather_side(job, trainer.weights)
        with job.agreement.building():
            engine = HybridEngine.beside(trainer, config, table, job, ends)
        with engine.rollout_context():
            pass
        report = engine.sharding.last_report
        assert report is not None
        with engine.train_context():
            train(model, optimizer, 0, job.rank)
        assert report.bytes_received == int(plan.bytes.received[job.rank])
        assert (
            job.agreement.total(report.bytes_received)
            == job.agreement.total(report.bytes_least)
            > 0
        )
        assert differences(plan.source.layout_of(job.rank), side.of_rank(job.rank)) == []
        is_even = _elastic_share(trainer) > 0.99
        assert (
            is_even or job.world_size > 2
        )  # over two ranks all tensors of these models split evenly
        if is_even:  # FSDP2's padding of uneven parts counts in such small models
            state = plan.memory.state
            planned = [nbytes[job.rank] for nbytes in (state.params, state.grads, state.optimizer)]
            memory = [_nbytes(trainer, kind) for kind in ("param", "grad", "optimizer")]
            assert memory == pytest.approx(planned, rel=0.02)


def _plan(config: HybridConfig, case: Case, job: Job) -> JobPlan:
    """Return the plan of the command line for this job, with all ranks on one host."""
    actor = ActorConfig(params_dtype="float32", fsdp=FsdpConfig(replicas=case.replicas))
    return plan_job(
        config.model_copy(update={"actor_config": actor}),
        job.world_size,
        Cluster(ranks_per_host=job.world_size),
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


def _elastic_share(trainer: ShardedModel) -> float:
    sizes = {name: flat.nbytes for name, flat in trainer.weights.buffers().items()}
    elastic = [
        name
        for name, flat in trainer.weights.buffers().items()
        if exported_buffer_of(flat) is not None
    ]
    return sum(sizes[name] for name in elastic) / sum(sizes.values())


def _compression(dtype: str) -> Values:
    return {} if dtype == "float32" else {"compress_reshard": True, "compression_dtype": dtype}


def train(model: Any, optimizer: torch.optim.Optimizer, step: int, data: int) -> None:
    batch = token_batch(100 * step + data, num_sequences=2, length=16)
    tokens = batch["tokens"] % model.config.vocab_size
    labels = batch["labels"] % model.config.vocab_size
    loss = -label_log_probs(model(input_ids=tokens).logits, labels).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
