"""Fakes of both engines for `ShardingManager`, and a rank built from them.

Tensors are on the GPU of this rank, or on the CPU without one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import KINDS, Guards, Offloadable, OffloadItem
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ranks.job import Job, own_device
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region, Shapes
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.switch.states import State
from hybrid_engine.switch.weight_container import ContainerState
from tests.hybrid_engine.memory.test_offloader import CopiesToHost
from tests.hybrid_engine.planning.cases import whole

TRAIN, FORWARD, INFER, IDLE = State.TRAIN, State.FORWARD, State.INFER, State.IDLE
# Two tensors, each a group of its own. The first fills a bucket of the smallest size, so the plan
# has two buckets.
SHAPES = {"first": (512, 512), "second": (64, 512)}
NUMEL = sum(rows * columns for rows, columns in SHAPES.values())
NBYTES = 4 * NUMEL
TRAINING_NBYTES = {"param": NBYTES, "grad": NBYTES, "optimizer": 2 * NBYTES}
NEEDED = {TRAIN: set(KINDS), FORWARD: {"param"}, INFER: set(), IDLE: set()}


class Script:
    """Records the calls of the fakes in order; an armed call raises once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._armed: dict[str, list[BaseException]] = {}

    def arm(self, call: str, *errors: BaseException) -> None:
        """Make the next calls of `call` raise these errors, one per call.

        Copies are raised: an error keeps the frames it passed through, and pytest keeps the
        parameters of a test alive.
        """
        self._armed.setdefault(call, []).extend(copy.copy(error) for error in errors)

    def reach(self, call: str) -> None:
        self.calls.append(call)
        if self._armed.get(call):
            raise self._armed[call].pop(0)

    def take(self) -> list[str]:
        """Return the calls since the last `take`."""
        calls = self.calls
        self.calls = []
        return calls


class FakeTraining:
    """A trainer with its weights, gradients and optimizer state.

    Rank r of n holds the r-th part of the rows of every tensor in one flat buffer.
    """

    unserved: Sequence[str] = ()
    frozen: Sequence[str] = ()
    process_groups: Sequence[dist.ProcessGroup] = ()

    def __init__(
        self,
        script: Script,
        rank: int,
        num_ranks: int,
        *,
        elastic: bool,
        shapes: Mapping[str, tuple[int, int]] = MappingProxyType(SHAPES),
    ) -> None:
        self.script = script
        self.rank = rank
        self.num_ranks = num_ranks
        self.version = 0
        self.guard = Guards()
        self.shapes = shapes
        self.tensors = dict(shapes)
        numel = sum(rows * columns for rows, columns in shapes.values()) // num_ranks
        device = own_device()
        self.param, self.grad = (
            allocate_elastic(numel, torch.float32, device, kind)
            if elastic
            else torch.zeros(numel, device=device)
            for kind in ("param", "grad")
        )
        self.grad.zero_()  # `allocate_elastic` does not clear memory of a GPU
        values = (
            canonical(name, 0, shape).chunk(num_ranks)[rank].flatten()
            for name, shape in shapes.items()
        )
        self.param.copy_(torch.cat([*values]))
        self.main = self.param.clone()
        self.moment = torch.full((numel,), 0.25, device=device)
        self.moment[:2] = torch.tensor([float("nan"), -0.0])  # compared by bits, not by value
        self._remember()

    @property
    def weights(self) -> FakeTraining:
        return self

    def layout(self) -> Layout:
        self.script.reach("layout")
        buffer_id = BufferId(self.rank, "param")
        offset = 0
        shards = []
        for name, (rows, columns) in self.shapes.items():
            part = rows // self.num_ranks
            shards.append(
                self._shard(name, (self.rank * part, 0), (part, columns), buffer_id, offset)
            )
            offset += part * columns
        buffers = {buffer_id: Buffer(self.param.numel(), "float32")}
        for name in self.tensors.keys() - self.shapes.keys():
            buffers[BufferId(self.rank, name)] = Buffer(4, "float32")
            shards.append(self._shard(name, (0, 0), (2, 2), BufferId(self.rank, name), 0))
        return Layout(self.tensors, buffers, tuple(shards))

    @staticmethod
    def _shard(
        name: str, offsets: tuple[int, int], lengths: tuple[int, int], buffer_id: BufferId, at: int
    ) -> Shard:
        return Shard(Region(name, offsets, lengths), Place(buffer_id, at, (lengths[1], 1)))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        try:
            self.script.reach("buffers")
        except KeyError:
            return {}  # makes a transport fail to find its source
        return {"param": self.param}

    def finish_pending(self) -> None:
        self.script.reach("finish pending")

    def prepare(self) -> None:
        self.script.reach("prepare")

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        self.script.reach("check")

    def offload_items(self) -> list[OffloadItem]:
        return [
            OffloadItem("param", "param", self.param),
            OffloadItem("grad", "grad", self.grad, "drop"),
            OffloadItem("main", "optimizer", self.main),
            OffloadItem("moment", "optimizer", self.moment),
        ]

    def step(self) -> None:
        """Change every tensor as an optimizer step does; gradients remain."""
        self.guard(KINDS)
        self.version += 1
        offset = 0
        for name, (rows, columns) in self.shapes.items():
            numel = rows // self.num_ranks * columns
            if name not in self.frozen:
                self.param[offset : offset + numel].add_(1)
            offset += numel
        self.main.add_(1)
        self.moment[2:].mul_(0.5)
        self.grad.fill_(self.version)
        self._remember()

    def write(self) -> None:
        """Change the last tensor without increasing torch's version counter."""
        self.param.data[-1:] += 1
        self.remember_parameters()

    def remember_parameters(self) -> None:
        """Expect the current parameters from now on; moments may be off the device."""
        self.values["param"] = [self.param.clone()]

    def _remember(self) -> None:
        self.values = {
            "param": [self.param.clone()],
            "optimizer": [self.main.clone(), self.moment.clone()],
        }

    def assert_unchanged(self, kinds: Iterable[str] = ("param", "optimizer")) -> None:
        """Assert that every tensor has the bits it had after the last step."""
        tensors = {"param": [self.param], "optimizer": [self.main, self.moment]}
        for kind in {*kinds} & tensors.keys():
            for tensor, before in zip(tensors[kind], self.values[kind], strict=True):
                assert torch.equal(tensor.view(torch.int32), before.view(torch.int32)), kind


