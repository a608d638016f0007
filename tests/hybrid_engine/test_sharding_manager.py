"""The switch between training and inference with fakes of its ports: states, hooks, reports, failures, two ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import sharding_manager
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import OffloadError, PlanError, RemoteError, ReshardError, StateError, WeightError
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offloader import KINDS, MegatronOffloader, OffloadItem, OffloadReport
from hybrid_engine.memory.weight_container import ContainerState
from hybrid_engine.planning.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.planning.regions import Region
from hybrid_engine.ports import InferenceWeights, TrainingWeights
from hybrid_engine.sharding_manager import InferenceCaches, ReshardReport, ShardingManager, State
from hybrid_engine.transports import CollectiveTransport, SharedMemoryTransport
from tests.launch import launch

TRAIN, FORWARD, INFER, IDLE = State.TRAIN, State.FORWARD, State.INFER, State.IDLE
# Two tensors, each a group of its own. The first fills the smallest bucket there is, so that there are two buckets.
SHAPES = {"first": (512, 512), "second": (64, 512)}
NUMEL = sum(rows * columns for rows, columns in SHAPES.values())
NBYTES = 4 * NUMEL
TRAINING_NBYTES = {"param": NBYTES, "grad": NBYTES, "optimizer": 2 * NBYTES}
NEEDED = {TRAIN: set(KINDS), FORWARD: {"param"}, INFER: set(), IDLE: set()}


class Script:
    """What was asked of the fakes, in order, and which of it fails, once each time it is armed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._armed: dict[str, list[Exception]] = {}

    def arm(self, call: str, *errors: Exception) -> None:
        """The next time `call` is reached it raises the first of these, then the second, and so on."""
        self._armed.setdefault(call, []).extend(errors)

    def reach(self, call: str) -> None:
        self.calls.append(call)
        if self._armed.get(call):
            raise self._armed[call].pop(0)

    def take(self) -> list[str]:
        """The calls since the last time."""
        taken, self.calls = self.calls, []
        return taken


class FakeTraining:
    """Rank r of n holds the r-th part of the rows of every tensor, in one flat buffer, and as much beside it."""

    def __init__(self, script: Script, rank: int, num_ranks: int, *, elastic: bool) -> None:
        self.script, self.rank, self.num_ranks = script, rank, num_ranks
        self.version = 0
        self.tensors = dict(SHAPES)
        numel = NUMEL // num_ranks
        self.param, self.grad = (
            allocate_elastic(numel, torch.float32, "cpu", kind) if elastic else torch.zeros(numel)
            for kind in ("param", "grad")
        )
        self.param.copy_(torch.cat([canonical(name, 0).chunk(num_ranks)[rank].flatten() for name in SHAPES]))
        self.main, self.moment = self.param.clone(), torch.full((numel,), 0.25)
        self.moment[:2] = torch.tensor([float("nan"), -0.0])  # bits must survive, not only values
        self._remember()

    def layout(self) -> Layout:
        self.script.reach("layout")
        buffer_id, offset, shards = BufferId(self.rank, "param"), 0, []
        for name, (rows, columns) in SHAPES.items():
            part = rows // self.num_ranks
            shards.append(self._shard(name, (self.rank * part, 0), (part, columns), buffer_id, offset))
            offset += part * columns
        buffers = {buffer_id: Buffer(self.param.numel(), "float32")}
        for name in self.tensors.keys() - SHAPES.keys():
            buffers[BufferId(self.rank, name)] = Buffer(4, "float32")
            shards.append(self._shard(name, (0, 0), (2, 2), BufferId(self.rank, name), 0))
        return Layout(self.tensors, buffers, tuple(shards))

    @staticmethod
    def _shard(name: str, offsets: tuple[int, int], lengths: tuple[int, int], buffer_id: BufferId, at: int) -> Shard:
        return Shard(Region(name, offsets, lengths), Place(buffer_id, at, (lengths[1], 1)))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        try:
            self.script.reach("buffers")
        except KeyError:
            return {}  # a transport that does not find its source
        return {"param": self.param}

    def prepare(self) -> None:
        self.script.reach("prepare")

    def check_values(self) -> None:
        self.script.reach("check")

    def items(self) -> list[OffloadItem]:
        return [
            OffloadItem("param", "param", self.param),
            OffloadItem("grad", "grad", self.grad, "drop"),
            OffloadItem("main", "optimizer", self.main),
            OffloadItem("moment", "optimizer", self.moment),
        ]

    def step(self) -> None:
        """What an optimizer does; gradients are left from it."""
        self.version += 1
        self.param.add_(1)
        self.main.add_(1)
        self.moment[2:].mul_(0.5)
        self.grad.fill_(self.version)
        self._remember()

    def _remember(self) -> None:
        self.values = {"param": [self.param.clone()], "optimizer": [self.main.clone(), self.moment.clone()]}

    def assert_unchanged(self, kinds: Iterable[str] = ("param", "optimizer")) -> None:
        """Bit by bit what they were after the last step."""
        found = {"param": [self.param], "optimizer": [self.main, self.moment]}
        for kind in {*kinds} & found.keys():
            for tensor, before in zip(found[kind], self.values[kind], strict=True):
                assert torch.equal(tensor.view(torch.int32), before.view(torch.int32)), kind


