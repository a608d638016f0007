"""The adaptor over a small model, one of whose layers is repacked, in every state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from mmap import PAGESIZE

import pytest
import torch

from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.groups import GroupEvent, GroupState, GroupStates
from hybrid_engine.backends.vllm.weights.processed_model import inspect_model
from hybrid_engine.backends.vllm.weights.traced_model import trace_model
from hybrid_engine.errors import ParameterMismatchError, StateError
from tests.harness.errors import refused
from tests.hybrid_engine.backends.vllm.made_up_methods import (
    COLUMNS,
    ROWS,
    Model,
    build_adaptor,
    transposed,
    untouched,
)
from tests.hybrid_engine.backends.vllm.support import differences

pytestmark = pytest.mark.slow  # imports vLLM

Named = Iterable[tuple[str, torch.Tensor]]

GROUPS = ["linear", "norm"]
NBYTES = ROWS * COLUMNS * 4
"""Bytes of each layer."""


class Computing(torch.nn.Module):
    """Three modules. The loader doubles `both` over the first two and copies into the third."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 4, False)
        self.two = torch.nn.Linear(4, 4, False)
        self.three = torch.nn.LayerNorm(4)
        self.calls: list[list[str]] = []

    def load_weights(self, weights: Named) -> None:
        named = dict(weights)
        self.calls.append(sorted(named))
        if "both" in named:
            self.one.weight.data.copy_((named["both"] * 2)[:4])
            self.two.weight.data.copy_((named["both"] * 2)[4:])
        for name in ("weight", "bias"):
            if name in named:
                getattr(self.three, name).data.copy_(named[name])


def two_layers() -> Model:
    """Return a model in which `linear` is repacked, and `norm` is live."""
    return Model(linear=transposed, norm=untouched)


def fill(adaptor: VllmAdaptor, seed: int, groups: Iterable[str] = GROUPS) -> None:
    for group in groups:
        for flat in adaptor.allocate([group]).values():
            flat.copy_(adaptor.model.weights(seed)[group].flatten())
        adaptor.commit([group])
    adaptor.finish_fill()


def computes(adaptor: VllmAdaptor, linear: int, norm: int) -> bool:
    """Return whether the model is ready and has the weights of these seeds, as after vLLM's own
    load.
    """
    adaptor.require_ready()
    fresh = two_layers()
    fresh.load_weights(
        {"linear": fresh.weights(linear)["linear"], "norm": fresh.weights(norm)["norm"]}.items()
    )
    fresh.process()
    return differences(adaptor.model.held(), fresh.held()) == []


def void(adaptor: VllmAdaptor) -> None:
    adaptor.void({buffer.group for buffer in adaptor.layout().buffers.values()})


def released(adaptor: VllmAdaptor) -> None:
    adaptor.release()


def filling(adaptor: VllmAdaptor) -> None:
    adaptor.allocate(GROUPS)


def committed(adaptor: VllmAdaptor) -> None:
    fill(adaptor, 0)


def failed_while_allocating(adaptor: VllmAdaptor) -> None:
    adaptor.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuWeightMemory, "new", fail)
        with pytest.raises(MemoryError):
            adaptor.allocate(GROUPS)


def failed_while_committing(adaptor: VllmAdaptor) -> None:
    adaptor.allocate(GROUPS)
    with adaptor.observed(fail), pytest.raises(MemoryError):
        adaptor.commit(GROUPS)


def fail(*_: object) -> None:
    raise MemoryError


States = [void, released, filling, committed, failed_while_allocating, failed_while_committing]


@pytest.fixture
def adaptor() -> VllmAdaptor:
    return build_adaptor(two_layers(), keeps_addresses=False)


@pytest.mark.parametrize("enter", States)
def test_weights_are_filled_kept_and_released_from_every_state(
    adaptor: VllmAdaptor, enter: Callable
) -> None:
    enter(adaptor)
    resident = adaptor.resident_nbytes()
    is_committed = enter is committed
    if enter not in (filling, failed_while_committing):
        with refused(StateError, "event-refused", "linear, norm"):
            adaptor.commit(GROUPS)
        assert adaptor.resident_nbytes() == resident
        assert not is_committed or computes(adaptor, 0, 0), "the refusal lost the weights"
    fill(adaptor, 1)
    assert computes(adaptor, 1, 1)
    assert adaptor.resident_nbytes() == 2 * NBYTES == adaptor.nbytes
    enter(adaptor)
    adaptor.release(GROUPS)
    assert list(adaptor.committed()) == (GROUPS if is_committed else []), (
        "only committed weights are kept"
    )
    assert adaptor.resident_nbytes() == (2 * NBYTES if is_committed else 0)
    enter(adaptor)
    adaptor.release()
    assert adaptor.resident_nbytes() == 0
    with refused(StateError, "weights-released"):
        adaptor.require_ready()