class FakeInference:
    """Inference weights and caches; every rank uses whole tensors, and each tensor is a group."""

    def __init__(
        self, script: Script, rank: int, tensors: Shapes = MappingProxyType(SHAPES)
    ) -> None:
        self.script = script
        self.rank = rank
        self.dtype = "float32"
        self.device = own_device()
        self.tensors = dict(tensors)
        self.live: TensorDict = {}
        self.in_force: set[str] = set()

    def layout(self) -> Layout:
        return Layout.merge(
            whole(name, shape, self.rank, f"{name}.weight", name, self.dtype)
            for name, shape in self.tensors.items()
        )

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        for group in groups:
            self.script.reach(f"allocate {group}")
            self.in_force.discard(group)
            numel = math.prod(self.tensors[group])
            dtype = getattr(torch, self.dtype)
            self.live[group] = torch.zeros(numel, dtype=dtype, device=self.device)
        return {f"{group}.weight": self.live[group] for group in groups}

    def commit(self, groups: Sequence[str]) -> None:
        for group in groups:
            self.script.reach(f"commit {group}")
            self.in_force.add(group)

    def finish_fill(self) -> None: ...

    def abandon(self) -> None: ...

    def shutdown(self) -> None: ...

    def release(self, keep: Collection[str] = ()) -> None:
        self.script.reach("release")
        self.live = {name: flat for name, flat in self.live.items() if name in keep}
        self.in_force.intersection_update(keep)

    def share_memory(self, memories: object, leave: object) -> bool:
        return False

    def give_back(self) -> None:
        self.script.reach("give back")

    def committed(self) -> Collection[str]:
        return self.in_force

    @contextmanager
    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> Iterator[None]:
        self.script.reach("proving")
        yield

    def resident_nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.live.values())

    def wake_kv_cache(self) -> None:
        self.script.reach("wake")

    def reset_caches(self) -> None:
        self.script.reach("reset")


class ScriptedOffloader(Offloader):
    """The real offloader, with calls recorded and failures from the script."""

    def __init__(self, script: Script, owner: Offloadable) -> None:
        super().__init__(owner)
        self.script = script
        self.copies = CopiesToHost(self)

    def offload(self, kinds: Iterable[str] = KINDS, *, late: Collection[str] = ()) -> int:
        """Reach every kind's call first: like the real offloader, move all or none."""
        for kind in self._select(kinds, away=False):
            self.script.reach(f"offload {kind}")
        return super().offload(kinds, late=late)

    def onload(
        self, kinds: Iterable[str] = KINDS, *, read_only: bool = False, late: Collection[str] = ()
    ) -> int:
        """Onload the kinds before a failing one first, like the real offloader."""
        coming = self._select(kinds, away=True)
        for number, kind in enumerate(coming):
            try:
                self.script.reach(f"onload {kind}")
            except OffloadError:
                super().onload(coming[:number], read_only=read_only)
                raise
        return super().onload(kinds, read_only=read_only, late=late)

    def _select(self, kinds: Iterable[str], *, away: bool) -> list[str]:
        wanted = set(kinds)
        return [kind for kind in KINDS if kind in wanted and self.is_offloaded(kind) is away]