class FakeInference:
    """Every rank wants all of every tensor; a tensor is a group. Also the caches of this engine."""

    def __init__(self, script: Script, rank: int) -> None:
        self.script, self.rank = script, rank
        self.tensors = dict(SHAPES)
        self.live: dict[str, torch.Tensor] = {}
        self.in_force: set[str] = set()

    def layout(self) -> Layout:
        ids = {name: BufferId(self.rank, f"{name}.weight") for name in self.tensors}
        buffers = {ids[name]: Buffer(rows * columns, "float32", name) for name, (rows, columns) in self.tensors.items()}
        shards = [
            Shard(Region(name, (0, 0), shape), Place(ids[name], 0, (shape[1], 1)))
            for name, shape in self.tensors.items()
        ]
        return Layout(self.tensors, buffers, tuple(shards))

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        for group in groups:
            self.script.reach(f"allocate {group}")
            self.live[group] = torch.zeros(SHAPES[group]).flatten()
        return {f"{group}.weight": self.live[group] for group in groups}

    def commit(self, groups: Sequence[str]) -> None:
        for group in groups:
            self.script.reach(f"commit {group}")
            self.in_force.add(group)

    def release(self) -> None:
        self.script.reach("release")
        self.live.clear()
        self.in_force.clear()

    def wake_kv_cache(self) -> None:
        self.script.reach("wake")

    def reset_caches(self) -> None:
        self.script.reach("reset")


class ScriptedOffloader(MegatronOffloader):
    """The real one, which records what it really moves and fails where the script says so."""

    def __init__(self, script: Script, inventory: Callable[[], Iterable[OffloadItem]]) -> None:
        super().__init__(inventory)
        self.script = script

    def offload(self, kinds: Iterable[str] = KINDS) -> OffloadReport:
        """All or nothing, as the real one."""
        for kind in self._that(kinds, away=False):
            self.script.reach(f"offload {kind}")
        return super().offload(kinds)

    def onload(self, kinds: Iterable[str] = KINDS) -> OffloadReport:
        """The kinds before the one that fails are back, as with the real one."""
        coming = self._that(kinds, away=True)
        for number, kind in enumerate(coming):
            try:
                self.script.reach(f"onload {kind}")
            except OffloadError:
                super().onload(coming[:number])
                raise
        return super().onload(kinds)

    def _that(self, kinds: Iterable[str], *, away: bool) -> list[str]:
        wanted = set(kinds)
        return [kind for kind in KINDS if kind in wanted and self.is_offloaded(kind) is away]


class Rig:
    """A rank: fakes of both engines and the manager between them."""

    def __init__(self, *, elastic: bool = False, build: bool = True, **settings: object) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.script = Script()
        self.training = FakeTraining(self.script, rank, num_ranks, elastic=elastic)
        self.inference = FakeInference(self.script, rank)
        self.offloader = ScriptedOffloader(self.script, self.training.items)
        self.config = GenerateConfig(**{"bucket_mb": 1, "timeout_seconds": 60, **settings})
        if build:
            self.build()

    def build(self) -> None:
        self.manager = ShardingManager(
            training=self.training,
            inference=self.inference,
            caches=self.inference,
            offloader=self.offloader,
            version=lambda: self.training.version,
            config=self.config,
        )
        self.script.take()

    def resident(self) -> set[str]:
        """Kinds on the device; of the others, not a byte is there."""
        nbytes = {kind: sum(by_owner.values()) for kind, by_owner in self.offloader.resident_nbytes().items()}
        for kind in KINDS:
            if self.offloader.is_offloaded(kind):
                assert nbytes[kind] == 0, kind
        return {kind for kind in KINDS if not self.offloader.is_offloaded(kind)}

    def assert_is(self, state: State) -> None:
        """In this state, with everything where it belongs and every value that is there as it was."""
        offloaded = {kind for kind in KINDS if getattr(self.config, f"offload_train_{kind}")}
        assert self.manager.state is state
        assert self.resident() == NEEDED[state] | (set(KINDS) - offloaded)
        self.training.assert_unchanged(self.resident())
        if state is not INFER:
            assert self.inference.live == {} and self.inference.in_force == set()
            assert self.manager.container.state is ContainerState.EMPTY
            return
        assert self.inference.in_force == set(SHAPES)
        for name in SHAPES:
            assert torch.equal(self.inference.live[name].view(SHAPES[name]), canonical(name, self.training.version))


