"""Every wait of the product is needed: without it the checker reports, or the product fails."""

from __future__ import annotations

import gc
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.vllm import internals, requests
from hybrid_engine.backends.vllm.process_state import ProcessSettings, process_settings_kept
from hybrid_engine.backends.vllm.weights.weight_memory import SleepingSegments, SleepMode
from hybrid_engine.errors import DeviceMemoryError, OffloadError
from hybrid_engine.memory import arena
from hybrid_engine.memory.arena import Copier, QueuedCopy
from hybrid_engine.memory.cuda_driver import CudaDriver, driver_of
from hybrid_engine.memory.device_pages import Chunks, DevicePeer
from hybrid_engine.memory.elastic import allocate_elastic, export_tensor, open_peer
from hybrid_engine.memory.host_pages import tensor_over
from hybrid_engine.memory.offload_items import KINDS, LATE_KINDS, Kind, Storage
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.memory.pool import AddressRange, Pool
from tests.software_gpu import mutants_on_ranks as on_ranks
from tests.software_gpu.device import Reports
from tests.software_gpu.mutants import Mutant
from tests.software_gpu.training_state import TrainingState, leave_and_come_back

DEVICE = torch.device("cuda", 0)
CHUNK_NBYTES = 2 * 2**20
NUMEL = 500_000


@pytest.fixture(autouse=True)
def _require_no_leftovers() -> None:
    """Override the check: a job that is broken on purpose may leave something."""


# -- offload and onload of training state
# ------------------------------------------------------------------------------


def trained() -> TrainingState:
    state = TrainingState(0, CHUNK_NBYTES)
    state.train()
    return state


def moved(leave: str, come: str = "whole") -> None:
    leave_and_come_back(TrainingState(0, CHUNK_NBYTES), leave, come, 0)


def memory_that_others_take() -> None:
    state = trained()
    state.offloader.offload()
    kept = [torch.full_like(tensor, 7, device=DEVICE) for tensor in state.kept]
    state.offloader.onload()
    state.require_intact()
    assert all(bool((tensor == 7).all()) for tensor in kept)


def read_while_it_is_saved() -> None:
    """Read parts while they are copied to the host, then release them, as a bucket does."""
    state = trained()
    torch.cuda.synchronize()
    parts = state.parts(random.Random(0))
    state.offloader.save_parts("param", parts)
    sums = [part.flat[part.start : part.stop].sum() for part in parts]
    state.offloader.offload_parts("param", parts)
    state.offloader.onload()
    state.require_intact(has_dropped=False)
    del sums


def ended_while_it_is_saved() -> None:
    """End the owner without a wait for a started save, as after a lost rank."""
    state = trained()
    torch.cuda.synchronize()
    state.offloader.save_parts("param", state.parts(random.Random(0)))
    del state
    gc.collect()
    torch.cuda.synchronize()


def saved_and_kept() -> None:
    """Start to save parameters, keep them, and train them."""
    state = trained()
    torch.cuda.synchronize()
    state.offloader.save_parts("param", state.parts(random.Random(0)))
    state.offloader.onload()
    state.train()
    torch.cuda.synchronize()


def interrupted_on_the_way_back() -> None:
    """Interrupt before the copies to the device are over, then offload everything again."""
    state = trained()
    state.offloader.offload()
    with (
        mock.patch.object(Offloader, "_complete", side_effect=KeyboardInterrupt),
        suppress(KeyboardInterrupt),
    ):
        state.offloader.onload()
    state.offloader.offload()
    state.offloader.onload()
    state.require_intact()


is_mutated = False


def _no_wait_of_host_memory() -> AbstractContextManager[object]:
    """Return a context in which host memory, which may end first, does not wait for copies in place
    of a mutant.
    """
    return mock.patch.object(Copier, "finish_all") if is_mutated else nullcontext()


def ended_on_its_way() -> None:
    """End the owner while its optimizer state is late, and reuse the memory."""
    state = trained()
    state.offloader.offload()
    state.offloader.onload(late=LATE_KINDS)
    numels = [tensor.numel() for tensor in state.kept[1:]]
    with _no_wait_of_host_memory():
        del state
        gc.collect()
    others = [torch.full((numel,), 7.0, device=DEVICE) for numel in numels]
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in others)


def given_up_on_the_way_back() -> None:
    """Run out of memory at the second tensor; end the owner, and reuse the memory of the first."""
    state = trained()
    state.offloader.offload()
    take_back = Storage.take_back
    numbers = itertools.count()

    def taken_back(storage: Storage) -> Iterator[tuple[int, int]]:
        if next(numbers) == 1:
            raise DeviceMemoryError("no memory", is_out_of_memory=True)
        return take_back(storage)

    with mock.patch.object(Storage, "take_back", taken_back), pytest.raises(OffloadError):
        state.offloader.onload(["optimizer"])
    numel = state.kept[1].numel()
    with _no_wait_of_host_memory():
        del state
        gc.collect()
    others = [torch.full((numel,), 7.0, device=DEVICE) for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in others)


# -- memory read by other processes
# ------------------------------------------------------------------------------------


