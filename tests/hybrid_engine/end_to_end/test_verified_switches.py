"""Faults between training and vLLM are detected in the switch, reported and rolled back.

Two ranks, FSDP2 -> vLLM's TP 2, a model with experts: real transports, real vLLM. Each fault is on
one rank and reported on all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine, Sampling
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import ComputationError, HybridEngineError
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.switch.states import State
from tests.harness.launch import Ranks
from tests.zoo import sharded_models
from tests.zoo.families import served_config, write_config

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
NORM = "model.norm"


@dataclass
class Outcome:
    """Observations of a fault on one rank.

    Attributes:
        error: class and text of the error that the switch raised.
        state: of the engine afterwards.
        is_unchanged: whether training state is bitwise equal.
        tensors: of the bucket that was skipped.
        goes_on: whether the next switch verifies everything and vLLM generates.
    """

    error: str = ""
    state: str = ""
    is_unchanged: bool = False
    tensors: list[str] = field(default_factory=list)
    goes_on: bool = False


def inject(directory: str) -> dict[str, Outcome]:
    """Inject every fault in turn, after a training step each."""
    dist.init_process_group("gloo")
    model = sharded_models.shard(sharded_models.from_config(Path(directory)))
    engine = HybridEngine(
        model=model,
        rollout_config={
            **{
                "model": directory,
                "max_model_len": 64,
                "max_num_seqs": 8,
                "kv_cache_mb": 16,
                "tp_size": 2,
                "bucket_mb": 1,
            },
            **{"verify": "full", "check_compute": "always"},
            "release_weights": False,  # old values stay in place
        },
        compress_reshard=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outcomes = {}
    with engine.rollout_context():
        engine.generate([[5, 6, 7]], GREEDY)
    for name, fault in FAULTS.items():
        outcomes[name] = outcome = Outcome()
        with engine.train_context():
            model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before = _training_digests(model, optimizer)
        try:
            with fault(engine, outcome), engine.rollout_context():
                pass
        except HybridEngineError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.state = engine.sharding.state.value
        outcome.is_unchanged = _training_digests(model, optimizer) == before
        with engine.rollout_context():
            report = engine.sharding.last_report
            planned = [name for bucket in engine.sharding.plan.buckets for name in bucket.tensors]
            is_verified = report is not None and report.tensors_verified == len(planned)
            outcome.goes_on = is_verified and len(engine.generate([[5, 6, 7]], GREEDY)[0][0].token_ids) == 4
    engine.shutdown()
    outcomes["layers"] = Outcome(error=refused_layers(Path(directory)))
    return outcomes


def refused_layers(directory: Path) -> str:
    """Return the error of a model with another scale in one layer than in its config."""
    config = served_config("llama", torch_dtype="float32")
    model = sharded_models.from_config(write_config(directory / str(dist.get_rank()), config))
    model.model.layers[1].self_attn.scaling *= 2
    settings = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, "infer_tensor_parallel_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid_engine.backends.fsdp.model_checks.require_configured", lambda model: None)
        engine = HybridEngine(model=sharded_models.shard(model), rollout_config=settings)
    with pytest.raises(ComputationError) as caught:
        engine.sharding.enter(State.INFER)
    engine.shutdown()
    return str(caught.value)


def _training_digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return [box_digest(local_of(tensor)) for tensor in tensors]


@contextmanager
def _wrapped_transports(engine: Any, wrap: Callable[[Any], Callable[..., None]]) -> Iterator[None]:
    """Replace each transport's `run` by the result of `wrap`."""
    transports = list(engine.sharding.router._transports.values())
    for transport in transports:
        transport.run = wrap(transport)
    try:
        yield
    finally:
        for transport in transports:
            del transport.run


@contextmanager
def flipped_bit(engine: Any, outcome: Outcome) -> Iterator[None]:
    """Flip a bit of the first element that rank 1 receives from rank 0."""
    rank = dist.get_rank()
    flipped = []

    def wrap(transport: Any) -> Callable[..., None]:
        run = transport.run

        def flip(bucket: int, transfers: Any, source: Any, destination: Any) -> None:
            run(bucket, transfers, source, destination)
            received = [transfer for transfer in transfers if transfer.dst_rank == rank != transfer.src_rank]
            if rank == 1 and received and not flipped:
                place = received[0].dst
                flipped.append(place)
                destination[place.buffer.name][place.offset : place.offset + 1].view(torch.int16).bitwise_xor_(1)

        return flip

    with _wrapped_transports(engine, wrap):
        yield