def canonical(name: str, version: int) -> torch.Tensor:
    """The whole tensor after so many steps; exact in float32."""
    rows, columns = SHAPES[name]
    base = 0 if name == "first" else 1_000_000
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + base + version


@pytest.fixture
def job() -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def rig(job: None) -> Rig:
    return Rig()


# States.


def test_fakes_are_what_the_ports_ask_for(rig: Rig):
    assert isinstance(rig.training, TrainingWeights) and isinstance(rig.inference, InferenceWeights)
    caches: InferenceCaches = rig.inference
    assert callable(caches.wake_kv_cache) and callable(caches.reset_caches)


def test_it_starts_in_train_with_nothing_of_inference(job: None):
    rig = Rig(build=False)
    rig.inference.allocate(["first"])  # as an engine that comes with weights of its own
    rig.offloader.offload()  # as a worker that made room for it
    rig.build()
    rig.assert_is(TRAIN)
    assert rig.manager.last_report is None


ALL_SWITCHES = [TRAIN, FORWARD, TRAIN, INFER, TRAIN, IDLE, FORWARD, INFER, FORWARD, IDLE, INFER, IDLE, TRAIN]
OFFLOADS = [dict(zip(KINDS, flags, strict=True)) for flags in itertools.product([True, False], repeat=3)]


def test_the_walk_takes_every_switch_once():
    assert sorted(itertools.pairwise(ALL_SWITCHES)) == sorted(itertools.permutations(State, 2))


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.parametrize("offloads", OFFLOADS, ids=lambda flags: "+".join(k for k in flags if flags[k]) or "none")
def test_every_switch(job: None, offloads: dict[str, bool], elastic: bool):
    rig = Rig(elastic=elastic, **{f"offload_train_{kind}": flag for kind, flag in offloads.items()})
    rig.training.step()
    for before, target in itertools.pairwise(ALL_SWITCHES):
        report = rig.manager.enter(target)
        rig.assert_is(target)
        assert (report.direction, report.version) == (f"{before}->{target}", rig.training.version)
        if target is TRAIN:
            left = 0 if offloads["grad"] else rig.training.version
            assert torch.equal(rig.training.grad, torch.full_like(rig.training.grad, left))
            rig.training.step()


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
def test_inference_follows_training_over_many_cycles(job: None, elastic: bool):
    rig = Rig(elastic=elastic)
    for _ in range(4):
        rig.training.step()
        rig.manager.enter(INFER)
        rig.assert_is(INFER)
        rig.manager.enter(TRAIN)
        rig.assert_is(TRAIN)
        assert not rig.training.grad.any()


def test_order_of_a_switch_and_back(rig: Rig):
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert sorted(calls[:2]) == ["offload grad", "offload optimizer"]
    assert [call for call in calls[2:] if call != "buffers"] == [
        *("prepare", "check", "allocate first", "commit first", "allocate second", "commit second"),
        *("offload param", "wake", "reset"),
    ]
    rig.manager.enter(TRAIN)
    calls = rig.script.take()
    assert calls[0] == "release"
    assert sorted(calls[1:]) == ["onload grad", "onload optimizer", "onload param"]


def test_no_gradients_and_optimizer_on_the_device_when_idle_goes_to_infer(rig: Rig):
    rig.manager.enter(IDLE)
    rig.script.take()
    rig.manager.enter(INFER)
    calls = rig.script.take()
    assert {call for call in calls if "load" in call} == {"onload param", "offload param"}


@pytest.mark.parametrize("state", State)
def test_the_same_state_again_is_no_switch(rig: Rig, state: State):
    rig.manager.enter(state)
    report = rig.manager.last_report
    called = []
    rig.manager.on_reshard_start(lambda *states: called.append(states))
    rig.manager.on_reshard_end(called.append)
    rig.script.take()
    assert rig.manager.enter(state) is None
    with rig.manager.entered(state):
        pass
    assert rig.script.take() == [] and called == []
    assert rig.manager.last_report is report
    rig.assert_is(state)


# Contexts.


def test_a_context_keeps_its_state_afterwards(rig: Rig):
    with rig.manager.entered(INFER):
        rig.assert_is(INFER)
    rig.assert_is(INFER)
    with rig.manager.entered(TRAIN):
        rig.assert_is(TRAIN)


@pytest.mark.parametrize(("outer", "inner"), list(itertools.permutations(State, 2)))
def test_a_context_inside_one_of_another_state(rig: Rig, outer: State, inner: State):
    with rig.manager.entered(outer):
        rig.script.take()
        message = f"{inner} context inside a {outer} context"
        with pytest.raises(StateError, match=message), rig.manager.entered(inner):
            raise AssertionError("inside")
        assert rig.script.take() == []
        rig.assert_is(outer)
        with rig.manager.entered(outer), rig.manager.entered(outer):
            rig.assert_is(outer)
        with pytest.raises(StateError), rig.manager.entered(inner):  # the inner ones did not end the outer one
            raise AssertionError("inside")
    with rig.manager.entered(inner):
        rig.assert_is(inner)