def ended_while_it_is_written() -> None:
    ones = torch.ones(NUMEL, pin_memory=True)
    stream = torch.cuda.Stream()
    flat = allocate_elastic(NUMEL, torch.float32, DEVICE, "param")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        flat.copy_(ones, non_blocking=True)
    del flat
    gc.collect()
    torch.cuda.synchronize()


@contextmanager
def read_as_a_peer() -> Iterator[None]:
    """Queue a read of memory through another mapping, which ends with the block."""
    on_host = torch.zeros(NUMEL, pin_memory=True)
    flat = allocate_elastic(NUMEL, torch.float32, DEVICE, "param").fill_(1)
    torch.cuda.synchronize()
    peer = open_peer(export_tensor(flat), DEVICE)
    with closing(peer), suppress(ZeroDivisionError), peer.mapped() as mapped:
        on_host.copy_(mapped, non_blocking=True)
        yield
    torch.cuda.synchronize()
    assert on_host.sum().item() == NUMEL


def read() -> None:
    with read_as_a_peer():
        pass


def read_until_a_failure() -> None:
    with read_as_a_peer():
        raise ZeroDivisionError


def shared(late: Sequence[Kind] = ()) -> None:
    """Leave memory to a KV cache, and take it back while a step of vLLM still reads that."""
    state = trained()
    state.offloader.offload(["grad", "optimizer"])
    chunks = state.offloader.chunks(KINDS)
    driver = driver_of(0)
    nbytes = 4 * CHUNK_NBYTES
    address = driver.reserve(nbytes)
    ranges = [AddressRange(address, nbytes, address, is_late=True, is_last=True)]
    pool = Pool(driver, chunks["grad"], chunks["param"], ranges)
    cache = tensor_over(address, nbytes, DEVICE, None)
    data = SimpleNamespace(handle=(0, nbytes, address, 0), tag="kv_cache", is_asleep=False)
    sleep_mode = SleepMode(lambda: None)
    sleep_mode._pool = pool
    sleep_mode._leave = lambda: state.offloader.offload
    stream = torch.cuda.Stream()
    drawn = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    with (
        mock.patch.multiple(
            internals,
            MEM_ALLOCATOR=lambda: SimpleNamespace(pointer_to_data={address: data}),
            CREATE_AND_MAP=loading(lambda handle: pool.segments[handle[2]].wake()),
            UNMAP_AND_RELEASE=loading(lambda handle: pool.segments[handle[2]].sleep()),
        ),
    ):
        sleep_mode.free_kv_cache()
        assert state.offloader.offload(late=late) > 0
        sleep_mode.wake_kv_cache()
        assert not sleep_mode.pending().nbytes
        cache.fill_(3)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            drawn.copy_(cache, non_blocking=True)
        sleep_mode.free_kv_cache()
    state.offloader.onload()
    state.require_intact()
    num_drawn = int((drawn == 3).sum())
    assert num_drawn == nbytes
    state.offloader.offload()
    pool.give_back()
    driver.unreserve(address, nbytes)


def loading(function: Callable[..., None]) -> SimpleNamespace:
    """Return a private name of vLLM that is this function."""
    return SimpleNamespace(load=lambda: function)


# -- vLLM's steps
# --------------------------------------------------------------------------------------------------


def written_after_a_failed_step() -> None:
    """Write the weights while a step of a failed call is still queued on vLLM's stream."""
    weights = torch.ones(NUMEL, device=DEVICE)
    drawn = torch.zeros(NUMEL, pin_memory=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        drawn.copy_(weights, non_blocking=True)
    requests.abandon(idle_llm())
    weights.fill_(2)
    torch.cuda.synchronize()


def computed_on_a_stream_of_vllm() -> None:
    """Zero the caches before and after vLLM computes on a separate stream."""
    on_host = torch.ones(NUMEL, pin_memory=True)
    cache = torch.empty(NUMEL, device=DEVICE)
    settings = replace(ProcessSettings.now(), stream=torch.cuda.Stream())
    torch.cuda.synchronize()
    cache.copy_(on_host, non_blocking=True)
    with process_settings_kept(settings):
        computed = cache + 1
        on_host.copy_(cache, non_blocking=True)
    cache.zero_()
    torch.cuda.synchronize()
    assert computed.sum().item() == 2 * NUMEL


def idle_llm() -> SimpleNamespace:
    """Return the attributes of vLLM that `abandon` uses, without requests."""
    core = mock.Mock(batch_queue=None)
    core.scheduler = mock.Mock(requests={}, finished_req_ids=set())
    core.model_executor.driver_worker.worker.model_runner = SimpleNamespace(requests={})
    outputs = SimpleNamespace(request_states={}, parent_requests={}, external_req_ids={})
    engine = SimpleNamespace(
        reset_encoder_cache=lambda: None,
        engine_core=SimpleNamespace(engine_core=core),
        output_processor=outputs,
    )
    return SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True)


# -- in this process
# --------------------------------------------------------------------------------------------------


def _no_seconds(*_: object) -> float:
    return 0.0


