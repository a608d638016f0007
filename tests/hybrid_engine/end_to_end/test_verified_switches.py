"""Faults between training and what vLLM holds are found inside the switch, named on all ranks, and rolled back; all of
it is in the trace.

Two ranks, FSDP2 -> vLLM's TP 2, a model with experts: real transports, real vLLM. Each fault is on one rank.
"""

from __future__ import annotations

import json
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
from hybrid_engine.tracing import path_of_rank
from tests.harness.launch import Ranks
from tests.zoo import sharded_models
from tests.zoo.families import served_config, write_config

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
NORM = "model.norm"


@dataclass
class Seen:
    """What one rank saw of one fault.

    Attributes:
        error: text of what the switch raised, with the name of its class before it.
        state: of the engine afterwards.
        is_unchanged: training state, bit by bit.
        tensors: those of the bucket that was left out.
        goes_on: the next switch, without the fault, verifies everything, and vLLM generates.
    """

    error: str = ""
    state: str = ""
    is_unchanged: bool = False
    tensors: list[str] = field(default_factory=list)
    goes_on: bool = False


def inject(directory: str) -> dict[str, Seen]:
    """Every fault in turn, a training step before each."""
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
            **{"verify": "full", "check_compute": "always", "trace": str(Path(directory) / "trace.json")},
            "release_weights": False,  # old values stay where they are
        },
        compress_reshard=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    with engine.rollout_context():
        engine.generate([[5, 6, 7]], GREEDY)
    for name, fault in FAULTS.items():
        found[name] = seen = Seen()
        with engine.train_context():
            model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before = _training_digests(model, optimizer)
        try:
            with fault(engine, seen), engine.rollout_context():
                pass
        except HybridEngineError as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.state = engine.sharding.state.value
        seen.is_unchanged = _training_digests(model, optimizer) == before
        with engine.rollout_context():
            report = engine.sharding.last_report
            planned = [name for bucket in engine.sharding.plan.buckets for name in bucket.tensors]
            is_verified = report is not None and report.tensors_verified == len(planned)
            seen.goes_on = is_verified and len(engine.generate([[5, 6, 7]], GREEDY)[0][0].token_ids) == 4
    engine.shutdown()
    found["layers"] = Seen(error=refused_layers(Path(directory)))
    return found


def refused_layers(directory: Path) -> str:
    """Of a model in which the scale of one layer is not what its config says, and nothing else looks."""
    config = served_config("llama", torch_dtype="float32")
    model = sharded_models.from_config(write_config(directory / str(dist.get_rank()), config))
    model.model.layers[1].self_attn.scaling *= 2
    settings = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, "infer_tensor_parallel_size": 2}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ComputationError) as caught:
        patch.setattr("hybrid_engine.backends.fsdp.model_checks.require_configured", lambda model: None)
        HybridEngine(model=sharded_models.shard(model), rollout_config=settings)
    return str(caught.value)


def _training_digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return [box_digest(local_of(tensor)) for tensor in tensors]


@contextmanager
def _wrapped_transports(engine: Any, wrap: Callable[[Any], Callable[..., None]]) -> Iterator[None]:
    """Each transport's `run` replaced by what `wrap` makes of it."""
    transports = list(engine.sharding.router._transports.values())
    for transport in transports:
        transport.run = wrap(transport)
    try:
        yield
    finally:
        for transport in transports:
            del transport.run


@contextmanager
def flipped_bit(engine: Any, seen: Seen) -> Iterator[None]:
    """In the first of what rank 1 gets from rank 0."""
    rank, flipped = dist.get_rank(), []

    def wrap(transport: Any) -> Callable[..., None]:
        run = transport.run

        def flip(bucket: int, transfers: Any, source: Any, destination: Any) -> None:
            run(bucket, transfers, source, destination)
            received = [each for each in transfers if each.dst_rank == rank != each.src_rank]
            if rank == 1 and received and not flipped:
                flipped.append(place := received[0].dst)
                destination[place.buffer.name][place.offset : place.offset + 1].view(torch.int16).bitwise_xor_(1)

        return flip

    with _wrapped_transports(engine, wrap):
        yield


@contextmanager
def stale_bucket(engine: Any, seen: Seen) -> Iterator[None]:
    """The last bucket of rank 0, whose transfers do not run."""
    last = engine.sharding.plan.buckets[-1]
    seen.tensors = list(last.tensors)

    def wrap(transport: Any) -> Callable[..., None]:
        run = transport.run

        def skip(bucket: int, transfers: Any, source: Any, destination: Any) -> None:
            if dist.get_rank() == 1 or bucket != last.index or transport.name == "collective":
                run(bucket, transfers, source, destination)

        return skip

    with _wrapped_transports(engine, wrap):
        yield


@contextmanager
def live_weight(engine: Any, seen: Seen) -> Iterator[None]:
    """The final norm of rank 1, a bit of which flips after its commit."""
    adaptor = engine.inference.adaptor
    finish, norm = adaptor.finish_fill, adaptor.model.get_submodule(NORM)

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
def other_setting(engine: Any, seen: Seen) -> Iterator[None]:
    """Training normalises with another epsilon than config.json has; every bit arrives."""
    model = engine.train.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.norm, "variance_epsilon", 10.0)
        patch.setattr(model.config, "rms_norm_eps", 10.0)
        yield