def test_an_error_inside_a_context_ends_it(rig: Rig):
    with pytest.raises(ZeroDivisionError), rig.manager.entered(INFER):
        raise ZeroDivisionError
    rig.assert_is(INFER)
    with rig.manager.entered(TRAIN):
        rig.assert_is(TRAIN)


def test_a_context_that_cannot_be_entered_is_none(rig: Rig):
    rig.script.arm("prepare", OSError("disk on fire"))
    with pytest.raises(ReshardError, match="disk on fire"), rig.manager.entered(INFER):
        raise AssertionError("inside")
    with rig.manager.entered(FORWARD):
        rig.assert_is(FORWARD)


# Hooks.


def test_hooks_are_called_in_order_with_what_they_ask_for(rig: Rig):
    events: list[tuple[object, ...]] = []

    @rig.manager.on_reshard_start
    def first(before: State, target: State) -> None:
        events.append(("first", before, target, rig.manager.state, len(rig.script.calls)))

    @rig.manager.on_reshard_start
    def second(before: State, target: State) -> None:
        events.append(("second", before, target))

    @rig.manager.on_reshard_end
    def third(report: ReshardReport) -> None:
        events.append(("third", report, rig.manager.state, rig.manager.last_report))

    @rig.manager.on_reshard_end
    def fourth(report: ReshardReport) -> None:
        events.append(("fourth", report))

    assert all(callable(hook) for hook in (first, second, third, fourth))
    report = rig.manager.enter(INFER)
    assert events == [
        ("first", TRAIN, INFER, TRAIN, 0),
        ("second", TRAIN, INFER),
        ("third", report, INFER, report),
        ("fourth", report),
    ]
    first(IDLE, TRAIN)
    assert events[-1][:3] == ("first", IDLE, TRAIN)  # the decorated functions are still what they were


def test_a_start_hook_that_raises_leaves_the_state(rig: Rig):
    ended: list[ReshardReport] = []
    rig.manager.on_reshard_end(ended.append)

    @rig.manager.on_reshard_start
    def refuse_once(_before: State, _target: State) -> None:
        rig.script.reach("hook")

    rig.script.arm("hook", OSError("no licence"))
    with pytest.raises(ReshardError, match=r"start hooks.*OSError: no licence"):
        rig.manager.enter(INFER)
    assert rig.script.take() == ["hook"] and ended == [] and rig.manager.last_report is None
    rig.assert_is(TRAIN)
    rig.manager.enter(INFER)
    rig.assert_is(INFER)


def test_when_only_an_end_hook_raises_the_switch_stands(rig: Rig):
    @rig.manager.on_reshard_end
    def fail_once(_report: ReshardReport) -> None:
        rig.script.reach("hook")

    rig.script.arm("hook", OSError("disk full"))
    with pytest.raises(ReshardError, match=r"end hooks.*OSError: disk full"):
        rig.manager.enter(INFER)
    rig.assert_is(INFER)
    assert rig.manager.last_report.direction == "train->infer"
    assert rig.manager.enter(INFER) is None
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)


# NaN.


def test_values_are_checked_only_when_asked(job: None):
    unchecked = Rig(check_nan=False)
    unchecked.script.arm("check", WeightError(["first: 1 NaN"]))
    unchecked.manager.enter(INFER)
    unchecked.assert_is(INFER)
    assert "check" not in unchecked.script.calls

    checked = Rig(check_nan=True)
    checked.script.arm("check", WeightError(["first: 1 NaN"]))
    with pytest.raises(WeightError, match="first: 1 NaN"):
        checked.manager.enter(INFER)
    checked.assert_is(TRAIN)
    assert not any(call.startswith("allocate") for call in checked.script.calls)
    checked.script.take()
    checked.manager.enter(FORWARD)
    assert "check" not in checked.script.calls  # only what goes to inference is looked at


# Reports.

FILL_PARTS = {"allocate", "read", "transfer", "write", "commit"}
TO_INFER = {"offload", "onload", "prepare", "check", "fill", "resume"} | FILL_PARTS


def test_report_of_a_switch_to_infer_and_back(rig: Rig):
    rig.training.step()
    first = rig.manager.enter(INFER)
    assert set(first.seconds_by_phase) >= TO_INFER | {"plan", "layout"}
    assert (first.direction, first.version) == ("train->infer", 1)
    assert (first.bytes_received, first.bytes_least, first.bytes_own) == (0, 0, NBYTES)
    assert (first.bytes_offloaded, first.bytes_onloaded) == (sum(TRAINING_NBYTES.values()), 0)
    assert rig.manager.last_report is first
    back = rig.manager.enter(TRAIN)
    assert set(back.seconds_by_phase) >= {"release", "onload"}
    assert set(back.seconds_by_phase).isdisjoint(FILL_PARTS | {"plan", "layout", "prepare", "resume"})
    assert (back.bytes_received, back.bytes_least, back.bytes_own) == (0, 0, 0)
    assert (back.bytes_offloaded, back.bytes_onloaded) == (0, sum(TRAINING_NBYTES.values()))
    assert rig.manager.last_report is back
    again = rig.manager.enter(INFER)
    assert set(again.seconds_by_phase) >= TO_INFER
    assert set(again.seconds_by_phase).isdisjoint({"plan", "layout", "release"})