class Rig:
    """A rank: a manager between fakes of both engines.

    host, device: arguments of `Job.join`; the fakes do not use them.
    """

    def __init__(
        self,
        *,
        elastic: bool = False,
        build: bool = True,
        host: str = "here",
        device: str | None = None,
        shapes: Mapping[str, tuple[int, int]] = MappingProxyType(SHAPES),
        **settings: object,
    ) -> None:
        self.config = GenerateConfig(**{"bucket_mb": 1, "timeout_seconds": 60, **settings})
        where = None if device is None else torch.device(device)
        self.job = Job.join(self.config.timeout_seconds, host=host, device=where)
        # An elastic buffer on a GPU takes whole chunks, so it is larger than its tensor.
        self.comes_in_chunks = elastic and own_device().type == "cuda"
        self.script = Script()
        place = self.job.rank, self.job.world_size
        self.training = FakeTraining(self.script, *place, elastic=elastic, shapes=shapes)
        self.inference = FakeInference(self.script, self.job.rank, shapes)
        self.offloader = ScriptedOffloader(self.script, self.training)
        if build:
            self.build()

    def build(self, *, start: bool = True) -> None:
        self.manager = ShardingManager(
            trainer=self.training,
            inference=self.inference,
            caches=self.inference,
            offloader=self.offloader,
            config=self.config,
            job=self.job,
        )
        if start:
            self.manager.start()
            self.script.take()

    def close(self) -> None:
        self.manager.close()
        self.job.close()

    def enter(self, state: State) -> ReshardReport | None:
        """Switch, and assert the new state as `assert_is`; return the report."""
        report = self.manager.enter(state)
        self.assert_is(state)
        return report

    def train(self) -> None:
        """Take a step in TRAIN."""
        self.manager.enter(TRAIN)
        self.training.step()

    def fill(self) -> ReshardReport | None:
        """Take a step and send the weights to inference; return the report."""
        self.training.step()
        return self.manager.enter(INFER)

    def resident(self) -> set[str]:
        """Return the kinds on the device; assert that no byte of the other kinds is."""
        nbytes = self.offloader.resident_nbytes()
        for kind in KINDS:
            if self.offloader.is_offloaded(kind):
                assert nbytes[kind] == 0, kind
        return {kind for kind in KINDS if not self.offloader.is_offloaded(kind)}

    def assert_is(self, state: State, kept: Collection[str] = ()) -> None:
        """Assert `state`, the memory that belongs to it, and intact values.

        kept: groups with weights that stay resident; for states other than INFER.
        """
        offloaded = {kind for kind in KINDS if getattr(self.config, f"offload_train_{kind}")}
        assert self.manager.state is state
        assert self.resident() == NEEDED[state] | (set(KINDS) - offloaded)
        self.offloader.wait()
        self.training.assert_unchanged(self.resident())
        if state is not INFER:
            assert set(self.inference.live) == self.inference.in_force == set(kept)
            assert self.manager.container.state is ContainerState.EMPTY
            return
        shapes = self.training.shapes
        assert self.inference.in_force == set(shapes)
        (own,) = self.training.values["param"]
        messages = self.job.agreement.gather(
            own.cpu().numpy().tobytes(), bytes, "comparison of weights"
        )
        trained = [
            torch.frombuffer(bytearray(message), dtype=own.dtype).to(own.device)
            for message in messages
        ]
        sizes = [rows * columns // len(trained) for rows, columns in shapes.values()]
        for name, *parts in zip(shapes, *(flat.split(sizes) for flat in trained), strict=True):
            assert torch.equal(self.inference.live[name], torch.cat(parts)), name


def canonical(name: str, version: int, shape: tuple[int, int] | None = None) -> torch.Tensor:
    """Return the whole tensor after `version` steps; exact in float32."""
    rows, columns = shape or SHAPES[name]
    base = 0 if name == "first" else 1_000_000
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + base + version