FAULTS: dict[str, Callable[[Any, Seen], Any]] = {
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
def seen(engines: Ranks, directory: Path) -> list[dict[str, Seen]]:
    return engines.launch(inject, 2, str(directory))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rolled_back_and_the_next_switch_works(seen: list[dict[str, Seen]], fault: str) -> None:
    for found in seen:
        assert found[fault].error
        assert found[fault].state == "train"
        assert found[fault].is_unchanged
        assert found[fault].goes_on


def _lines(found: Seen) -> list[str]:
    return [line.strip(" -") for line in found.error.splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize("fault", ["flipped bit", "live weight"])
def test_one_place_is_named_on_all_ranks(seen: list[dict[str, Seen]], fault: str) -> None:
    assert [found[fault].error.partition(":")[0] for found in seen] == ["RemoteError", "WeightError"]
    first, second = (_lines(found[fault]) for found in seen)
    assert first == second
    assert len(first) == 1
    assert "rank 1" in first[0]


def test_the_flipped_bit_has_a_tensor_a_region_and_ranks(seen: list[dict[str, Seen]]) -> None:
    (line,) = _lines(seen[0]["flipped bit"])
    tensor, _, rest = line.partition("[")
    assert tensor.startswith(("model.", "lm_head"))
    box, _, rest = rest.partition("]: ")
    assert all(len(bounds.split(":")) == 2 for bounds in box.split(", "))
    assert rest.endswith(" of rank 1 differs from the training weights of rank 0")


def test_a_stale_bucket_is_all_of_its_tensors_and_no_other(seen: list[dict[str, Seen]]) -> None:
    found = seen[0]["stale bucket"]
    assert {line.partition("[")[0] for line in _lines(found)} == set(found.tensors)
    assert found.error.startswith("WeightError")
    assert seen[1]["stale bucket"].error.startswith("RemoteError")


def test_a_live_weight_that_changed_is_named(seen: list[dict[str, Seen]]) -> None:
    (line,) = _lines(seen[0]["live weight"])
    assert line == f"{NORM}.weight: on rank 1, vLLM's weights changed after they were committed"


def test_another_setting_is_named_with_both_numbers(seen: list[dict[str, Seen]]) -> None:
    for found in (each["other setting"] for each in seen):
        assert found.error.startswith("ComputationError: vLLM does not compute what the trainer computes: log-prob")
        assert re.search(r"sequence \d, -\d+\.\d{4} by the trainer and -\d+\.\d{4} by vLLM", found.error)
        assert "rms_norm_eps is 10.0 for the trainer and 1e-06 for vLLM" in found.error


def test_another_layer_is_named_before_the_first_switch(seen: list[dict[str, Seen]]) -> None:
    for found in (each["layers"] for each in seen):
        scale = "the scale of attention scores is 0.353553 for the trainer and 0.176777 for vLLM"
        assert f"what the trainer computes: in layer 1, {scale}. Make the model" in found.error


# -- the trace ---------------------------------------------------------------------------------------------------------


@dataclass
class Slice:
    """A slice of the trace, with what lies in it."""

    name: str
    start: float
    stop: float
    error: str | None
    parts: list[Slice] = field(default_factory=list)

    def names(self) -> set[str]:
        return {self.name}.union(*(part.names() for part in self.parts))

    def all(self, name: str) -> list[Slice]:
        return [*([self] if self.name == name else []), *(each for part in self.parts for each in part.all(name))]


def _tree(events: list[dict[str, Any]]) -> Slice:
    """Slices of one rank, each in the shortest that it lies in. Fails where one ends outside of it."""
    root = Slice("", float("-inf"), float("inf"), None)
    open_slices = [root]
    for event in events:
        new = Slice(event["name"], event["ts"], event["ts"] + event["dur"], event["args"].get("error"))
        while open_slices[-1].stop <= new.start:
            open_slices.pop()
        assert new.stop <= open_slices[-1].stop + 0.002, (new.name, open_slices[-1].name)  # microseconds, rounded
        open_slices[-1].parts.append(new)
        open_slices.append(new)
    return root


@pytest.fixture(scope="module")
def trees(seen: list[dict[str, Seen]], directory: Path) -> list[Slice]:
    """By rank."""
    by_rank = []
    for rank in range(2):
        path = path_of_rank(directory / "trace.json", rank)
        events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {rank}
        by_rank.append(events)
    for own in by_rank:
        assert [event["ts"] for event in own] == sorted(event["ts"] for event in own)
    return [_tree(own) for own in by_rank]


def test_the_trace_has_every_switch_and_which_failed(trees: list[Slice]) -> None:
    there, back = ("train->infer", None), ("infer->train", None)
    expected = [("set-up", None), ("start", None), there]
    for _ in FAULTS:
        expected += [back, ("train->infer", "error"), there]
    for tree in trees:
        assert [(part.name, part.error and "error") for part in tree.parts] == expected


def test_the_trace_has_all_phases_in_each_other(trees: list[Slice]) -> None:
    for tree in trees:
        switch = tree.parts[2]
        assert {"offload", "prepare", "check", "fill", "verify", "resume", "wait"} <= {*switch.names()}
        (fill,) = switch.all("fill")
        assert [part.name for part in fill.parts].count("bucket") > 1
        for bucket in fill.all("bucket"):
            parts = [part.name for part in bucket.parts]
            assert parts[0] == "allocate"
            assert parts[-1] == "commit"
            assert {"local", "verify"} <= set(parts)
            for transport in bucket.all("local"):
                assert [part.name for part in transport.parts] == ["read", "transfer"]
        assert any("shared_memory" in bucket.names() for bucket in fill.all("bucket"))


def test_the_ranks_wait_for_each_other_at_the_same_time(trees: list[Slice]) -> None:
    one, other = (tree.parts[2].all("wait") for tree in trees)
    assert len(one) == len(other) > 5
    assert all(max(a.start, b.start) <= min(a.stop, b.stop) for a, b in zip(one, other, strict=True))