def test_phases_add_up_to_the_switch(rig: Rig):
    rig.manager.enter(FORWARD)  # takes the seconds of planning
    report = rig.manager.enter(INFER)
    seconds = report.seconds_by_phase
    assert min(seconds.values()) >= 0 and seconds["transfer"] > 0
    assert sum(seconds[part] for part in FILL_PARTS) <= seconds["fill"]
    assert sum(seconds[phase] for phase in seconds.keys() - FILL_PARTS) <= report.seconds


def test_a_failed_switch_does_not_count_in_the_next_report(rig: Rig):
    rig.script.arm("reset", OSError("disk on fire"))
    with pytest.raises(ReshardError):
        rig.manager.enter(INFER)
    report = rig.manager.enter(INFER)
    assert report.bytes_offloaded == sum(TRAINING_NBYTES.values())
    assert (report.bytes_onloaded, report.bytes_own) == (0, NBYTES)
    assert "plan" in report.seconds_by_phase


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
def test_peak(job: None, elastic: bool):
    training = sum(TRAINING_NBYTES.values())
    rig = Rig(elastic=elastic)
    rig.training.step()
    # All of training at entry; later only parameters beside inference, which is less.
    assert rig.manager.enter(INFER).peak_bytes == training
    kept = Rig(elastic=elastic, **{f"offload_train_{kind}": False for kind in KINDS})
    kept.training.step()
    assert kept.manager.enter(INFER).peak_bytes == training + NBYTES
    assert kept.manager.enter(TRAIN).peak_bytes == training + NBYTES  # both are there when it begins
    assert kept.manager.enter(FORWARD).peak_bytes == training


def test_report_as_plain_values(rig: Rig):
    report = rig.manager.enter(INFER)
    values = report.as_dict()
    assert set(values) == {field.name for field in dataclasses.fields(ReshardReport)}
    assert ReshardReport(**json.loads(json.dumps(values))) == report


LINE = re.compile(
    r"\[Reshard\] direction=(?P<direction>\S+) version=(?P<version>\d+) duration=(?P<seconds>[\d.]+) s, "
    r"transferred=(?P<received>[\d.]+) GB \(least possible (?P<least>[\d.]+) GB\), (?P<rate>[\d.]+) GB/s, "
    r"peak=(?P<peak>[\d.]+) GB"
)


