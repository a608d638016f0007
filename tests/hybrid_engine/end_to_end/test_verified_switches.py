"""Faults between training and vLLM are detected in the switch, reported and rolled back.

Two ranks, FSDP2 -> vLLM's TP 2, a model with experts: real transports, real vLLM. Each fault is on
one rank and reported on all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine, Sampling
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import ComputationError, HybridEngineError, RemoteError, WeightError
from hybrid_engine.planning.plan import Bucket, Costs
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.switch.states import State
from hybrid_engine.transports.pull import PullTransport
from tests.harness.launch import on_engines
from tests.zoo import sharded_models
from tests.zoo.families import served_config, write_config

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
NORM = "model.norm"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = served_config("qwen3_moe", torch_dtype="bfloat16", vocab_size=16384)  # several buckets
    return write_config(tmp_path_factory.mktemp("model"), config)


def _training_digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    tensors = [
        *model.parameters(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    return [box_digest(local_of(tensor)) for tensor in tensors]


@contextmanager
def flipped_bit(engine: Any) -> Iterator[None]:
    """Flip a bit of the first element that rank 1 receives from rank 0."""
    rank = dist.get_rank()
    run = engine.sharding.router.run
    flipped = []

    def flip(bucket: Bucket, source: Any, destination: Any, following: Any) -> Costs:
        costs = run(bucket, source, destination, following)
        received = [
            transfer
            for transfer in bucket.transfers
            if transfer.dst_rank == rank != transfer.src_rank
        ]
        if rank == 1 and received and not flipped:
            place = received[0].dst
            flipped.append(place)
            destination[place.buffer.name][place.offset : place.offset + 1].view(
                torch.int16
            ).bitwise_xor_(1)
        return costs

    with mock.patch.object(engine.sharding.router, "run", flip):
        yield


@contextmanager
def stale_bucket(engine: Any) -> Iterator[None]:
    """Skip the transfers of the last bucket to rank 0."""
    last = engine.sharding.plan.buckets[-1]
    run = PullTransport.run

    def skip(transport: PullTransport, bucket: int, *arguments: Any) -> None:
        if dist.get_rank() == 1 or bucket != last.index:
            run(transport, bucket, *arguments)

    with mock.patch.object(PullTransport, "run", skip):
        yield


@contextmanager
def live_weight(engine: Any) -> Iterator[None]:
    """Flip a bit of the final norm of rank 1 after its commit."""
    adaptor = engine.inference.adaptor
    finish = adaptor.finish_fill
    norm = adaptor.model.get_submodule(NORM)

    def flip() -> None:
        finish()
        if dist.get_rank() == 1:
            norm.weight.data[:1].view(torch.int16).bitwise_xor_(1)

    adaptor.finish_fill = flip
    try:
        yield
    finally:
        del adaptor.finish_fill


@contextmanager
def other_setting(engine: Any) -> Iterator[None]:
    """Normalise with another epsilon in training than config.json has; every bit arrives."""
    model = engine.train.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.norm, "variance_epsilon", 10.0)
        patch.setattr(model.config, "rms_norm_eps", 10.0)
        yield


def lines_of(error: HybridEngineError, at_fault: int) -> list[str]:
    """Return the findings of an error that only rank `at_fault` raises itself."""
    assert type(error) is (WeightError if dist.get_rank() == at_fault else RemoteError), repr(error)
    return [line.strip(" -") for line in str(error).splitlines() if line.startswith("  - ")]


def check_flipped_bit(engine: Any, error: HybridEngineError) -> None:
    (line,) = lines_of(error, 1)
    region = r"(model\.|lm_head)[^\[]*\[[^:]+:[^:]+(, [^:]+:[^:]+)*\]"
    assert re.fullmatch(
        rf"{region}: .* of rank 1 differs from the training weights of rank 0", line
    )


def check_stale_bucket(engine: Any, error: HybridEngineError) -> None:
    lines = lines_of(error, 0)
    assert {line.partition("[")[0] for line in lines} == set(
        engine.sharding.plan.buckets[-1].tensors
    )


def check_live_weight(engine: Any, error: HybridEngineError) -> None:
    expected = f"{NORM}.weight: on rank 1, vLLM's weights changed after they were committed"
    assert lines_of(error, 1) == [expected]


def check_other_setting(engine: Any, error: HybridEngineError) -> None:
    assert type(error) is ComputationError
    text = str(error)
    assert text.startswith("vLLM does not compute what the trainer computes: log-prob")
    assert re.search(r"sequence \d, -\d+\.\d{4} by the trainer and -\d+\.\d{4} by vLLM", text)
    assert "rms_norm_eps is 10.0 for the trainer and 1e-06 for vLLM" in text


# A fault, and the check of its error on every rank.
FAULTS: list[tuple[Callable[[Any], Any], Callable[[Any, HybridEngineError], None]]] = [
    (flipped_bit, check_flipped_bit),
    (stale_bucket, check_stale_bucket),
    (live_weight, check_live_weight),
    (other_setting, check_other_setting),
]


@on_engines(2)
def test_a_fault_is_reported_and_rolled_back_and_the_next_switch_works(directory: Path) -> None:
    """A training step precedes every fault."""
    dist.init_process_group("gloo")
    model = sharded_models.shard(sharded_models.from_config(directory))
    rollout_config = {
        **{"model": str(directory), "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16},
        **{"tp_size": 2, "bucket_mb": 1, "verify": "full", "check_compute": "always"},
        "release_weights": False,  # old values stay in place
    }
    engine = HybridEngine(model=model, rollout_config=rollout_config, compress_reshard=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with engine.rollout_context():
        engine.generate([[5, 6, 7]], GREEDY)
    for fault, check in FAULTS:
        with engine.train_context():
            model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before = _training_digests(model, optimizer)
        with pytest.raises(HybridEngineError) as caught, fault(engine), engine.rollout_context():
            pass
        check(engine, caught.value)
        assert engine.sharding.state is State.TRAIN
        assert _training_digests(model, optimizer) == before
        with engine.rollout_context():
            planned = [name for bucket in engine.sharding.plan.buckets for name in bucket.tensors]
            assert engine.sharding.last_report.tensors_verified == len(planned)
            assert len(engine.generate([[5, 6, 7]], GREEDY)[0][0].token_ids) == 4
    engine.shutdown()


@on_engines(2)
def test_another_layer_is_reported_before_the_first_switch(tmp_path: Path) -> None:
    """A layer has another scale than in the model's config."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = served_config("llama", torch_dtype="float32")
    model = sharded_models.from_config(write_config(tmp_path / str(dist.get_rank()), config))
    model.model.layers[1].self_attn.scaling *= 2
    settings = {
        "max_model_len": 64,
        "max_num_seqs": 8,
        "kv_cache_mb": 16,
        "infer_tensor_parallel_size": 2,
    }
    with mock.patch("hybrid_engine.backends.fsdp.model_checks.require_configured"):
        engine = HybridEngine(model=sharded_models.shard(model), rollout_config=settings)
    scale = r"the scale of attention scores is 0\.353553 for the trainer and 0\.176777 for vLLM"
    with pytest.raises(ComputationError, match=f"Settings that differ: in layer 1, {scale}"):
        engine.sharding.enter(State.INFER)
    engine.shutdown()
