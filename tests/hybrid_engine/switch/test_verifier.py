"""`generate_config.verify` with fakes of both engines: coverage, errors and cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.ranks.digests import box_digest, box_digests
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.ranks.world import World
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.records.sides import Side
from hybrid_engine.switch import replicas, verifier
from hybrid_engine.switch.replicas import Replicas
from hybrid_engine.switch.verifier import NUM_SAMPLED, Verifier, _key_of
from tests.harness.rank_threads import RankThreads
from tests.hybrid_engine.switch.fakes import INFER, NBYTES, TRAIN, FakeTraining, Rig, Script

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool]


# -- digests --


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    values = torch.zeros(5, 7, dtype=torch.uint8 if dtype is torch.bool else dtype)
    digests = {box_digest(values)}
    flat = values.view(-1).view(torch.uint8)
    for byte in range(flat.numel()):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            digests.add(box_digest(values))
            flat[byte] ^= 1 << bit
    assert len(digests) == 1 + 8 * flat.numel()


@pytest.mark.parametrize("shape", [(), (1,), (3, 1 << 17), (1, 3 << 17), (2, 3, 1 << 16)], ids=str)
def test_a_digest_does_not_depend_on_strides_and_casts_first(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    flat = torch.zeros(2 * values.numel() + 3)
    strides = tuple(2 * stride for stride in values.stride())
    strided = flat.as_strided(shape, strides, 3).copy_(values)
    assert box_digests([values], [torch.bfloat16]) == box_digests([strided], [torch.bfloat16])
    assert box_digests([values], [torch.bfloat16]) != box_digests([values], [torch.float32])


def test_a_difference_in_any_piece_changes_the_digest() -> None:
    values = torch.zeros(4, 1 << 18)
    digest = box_digest(values)
    for row in range(4):
        values[row, 17] = 1
        assert box_digest(values) != digest
        values[row, 17] = 0


def test_digests_of_many_boxes_equal_single_digests() -> None:
    boxes = [torch.arange(size, dtype=torch.float32).view(-1, 3) for size in (3, 300, 3 << 18)]
    assert box_digests(boxes) == [box_digest(box) for box in boxes]


# -- regions --


def side(name: str, dtype: str, *boxes: tuple[int, int, int]) -> Side:
    """Build a side of ranks that hold boxes of a tensor of 12 elements.

    boxes: (rank, start, stop); each rank packs its boxes into one buffer.
    """
    layouts = []
    for rank in range(1 + max(rank for rank, _, _ in boxes)):
        owned = [(start, stop) for owner, start, stop in boxes if owner == rank]
        buffer = BufferId(rank, f"{name} of {rank}")
        shards = []
        offset = 0
        for start, stop in owned:
            shards.append(
                Shard(Region("t", (start,), (stop - start,)), Place(buffer, offset, (1,)))
            )
            offset += stop - start
        layouts.append(Layout({"t": (12,)}, {buffer: Buffer(max(offset, 1), dtype)}, tuple(shards)))
    return Side.of(layouts)


def test_regions_are_intersections_of_boxes() -> None:
    training = side("training", "float32", (0, 0, 6), (1, 6, 12))
    inference = side("inference", "bfloat16", (0, 0, 4), (1, 4, 12))
    ranks = [Verifier(training, inference, rank, "full") for rank in range(2)]
    trained, generated = (
        [getattr(verifier, end)["t"] for verifier in ranks] for end in ("source", "destination")
    )
    first, second, third = (
        Region("t", (start,), (length,)) for start, length in ((0, 4), (4, 2), (6, 6))
    )
    assert [[part.region for part in parts] for parts in trained] == [[first, second], [third]]
    assert [[part.region for part in parts] for parts in generated] == [[first], [second, third]]
    keys = [
        [_key_of(part.region) for side in sides for part in side] for sides in (trained, generated)
    ]
    assert keys[0] == keys[1]
    assert len({*keys[0]}) == 3
    assert [part.place.offset for part in ranks[0].source["t"]] == [0, 4]
    assert [part.place.offset for part in ranks[1].destination["t"]] == [0, 2]
    assert ranks[0].dtypes == {"t": "bfloat16"}


# -- replicas --


def test_rows_of_large_replicas_are_compared_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of four rows differs. An interrupt had kept rank 1 from counting a switch."""
    monkeypatch.setattr(replicas, "MAX_NBYTES", 1)

    def body(world: World) -> tuple[str, ...]:
        training = FakeTraining(Script(), 0, 1, elastic=False, shapes={"first": (4, 3)})
        training.param[9] += world.rank
        compared = Replicas(Side.of([training.layout().on(rank) for rank in range(2)]), world.rank)
        compared._turn = 1 - world.rank
        with closing(Job.join(60, world=world)) as job:
            for _ in ("starts over", "first row", "second row", "third row"):
                compared.require_equal(compared.digests(training), job)
            for _ in range(2):
                with pytest.raises(WeightError) as caught:
                    compared.require_equal(compared.digests(training), job)
        return caught.value.findings

    finding = (
        "first[3:4, 0:3]: rank 0 and rank 1 train it with different bits; replicas must be equal"
    )
    assert RankThreads(2).run(body) == [(finding,)] * 2