def test_one_line_a_switch_in_the_log(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.training.step()
    with caplog.at_level(logging.INFO, "hybrid_engine"):
        report = rig.manager.enter(INFER)
        rig.manager.enter(TRAIN)
    lines = [LINE.fullmatch(record.getMessage()) for record in caplog.records if record.name == "hybrid_engine"]
    assert [line["direction"] for line in lines] == ["train->infer", "infer->train"]
    found = lines[0]
    assert int(found["version"]) == 1
    assert float(found["seconds"]) == pytest.approx(report.seconds, abs=1e-3)
    assert float(found["peak"]) == pytest.approx(report.peak_bytes / 1e9, abs=1e-6)


def test_the_line_gives_bytes_and_rate():
    counts = {"bytes_received": 2_000_000_000, "bytes_least": 1_500_000_000, "peak_bytes": 7_000_000_000}
    counts |= {"bytes_own": 0, "bytes_offloaded": 0, "bytes_onloaded": 0}
    report = ReshardReport("train->infer", 3, seconds=0.5, seconds_by_phase={}, **counts)
    assert LINE.fullmatch(str(report)).groupdict() == {
        **{"direction": "train->infer", "version": "3", "seconds": "0.500", "peak": "7.000000"},
        **{"received": "2.000000", "least": "1.500000", "rate": "4.000"},
    }
    assert "0.000 GB/s" in str(dataclasses.replace(report, seconds=0.0))


# Failures. Error, and what its message says, by the call in which it is raised.

FAILURES = {
    "prepare": (OSError("disk on fire"), ReshardError, "prepare.*OSError: disk on fire"),
    "check": (WeightError(["first: 1 NaN"]), WeightError, "first: 1 NaN"),
    "allocate first": (MemoryError("full"), ReshardError, "bucket 0, phase allocate, groups first: MemoryError: full"),
    "allocate second": (MemoryError("full"), ReshardError, "bucket 1, phase allocate, groups second: MemoryError"),
    "buffers": (KeyError(), ReshardError, "bucket 0, phase transfer"),
    "commit first": (OSError("odd"), ReshardError, "bucket 0, phase commit, groups first: OSError: odd"),
    "commit second": (OSError("odd"), ReshardError, "bucket 1, phase commit, groups second: OSError: odd"),
    "offload grad": (OffloadError("stuck"), OffloadError, "stuck"),
    "offload param": (OffloadError("stuck"), OffloadError, "stuck"),
    "onload param": (OffloadError("full"), OffloadError, "full"),
    "wake": (MemoryError("full"), ReshardError, "resume.*MemoryError: full"),
    "reset": (OSError("odd"), ReshardError, "resume.*OSError: odd"),
}
NOT_FROM = {TRAIN: {"onload param"}, FORWARD: {"onload param", "offload grad"}, IDLE: {"offload grad"}}
FAILURE_CASES = [(before, call) for before in NOT_FROM for call in FAILURES if call not in NOT_FROM[before]]


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.parametrize(("before", "call"), FAILURE_CASES)
def test_a_failure_on_the_way_to_infer_restores_the_state_before(
    job: None, before: State, call: str, elastic: bool, caplog: pytest.LogCaptureFixture
):
    rig = Rig(elastic=elastic)
    rig.training.step()
    rig.manager.enter(before)
    report = rig.manager.last_report
    error, kind, message = FAILURES[call]
    rig.script.arm(call, error)
    with caplog.at_level(logging.ERROR, "hybrid_engine"), pytest.raises(kind, match=message) as failure:
        rig.manager.enter(INFER)
    assert not isinstance(failure.value, RemoteError)
    assert call in rig.script.calls
    rig.assert_is(before)
    if before is TRAIN and call != "offload grad":  # that fails before they are dropped
        assert not rig.training.grad.any()
    assert rig.manager.last_report is report
    assert f"{before}->infer failed; state is {before}" in caplog.text
    for target in (INFER, TRAIN, INFER):
        rig.manager.enter(target)
        rig.assert_is(target)


@pytest.mark.parametrize("call", ["allocate second", "reset"])
def test_a_failure_when_nothing_is_offloaded_leaves_even_gradients(job: None, call: str):
    rig = Rig(**{f"offload_train_{kind}": False for kind in KINDS})
    rig.training.step()
    rig.script.arm(call, OSError("odd"))
    with pytest.raises(ReshardError, match="OSError: odd"):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    assert bool((rig.training.grad == 1).all())


@pytest.mark.parametrize(
    ("target", "call"),
    [
        *((TRAIN, "release"), (TRAIN, "onload param"), (TRAIN, "onload optimizer")),
        *((FORWARD, "release"), (FORWARD, "onload param"), (IDLE, "release")),
    ],
)
def test_a_failure_on_the_way_from_infer_ends_idle(rig: Rig, target: State, call: str):
    rig.training.step()
    rig.manager.enter(INFER)
    rig.script.arm(call, OffloadError("full"))
    with pytest.raises(OffloadError, match="full"):
        rig.manager.enter(target)
    rig.assert_is(IDLE)
    rig.manager.enter(target)
    rig.assert_is(target)
    rig.manager.enter(INFER)
    rig.assert_is(INFER)


@pytest.mark.parametrize("target", [FORWARD, IDLE])
def test_a_failure_between_states_of_training_restores_the_state_before(rig: Rig, target: State):
    rig.training.step()
    rig.script.arm("offload optimizer", OffloadError("stuck"))
    with pytest.raises(OffloadError, match="stuck"):
        rig.manager.enter(target)
    rig.assert_is(TRAIN)
    rig.manager.enter(target)
    rig.script.arm("onload optimizer", OffloadError("full"))
    with pytest.raises(OffloadError, match="full"):
        rig.manager.enter(TRAIN)
    rig.assert_is(target)


WAYS_BACK = {
    "onload param": ("reset", "grad, optimizer"),
    "onload optimizer": ("reset", "optimizer"),
    "release": ("commit second", "grad, optimizer"),
}


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
@pytest.mark.parametrize("target", [TRAIN, FORWARD, INFER])
@pytest.mark.parametrize("back", WAYS_BACK)
def test_when_the_way_back_fails_too_it_is_idle_and_the_next_switch_recovers(
    job: None, back: str, target: State, elastic: bool
):
    rig = Rig(elastic=elastic)
    rig.training.step()
    call, away = WAYS_BACK[back]
    rig.script.arm(call, OSError("disk on fire"))
    rig.script.arm(back, OffloadError("no memory left"))
    with pytest.raises(ReshardError, match=r"(?s)train->infer.*disk on fire.*way back.*no memory left") as failure:
        rig.manager.enter(INFER)
    assert away in str(failure.value) and "idle" in str(failure.value)
    assert rig.manager.state is IDLE
    rig.manager.enter(target)
    rig.assert_is(target)
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)