def test_groups_that_were_not_committed_can_be_committed_later(adaptor: VllmAdaptor) -> None:
    """The first commit is refused, and the second fails in one of two groups."""
    adaptor.release()
    adaptor.allocate(["linear"])
    with refused(StateError, "event-refused", "norm"):
        adaptor.commit(GROUPS)
    (norm,) = adaptor.allocate(["norm"]).values()
    norm.copy_(adaptor.model.weights(3)["norm"].flatten())
    with adaptor.observed(fail), pytest.raises(MemoryError):
        adaptor.commit(GROUPS)
    adaptor.commit(["norm"])
    fill(adaptor, 3, ["linear"])
    assert computes(adaptor, 3, 3)


def test_void_weights_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    adaptor = build_adaptor(two_layers(), keeps_addresses=False, keeps_memory=True)
    freed = []
    monkeypatch.setattr(CpuWeightMemory, "free_kv_cache", lambda _: freed.append("KV cache"))
    assert adaptor.resident_nbytes() == adaptor.nbytes, "zeros must be packed like weights"
    fill(adaptor, 0)
    resident = adaptor.resident_nbytes()  # with staging pages of the fill
    adaptor.release()
    assert freed == ["KV cache"]
    assert adaptor.resident_nbytes() == resident == adaptor.nbytes + PAGESIZE, (
        "pages for staging count as well"
    )
    with refused(StateError, "weights-uncommitted", "2 of 2"):
        adaptor.require_ready()
    fill(adaptor, 1)
    assert adaptor.resident_nbytes() == resident
    adaptor.release(["norm"])
    assert list(adaptor.committed()) == ["norm"]
    fill(adaptor, 0, ["linear"])
    assert computes(adaptor, 0, 1)


@pytest.mark.parametrize(("kept", "released"), [GROUPS, GROUPS[::-1]])
def test_kept_groups_stay_committed_and_the_others_can_be_filled(
    adaptor: VllmAdaptor, kept: str, released: str
) -> None:
    fill(adaptor, 0)
    adaptor.release([kept])
    assert list(adaptor.committed()) == [kept]
    assert adaptor.resident_nbytes() == NBYTES
    with refused(StateError, "weights-uncommitted", "1 of 2", released):
        adaptor.require_ready()
    fill(adaptor, 1, [released])
    assert computes(adaptor, **{kept: 0, released: 1})
    adaptor.release()
    assert adaptor.resident_nbytes() == 0