@contextmanager
def stale_bucket(engine: Any, outcome: Outcome) -> Iterator[None]:
    """Skip the transfers of the last bucket to rank 0."""
    last = engine.sharding.plan.buckets[-1]
    outcome.tensors = list(last.tensors)

    def wrap(transport: Any) -> Callable[..., None]:
        run = transport.run

        def skip(bucket: int, transfers: Any, source: Any, destination: Any) -> None:
            if dist.get_rank() == 1 or bucket != last.index or transport.name == "collective":
                run(bucket, transfers, source, destination)

        return skip

    with _wrapped_transports(engine, wrap):
        yield


@contextmanager
def live_weight(engine: Any, outcome: Outcome) -> Iterator[None]:
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
def other_setting(engine: Any, outcome: Outcome) -> Iterator[None]:
    """Normalise with another epsilon in training than config.json has; every bit arrives."""
    model = engine.train.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.norm, "variance_epsilon", 10.0)
        patch.setattr(model.config, "rms_norm_eps", 10.0)
        yield


FAULTS: dict[str, Callable[[Any, Outcome], Any]] = {
    "flipped bit": flipped_bit,
    "stale bucket": stale_bucket,
    "live weight": live_weight,
    "other setting": other_setting,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = served_config("qwen3_moe", torch_dtype="bfloat16", vocab_size=16384)  # several buckets
    return write_config(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, directory: Path) -> list[dict[str, Outcome]]:
    return engines.launch(inject, 2, str(directory))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rolled_back_and_the_next_switch_works(outcomes: list[dict[str, Outcome]], fault: str) -> None:
    for by_fault in outcomes:
        assert by_fault[fault].error
        assert by_fault[fault].state == "train"
        assert by_fault[fault].is_unchanged
        assert by_fault[fault].goes_on


def _lines(outcome: Outcome) -> list[str]:
    return [line.strip(" -") for line in outcome.error.splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize("fault", ["flipped bit", "live weight"])
def test_one_place_is_reported_on_all_ranks(outcomes: list[dict[str, Outcome]], fault: str) -> None:
    assert [by_fault[fault].error.partition(":")[0] for by_fault in outcomes] == ["RemoteError", "WeightError"]
    first, second = (_lines(by_fault[fault]) for by_fault in outcomes)
    assert first == second
    assert len(first) == 1
    assert "rank 1" in first[0]


def test_a_flipped_bit_is_reported_with_tensor_region_and_ranks(outcomes: list[dict[str, Outcome]]) -> None:
    (line,) = _lines(outcomes[0]["flipped bit"])
    tensor, _, rest = line.partition("[")
    assert tensor.startswith(("model.", "lm_head"))
    box, _, rest = rest.partition("]: ")
    assert all(len(bounds.split(":")) == 2 for bounds in box.split(", "))
    assert rest.endswith(" of rank 1 differs from the training weights of rank 0")


def test_a_stale_bucket_is_reported_with_all_its_tensors(outcomes: list[dict[str, Outcome]]) -> None:
    outcome = outcomes[0]["stale bucket"]
    assert {line.partition("[")[0] for line in _lines(outcome)} == set(outcome.tensors)
    assert outcome.error.startswith("WeightError")
    assert outcomes[1]["stale bucket"].error.startswith("RemoteError")


def test_a_changed_live_weight_is_reported(outcomes: list[dict[str, Outcome]]) -> None:
    (line,) = _lines(outcomes[0]["live weight"])
    assert line == f"{NORM}.weight: on rank 1, vLLM's weights changed after they were committed"


def test_another_setting_is_reported_with_both_values(outcomes: list[dict[str, Outcome]]) -> None:
    for by_fault in outcomes:
        error = by_fault["other setting"].error
        assert error.startswith("ComputationError: vLLM does not compute what the trainer computes: log-prob")
        assert re.search(r"sequence \d, -\d+\.\d{4} by the trainer and -\d+\.\d{4} by vLLM", error)
        assert "rms_norm_eps is 10.0 for the trainer and 1e-06 for vLLM" in error


def test_another_layer_is_reported_before_the_first_switch(outcomes: list[dict[str, Outcome]]) -> None:
    for by_fault in outcomes:
        scale = "the scale of attention scores is 0.353553 for the trainer and 0.176777 for vLLM"
        assert f"Settings that differ: in layer 1, {scale}" in by_fault["layers"].error