# Two real ranks: each holds half of every tensor and wants all of it.

SCENARIOS: dict[str, Callable[[], object]] = {}


def scenario(function: Callable[[], object]) -> Callable[[], object]:
    """One of the things that two ranks do in one launch."""
    SCENARIOS[function.__name__] = function
    return function


def error_of(call: Callable[[], object]) -> dict[str, object]:
    """The error of a call that must fail; its classes by name, to be compared in the process of the test."""
    try:
        call()
    except Exception as error:
        return {"names": [cls.__name__ for cls in type(error).__mro__], "text": str(error)}
    raise AssertionError("it did not fail")


def assert_goes_on(rig: Rig) -> None:
    """This rank, together with the other, can do everything again."""
    for target in (INFER, TRAIN, INFER):
        rig.manager.enter(target)
        rig.assert_is(target)
        if target is TRAIN:
            rig.training.step()


@scenario
def plan_faults() -> dict[str, object]:
    rig = Rig(build=False)
    if rig.training.rank == 1:
        rig.training.tensors["orphan"] = (2, 2)
    else:
        rig.inference.tensors["longed_for"] = (2, 2)
    error = error_of(rig.build)
    rig.training.tensors = rig.inference.tensors = dict(SHAPES)
    rig.build()
    assert_goes_on(rig)
    return error


@scenario
def layout_fails_on_rank_1() -> dict[str, object]:
    rig = Rig(build=False)
    if rig.training.rank == 1:
        rig.script.arm("layout", OSError("disk on fire"))
    return error_of(rig.build)


@scenario
def other_plan_on_rank_1() -> dict[str, object]:
    rig, plan = Rig(build=False), sharding_manager.plan
    if rig.training.rank == 1:
        sharding_manager.plan = lambda *args, **kwargs: dataclasses.replace(plan(*args, **kwargs), fingerprint="other")
    try:
        return error_of(rig.build)
    finally:
        sharding_manager.plan = plan


@scenario
def shared_memory_without_exported_buffers() -> dict[str, object]:
    return error_of(lambda: Rig(elastic=False, transport="shared_memory"))


def _count_pulled(transport: type, counts: dict[str, int]) -> Callable[[], None]:
    """Count the bytes that this rank reads by a transport; returns what ends the counting."""
    run = transport.run

    def counting(self, bucket, transfers, source, destination):
        own = [transfer.nbytes for transfer in transfers if transfer.dst_rank == self.rank]
        counts[self.name] = counts.get(self.name, 0) + sum(own)
        return run(self, bucket, transfers, source, destination)

    transport.run = counting
    return lambda: setattr(transport, "run", run)


@scenario
def transports() -> dict[str, object]:
    """By transport and kind of buffers: what the report says and what each transport carried."""
    results = {}
    cases = [("shared_memory", True), ("collective", True), ("collective", False), ("auto", True), ("auto", False)]
    for transport, elastic in cases:
        rig, counts = Rig(elastic=elastic, transport=transport), {}
        restore = [_count_pulled(kind, counts) for kind in (SharedMemoryTransport, CollectiveTransport)]
        rig.training.step()
        report = rig.manager.enter(INFER)
        rig.assert_is(INFER)
        for end in restore:
            end()
        assert_goes_on(rig)
        rig.manager.close()
        rig.manager.close()
        results[f"{transport}, {'elastic' if elastic else 'plain'}"] = {
            "received": report.bytes_received,
            "least": report.bytes_least,
            "own": report.bytes_own,
            "carried": {name: nbytes for name, nbytes in counts.items() if nbytes},
        }
    return results


def _fail_on_rank_0(call: str, **settings: object) -> dict[str, object]:
    rig = Rig(**settings)
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm(call, MemoryError("no memory on rank 0"))
    error = error_of(lambda: rig.manager.enter(INFER))
    rig.assert_is(TRAIN)
    assert_goes_on(rig)
    return error


@scenario
def one_rank_fails() -> dict[str, object]:
    """In the second of two buckets and elsewhere, over both transports."""
    results = {}
    for call in ("prepare", "allocate second", "commit second", "wake"):
        results[f"{call}, shared_memory"] = _fail_on_rank_0(call, elastic=True, transport="shared_memory")
        results[f"{call}, collective"] = _fail_on_rank_0(call, transport="collective")
    return results


@scenario
def start_hook_fails_on_rank_1() -> dict[str, object]:
    rig = Rig()
    rig.manager.on_reshard_start(lambda _before, _target: rig.script.reach("hook"))
    if rig.training.rank == 1:
        rig.script.arm("hook", OSError("no licence"))
    error = error_of(lambda: rig.manager.enter(INFER))
    rig.assert_is(TRAIN)
    assert_goes_on(rig)
    return error