# -- switches --


@pytest.fixture
def verified(job: None) -> Rig:
    return Rig(verify="full")


def after_each_bucket(rig: Rig, after: Callable[[int, TensorDict], object]) -> None:
    """Call `after(bucket, destination)` after each bucket is transferred."""
    router = rig.manager.router
    run = router.run

    def spoiled(bucket, source, destination, following=None):
        report = run(bucket, source, destination, following)
        after(bucket.index, destination)
        return report

    router.run = spoiled


def test_a_correct_switch_passes_and_reports_its_cost(
    verified: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        report = verified.fill()
        verified.assert_is(INFER)
        assert (report.tensors_verified, report.bytes_verified, report.bytes_of_digests) == (
            2,
            2 * NBYTES,
            0,
        )
        assert 0 < report.seconds_by_phase["verify"] < report.seconds
        assert f"verified=2 tensors, {2 * NBYTES / 1e9:.6f} GB read" in str(report)
        back = verified.manager.enter(TRAIN)
        assert back.tensors_verified == 0
        assert "verified" not in str(back)


def test_a_flipped_bit_is_reported_and_rolled_back(verified: Rig) -> None:
    def flip(bucket: int, destination: TensorDict) -> None:
        if "second.weight" in destination:
            destination["second.weight"][-1:].view(torch.int32).bitwise_xor_(1)

    router_run = verified.manager.router.run
    after_each_bucket(verified, flip)
    verified.training.step()
    with pytest.raises(WeightError) as caught:
        verified.manager.enter(INFER)
    assert caught.value.findings == (
        "second[0:64, 0:512]: second.weight of rank 0 differs from the training weights of rank 0",
    )
    verified.assert_is(TRAIN)
    verified.manager.router.run = router_run
    verified.enter(INFER)


def test_skipped_tensors_are_compared(job: None) -> None:
    """Training weights by digests of the sent bytes, the engine's by its own proof."""
    rig = Rig(elastic=True, incremental="auto", incremental_mb=2, verify="full")
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.script.take()
    report = rig.manager.enter(INFER)
    assert not any(call.startswith("commit") for call in rig.script.take())
    assert report.tensors_verified == 2
    rig.close()


def test_a_sample_counts_a_skipped_tensor_only_if_it_was_compared(
    job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "NUM_SAMPLED", 1)
    rig = Rig(elastic=True, incremental="auto", incremental_mb=2, verify="sample")
    counts = []
    for number in range(7):
        if number == 5:  # "first" is sent again, in a switch that compares "second"
            rig.training.param.data[:1] += 1
        counts.append(rig.manager.enter(INFER).tensors_verified)
        rig.manager.enter(TRAIN)
    assert counts == [
        1,
        0,
        1,
        0,
        1,
        0,
        0,
    ]  # "first" was compared when it was sent, "second" was not
    rig.close()


def test_an_unproven_tensor_fails_the_switch(verified: Rig) -> None:
    calls = []
    proving = verified.inference.proving

    def record_call(tensors, unproven):
        calls.append((tensors, unproven))
        return proving(tensors, unproven)

    verified.inference.proving = record_call
    after_each_bucket(
        verified,
        lambda bucket, destination: calls[-1][1](f"bucket {bucket}: the kernel of layer 3"),
    )
    with pytest.raises(WeightError, match="bucket 1: the kernel of layer 3") as caught:
        verified.manager.enter(INFER)
    assert len(caught.value.findings) == 2
    assert calls[-1][0] == {"first", "second"}
    verified.assert_is(TRAIN)


def test_samples_cycle_through_all_tensors(verified: Rig) -> None:
    names = [f"tensor{number:02}" for number in range(NUM_SAMPLED + 3)]  # sorted by number
    sides = side("training", "float32", (0, 0, 12)), side("inference", "float32", (0, 0, 12))
    sampling, full = (Verifier(*sides, 0, mode) for mode in ("sample", "full"))
    sampling.dtypes = full.dtypes = dict.fromkeys(names, "float32")
    first, second = (sampling.begin(verified.job).tensors for _ in range(2))
    assert first == set(names[:NUM_SAMPLED])
    assert second == {*names[NUM_SAMPLED:], *names[: NUM_SAMPLED - 3]}
    assert full.begin(verified.job).tensors == set(names)


def test_different_replicas_are_an_error_that_names_their_ranks(
    verified: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a second rank that trains one tensor with other bits."""
    gather = type(verified.job.agreement).gather

    def with_another(agreement, value, kind, phase="gather", limit=0):
        (gathered,) = gather(agreement, value, kind, phase)
        if phase != "verify":
            return [gathered]
        return [gathered[:-1] + bytes([gathered[-1] ^ 1]), gathered]  # flips a bit of a digest

    monkeypatch.setattr(type(verified.job.agreement), "gather", with_another)
    with pytest.raises(WeightError) as caught:
        verified.manager.enter(INFER)
    assert caught.value.findings == (
        "second[0:64, 0:512]: rank 0 and rank 1 train it with different bits; "
        "replicas must be equal",
    )
    verified.assert_is(TRAIN)