def test_memory_freed_as_a_whole_keeps_no_group(
    adaptor: VllmAdaptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(adaptor, 0)
    monkeypatch.setattr(CpuWeightMemory, "frees_all_at_once", True)  # like vLLM's sleep mode
    adaptor.release(GROUPS)
    assert list(adaptor.committed()) == []
    assert adaptor.resident_nbytes() == 0


def test_memory_after_a_failed_wake_up_is_freed_again(
    adaptor: VllmAdaptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptor.release()
    freed = []
    monkeypatch.setattr(CpuWeightMemory, "free", lambda _, live: freed.append(set(live)))
    adaptor.release()
    assert freed == [], "released memory was freed again"
    # Like a wake-up out of memory.
    monkeypatch.setattr(CpuWeightMemory, "is_given_back", lambda *_: False)
    adaptor.release()
    assert freed == [{"norm.weight"}]


def test_views_of_live_weights_stay_valid_through_a_release(adaptor: VllmAdaptor) -> None:
    fill(adaptor, 0)
    view = adaptor.model.norm.weight.data[:5]  # a kernel may hold such a view
    adaptor.release()
    fill(adaptor, 1)
    assert torch.equal(view, adaptor.model.weights(1)["norm"][:5])


def test_a_verified_fill_reports_weights_that_vllm_does_not_compute_with(
    adaptor: VllmAdaptor,
) -> None:
    norm = adaptor.model.norm
    reports: list[str] = []
    with adaptor.proving(GROUPS, reports.append):
        fill(adaptor, 0)
    assert reports == []
    with adaptor.proving(["norm"], reports.append):
        fill(adaptor, 1)
        norm.weight.data[0] += 1
    with (
        adaptor.proving(["norm"], reports.append),
        adaptor.observed(
            lambda *_: setattr(norm, "weight", torch.nn.Parameter(norm.weight.data.clone()))
        ),
    ):
        fill(adaptor, 2)
    assert [report.partition("rank 0, ")[2] for report in reports] == [
        "vLLM's weights changed after they were committed",
        "vLLM's norm.weight is not the tensor that was filled",
    ]


def adaptor_of(model: Computing) -> VllmAdaptor:
    shapes = {"both": (8, 4), "weight": (4,), "bias": (4,)}
    traced = trace_model(model, shapes, dict.fromkeys(shapes, torch.float32), rank=0)
    processed = inspect_model(traced, contextlib.nullcontext, torch.float32, keeps_addresses=False)
    return VllmAdaptor(processed, CpuWeightMemory())


def test_untraceable_tensors_are_written_by_the_loader() -> None:
    model = Computing()
    expected = Computing()
    adaptor = adaptor_of(model)
    assert adaptor.staged == ("both",)
    buffers = adaptor.layout().buffers
    groups = {buffer_id.name: buffer.group for buffer_id, buffer in buffers.items()}
    assert (
        groups["one.weight"]
        == groups["two.weight"]
        == groups["staged:both"]
        != groups["three.weight"]
    )
    for _ in range(2):
        weights = {"both": torch.randn(8, 4), "weight": torch.randn(4), "bias": torch.randn(4)}
        expected.load_weights(weights.items())
        for group in dict.fromkeys(groups.values()):
            for name, flat in adaptor.allocate([group]).items():
                source = weights.get(
                    name.removeprefix("staged:"), weights.get(name.rpartition(".")[2])
                )
                if name.startswith(("staged:", "three.")):
                    flat.copy_(source.flatten())
                else:
                    assert not flat.any()  # what the loader leaves as it was is zero
            adaptor.commit([group])
        assert model.calls[-1] == ["both"]
        for parameter, expected_parameter in zip(
            model.parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(parameter, expected_parameter)
        adaptor.release()
        assert adaptor.resident_nbytes() == 0


class Resetting(Computing):
    """Every call of the loader resets a parameter of another group."""

    def load_weights(self, weights: Named) -> None:
        self.three.bias.data.zero_()
        super().load_weights(weights)


class AllAtOnce(Computing):
    """The loader writes only when it gets all tensors."""

    def load_weights(self, weights: Named) -> None:
        named = dict(weights)
        super().load_weights(named.items() if len(named) == 3 else ())


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Resetting, "also writes three.bias"),
        (AllAtOnce, "leaves some of one.weight as it was and leaves some of two"),
    ],
)
def test_a_loader_that_cannot_write_a_single_group_is_refused(
    model: type[Computing], problem: str
) -> None:
    with pytest.raises(ParameterMismatchError, match=f"both: .*{problem}"):
        adaptor_of(model())


# -- states ----------------------------------------------------------------------------------------


def test_an_event_moves_all_named_groups_or_none() -> None:
    states = GroupStates(("a", "b", "c"))
    states.advance(GroupEvent.ALLOCATE, ["a"])
    with refused(StateError, "event-refused", ": b, c"):
        states.advance(GroupEvent.COMMIT, ["a", "b", "c"])
    with refused(StateError, "unknown-group", "x, y"):
        states.advance(GroupEvent.COMMIT, ["a", "x", "y"])
    assert states.among(GroupState.FILLING) == ["a"]
    states.advance(GroupEvent.COMMIT, ["a"])
    assert [states.among(state) for state in (GroupState.COMMITTED, GroupState.VOID)] == [
        ["a"],
        ["b", "c"],
    ]


@pytest.mark.parametrize("groups", [(), ("a",)])
def test_only_ranks_without_weights_are_ready_after_a_release(groups: tuple[str, ...]) -> None:
    states = GroupStates(groups)
    states.advance(GroupEvent.RELEASE)
    is_refused = refused(StateError, "weights-released")
    with is_refused if groups else contextlib.nullcontext():
        states.require_committed()