@scenario
def way_back_fails_on_rank_1() -> dict[str, object]:
    """Rank 0 fails, and while both go back rank 1 does."""
    rig = Rig(elastic=True)
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
    else:
        rig.script.arm("onload param", OffloadError("no memory left"))
    error = error_of(lambda: rig.manager.enter(INFER))
    error["state"] = str(rig.manager.state)
    rig.manager.enter(TRAIN)
    rig.assert_is(TRAIN)
    assert_goes_on(rig)
    return error


@scenario
def release_fails_on_rank_0() -> dict[str, object]:
    """Its inference weights are still there when both start again; the next fill must not leave rank 1 waiting."""
    rig = Rig(transport="collective", timeout_seconds=5)
    rig.training.step()
    if rig.training.rank == 0:
        rig.script.arm("reset", OSError("disk on fire"))
        rig.script.arm("release", OSError("busy"))
    error = error_of(lambda: rig.manager.enter(INFER))
    error["state"] = str(rig.manager.state)
    try:
        assert_goes_on(rig)
        error["afterwards"] = "goes on"
    except Exception as problem:
        error["afterwards"] = f"{type(problem).__name__}: {problem}"
    return error


def run_scenarios() -> dict[str, object]:
    dist.init_process_group("gloo")
    results = {name: run() for name, run in SCENARIOS.items()}
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, dict]]:
    """What each scenario gave, by rank."""
    return launch(run_scenarios, 2, timeout=200)


def test_faults_of_the_plan_are_found_by_all_ranks_at_construction(two_ranks: list[dict[str, dict]]):
    for results in two_ranks:
        error = results["plan_faults"]
        assert error["names"][0] == PlanError.__name__
        assert "orphan: a training parameter that no inference rank reads" in error["text"]
        assert "longed_for" in error["text"] and "no training rank holds" in error["text"]


def test_plans_that_differ_are_found_by_all_ranks(two_ranks: list[dict[str, dict]]):
    for results in two_ranks:
        error = results["other_plan_on_rank_1"]
        assert error["names"][0] == PlanError.__name__ and "different plans" in error["text"]


def test_a_rank_that_fails_at_construction(two_ranks: list[dict[str, dict]]):
    remote, own = (results["layout_fails_on_rank_1"] for results in two_ranks)
    assert own["names"][0] == ReshardError.__name__ and "OSError: disk on fire" in own["text"]
    assert remote["names"][0] == RemoteError.__name__ and "rank 1: OSError: disk on fire" in remote["text"]


def test_a_transport_that_cannot_carry_the_plan(two_ranks: list[dict[str, dict]]):
    for results in two_ranks:
        error = results["shared_memory_without_exported_buffers"]
        assert error["names"][0] == "ConfigError" and "generate_config.transport" in error["text"]


def test_each_transport_brings_the_other_half_and_no_more(two_ranks: list[dict[str, dict]]):
    half = NBYTES // 2
    by_name = {
        **dict.fromkeys(("shared_memory, elastic", "auto, elastic"), "shared_memory"),
        **dict.fromkeys(("collective, elastic", "collective, plain", "auto, plain"), "collective"),
    }
    for results in two_ranks:
        assert results["transports"] == {
            case: {"received": half, "least": half, "own": half, "carried": {name: half}}
            for case, name in by_name.items()
        }


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
@pytest.mark.parametrize("call", ["prepare", "allocate second", "commit second", "wake"])
def test_one_rank_fails_both_raise_and_go_on(two_ranks: list[dict[str, dict]], call: str, transport: str):
    own, remote = (results["one_rank_fails"][f"{call}, {transport}"] for results in two_ranks)
    assert own["names"][0] == ReshardError.__name__
    assert RemoteError.__name__ in remote["names"]
    assert "no memory on rank 0" in own["text"] and "no memory on rank 0" in remote["text"]


def test_a_start_hook_that_fails_on_one_rank(two_ranks: list[dict[str, dict]]):
    remote, own = (results["start_hook_fails_on_rank_1"] for results in two_ranks)
    assert own["names"][0] == ReshardError.__name__ and remote["names"][0] == RemoteError.__name__
    assert "rank 1: OSError: no licence" in remote["text"]


def test_the_way_back_fails_on_one_rank_and_both_are_idle(two_ranks: list[dict[str, dict]]):
    for results in two_ranks:
        error = results["way_back_fails_on_rank_1"]
        assert error["state"] == IDLE
        assert error["names"][0] == ReshardError.__name__
        assert "disk on fire" in error["text"] and "no memory left" in error["text"]


def test_release_fails_on_one_rank_and_both_go_on(two_ranks: list[dict[str, dict]]):
    for results in two_ranks:
        error = results["release_fails_on_rank_0"]
        assert error["state"] == IDLE
        assert error["names"][0] == ReshardError.__name__
        assert "disk on fire" in error["text"] and "busy" in error["text"]
        assert error["afterwards"] == "goes on"