SCENARIOS: Mapping[str, Callable[[], None]] = {
    "leaves whole": partial(moved, "whole"),
    "leaves in parts": partial(moved, "in parts"),
    "is called off": partial(moved, "called off and again"),
    "comes late": partial(moved, "whole", "late"),
    "comes late and ends": ended_on_its_way,
    "others take its memory": memory_that_others_take,
    "is read while it is saved": read_while_it_is_saved,
    "is saved and stays": saved_and_kept,
    "ends while it is saved": ended_while_it_is_saved,
    "interrupted": interrupted_on_the_way_back,
    "given up": given_up_on_the_way_back,
    "memory ends": ended_while_it_is_written,
    "read": read,
    "read until a failure": read_until_a_failure,
    "shares its memory": shared,
    "shares it late": partial(shared, ["param"]),
    "a failed step": written_after_a_failed_step,
    "a stream of vLLM": computed_on_a_stream_of_vllm,
}
MUTANTS: Mapping[str, Mutant] = {
    "copies do not wait for what is computed": Mutant(
        "leaves in parts", torch.cuda.Stream, "wait_stream", arena.Copier.copy
    ),
    "an offload does not wait for other streams": Mutant(
        "leaves whole", Offloader, "_synchronize", Offloader.offload
    ),
    "storages go before they are saved": Mutant(
        "others take its memory", Storage, "wait_saved", Offloader._take_off
    ),
    "pages go before they are saved": Mutant(
        "leaves in parts", Storage, "wait_saved", Offloader._release_saved
    ),
    "pages go before they are read": Mutant(
        "is read while it is saved",
        CudaDriver,
        "finish_stream",
        Chunks.release,
    ),
    "contents are used before they are back": Mutant(
        "comes late", QueuedCopy, "wait", Storage._await_arrivals, _no_seconds
    ),
    "what is called off goes before it is there": Mutant(
        "is called off", Storage, "_await_arrivals", Storage.call_off
    ),
    "memory of what is late goes to others": Mutant(
        "comes late and ends", torch.Tensor, "record_stream", Copier.copy
    ),
    "what stays is trained before it is saved": Mutant(
        "is saved and stays", Storage, "wait_saved", Offloader._put_back
    ),
    "host memory goes before copies to it are over": Mutant(
        "ends while it is saved", Copier, "finish_all"
    ),
    "what comes goes before it is there": Mutant(
        "interrupted", Storage, "_await_arrivals", Storage.call_off
    ),
    "what came goes before it is there": Mutant(
        "given up", Storage, "complete", Offloader._onload_kind
    ),
    "memory ends before it is written": Mutant(
        "memory ends", CudaDriver, "synchronize", Chunks.end
    ),
    "a peer's memory goes before it is read": Mutant(
        "read", CudaDriver, "finish_stream", DevicePeer.mapped
    ),
    "so it does after a failure": Mutant(
        "read until a failure", CudaDriver, "finish_stream", DevicePeer.mapped
    ),
    "inference writes what is not saved yet": Mutant("shares its memory", Storage, "wait_saved"),
    "training writes what inference still reads": Mutant(
        "shares its memory", torch.cuda, "synchronize", SleepingSegments.sleep
    ),
    "weights are written before a failed step reads them": Mutant(
        "a failed step", torch.cuda, "synchronize", requests.abandon
    ),
    "vLLM's stream does not wait, nor is it waited for": Mutant(
        "a stream of vLLM", torch.cuda.Stream, "wait_stream", ProcessSettings.enter
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_detected(
    name: str, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(sys.modules[__name__], "is_mutated", True)
    error = ""
    gc.collect()  # Host memory of an earlier scenario waits for its copies when it is freed.
    torch.cuda.synchronize()
    with mutant.applied():
        try:
            SCENARIOS[mutant.scenario]()
        except (AssertionError, RuntimeError) as failure:
            error = str(failure)
        torch.cuda.synchronize()
    text = f"{reports.new()}\n{error}"
    assert re.search(mutant.noticed, text, re.MULTILINE), f"without {mutant.name}: {text}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_with_all_waits_nothing_is_reported(name: str) -> None:
    SCENARIOS[name]()


# -- on two ranks
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory, reports: Reports) -> dict[str, str]:
    """Return the reports and errors on ranks, by name of the scenario or the mutant."""
    names = [*on_ranks.SCENARIOS, *on_ranks.MUTANTS]
    texts = on_ranks.noticed_on_ranks(tmp_path_factory.mktemp("ranks"), names)
    reports.new()
    return texts


@pytest.mark.engines
@pytest.mark.ranks
@pytest.mark.slow
class TestOnRanks:
    @pytest.mark.parametrize("name", on_ranks.MUTANTS)
    def test_a_missing_wait_is_detected(self, name: str, noticed: dict[str, str]) -> None:
        mutant = on_ranks.MUTANTS[name]
        assert re.search(mutant.noticed, noticed[name], re.MULTILINE), (
            f"without {mutant.name}: {noticed[name]}"
        )

    @pytest.mark.parametrize("name", on_ranks.SCENARIOS)
    def test_with_all_waits_nothing_is_reported(self, name: str, noticed: dict[str, str]) -> None:
        assert noticed[name] == ""
