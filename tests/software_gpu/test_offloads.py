"""Every way of offload and onload restores the contents, in the order of streams."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from benchmarks.timings import taken_nbytes
from hybrid_engine.errors import OffloadError
from hybrid_engine.memory.device_pages import CHUNK_NBYTES
from hybrid_engine.memory.elastic import reserve_elastic, restore_elastic
from hybrid_engine.memory.offload_items import Kind
from megatron_patches import optimizers
from megatron_patches.optimizers import OptimizerTensor
from tests.harness.errors import refused
from tests.software_gpu.device import NOT_SUPPORTED, failing
from tests.software_gpu.training_state import (
    WAYS_TO_COME,
    WAYS_TO_LEAVE,
    TrainingState,
    leave_and_come_back,
)

MIB = 2**20
DEVICE = torch.device("cuda", 0)
NUM_TENSORS = 32
NUMEL = 3 * 2**20
MOST_KEPT_NBYTES = 48 * 2**20


@pytest.fixture(scope="module")
def state() -> TrainingState:
    return TrainingState(0)


@pytest.mark.parametrize(("leave", "come"), [*itertools.product(WAYS_TO_LEAVE, WAYS_TO_COME)])
def test_contents_are_restored(state: TrainingState, leave: str, come: str) -> None:
    leave_and_come_back(
        state, leave, come, seed=10 * [*WAYS_TO_LEAVE].index(leave) + [*WAYS_TO_COME].index(come)
    )


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_an_onload_that_fails_can_be_repeated(state: TrainingState, call: str, first: int) -> None:
    """Two calls fail in a row: a failed one is repeated after torch has returned memory."""
    state.train()
    state.offloader.offload()
    with failing(call, first, 2), pytest.raises(OffloadError, match=call):
        state.offloader.onload()
    state.offloader.onload()
    state.require_intact()


@pytest.mark.parametrize("name", ["param", "optimizer"])
def test_an_offload_whose_copy_fails_restores_everything(state: TrainingState, name: Kind) -> None:
    state.train()
    with failing("cuMemcpyAsync", error=NOT_SUPPORTED), refused(OffloadError, "offload-failed"):
        state.offloader.offload([name])
    state.require_intact(has_dropped=False)
    state.offloader.offload()
    state.offloader.onload()
    state.require_intact()


def test_a_failed_registration_of_host_memory_restores_everything() -> None:
    """The arena is allocated once and kept, so this needs a new state."""
    fresh = TrainingState(1)
    fresh.train()
    with failing("cuMemHostRegister", num=100), refused(OffloadError, "offload-failed"):
        fresh.offloader.offload()
    fresh.require_intact(has_dropped=False)
    fresh.offloader.offload()
    fresh.offloader.onload()
    fresh.require_intact()


def test_an_onload_collects_garbage_if_memory_is_short(state: TrainingState) -> None:
    """A tensor in a reference cycle takes all free memory of the device."""
    state.train()
    state.offloader.offload()
    garbage = [torch.empty(torch.cuda.mem_get_info()[0] - MIB, dtype=torch.uint8, device="cuda")]
    garbage.append(garbage)  # type: ignore[arg-type]
    gc.disable()
    try:
        del garbage
        assert torch.cuda.mem_get_info()[0] <= MIB
        state.offloader.onload()
    finally:
        gc.enable()
    state.require_intact()


def test_old_memory_is_released_while_new_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer state moves to elastic memory; the driver's count includes memory that torch keeps
    of moved tensors.
    """
    monkeypatch.setattr(optimizers, "_MAX_CACHED_NBYTES", MOST_KEPT_NBYTES)
    torch.cuda.empty_cache()
    tensors = [torch.full((NUMEL,), float(number), device=DEVICE) for number in range(NUM_TENSORS)]
    before = taken_nbytes(DEVICE)
    taken: list[int] = []

    def give_memory(flat: torch.Tensor, stop: int) -> None:
        restore_elastic(flat, stop)
        taken.append(taken_nbytes(DEVICE))

    home = optimizers._BufferPlace()
    moved = [
        OptimizerTensor(str(number), "moment", "exp_avg", tensor)
        for number, tensor in enumerate(tensors)
    ]
    home.adopt(moved, "", reserve_elastic, give_memory)
    assert home.without(moved) == []
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    state_nbytes = 4 * NUM_TENSORS * NUMEL
    slack = CHUNK_NBYTES + 4 * NUMEL
    assert state_nbytes > 4 * (MOST_KEPT_NBYTES + slack), "a second copy would not be detected"
    assert max(taken) - before <= MOST_KEPT_NBYTES + slack
