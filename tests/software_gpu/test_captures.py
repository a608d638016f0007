"""Rules of stream captures: forbidden calls, their effect on the capture, and order in a graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl

from tests.software_gpu.device import Reports, library

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = range(
    900, 909
)
BLOCKING, NON_BLOCKING = range(2)
NUMEL = 1024


class Capture:
    """A capture of a stream.

    Attributes:
        handle: handle of the stream.
        other: a stream that is not captured.
        earlier: event recorded on `other`.
        captured: event recorded in the capture.
    """

    def __init__(self, mode: int = GLOBAL, flags: int = NON_BLOCKING) -> None:
        self.handle = ctypes.c_void_p()
        assert library().cuStreamCreate(ctypes.byref(self.handle), flags) == 0
        self.other = torch.cuda.Stream()
        self.earlier = self.other.record_event()
        self.captured = torch.cuda.Event()
        assert library().cuStreamBeginCapture_v2(self.handle, mode) == 0
        self.captured.record(torch.cuda.ExternalStream(self.handle.value or 0))

    def end(self) -> int:
        """Return the driver's error."""
        graph = ctypes.c_void_p()
        error: int = library().cuStreamEndCapture(self.handle, ctypes.byref(graph))
        assert bool(graph) == (not error)
        if graph:
            library().cuGraphDestroy(graph)
        return error


NewCapture = Callable[..., Capture]


@pytest.fixture
def new_capture() -> Iterator[NewCapture]:
    """Return a function that begins captures, which end with the test at the latest."""
    captures: list[Capture] = []

    def new(*arguments: int) -> Capture:
        captures.append(Capture(*arguments))
        return captures[-1]

    yield new
    for capture in captures:
        capture.end()


Fill = Callable[[ctypes.c_void_p | None], int]


@pytest.fixture
def fill() -> Fill:
    """Return a function that queues a fill of a byte on a stream and returns the driver's error."""
    byte = torch.empty(1, dtype=torch.uint8, device="cuda")

    def put(stream: ctypes.c_void_p | None) -> int:
        return int(library().cuMemsetD8Async(ctypes.c_uint64(byte.data_ptr()), 0, ctypes.c_size_t(1), stream))

    return put


Call = Callable[[Capture], int]


def handle_of(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


def allocate(_capture: Capture) -> int:
    address = ctypes.c_uint64()
    error: int = library().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(512))
    if not error:
        library().cuMemFree_v2(address)
    return error


def copy(_capture: Capture) -> int:
    bytes_of_host = (ctypes.create_string_buffer(8), ctypes.create_string_buffer(8))
    return int(library().cuMemcpy(*map(ctypes.byref, bytes_of_host), ctypes.c_size_t(8)))


CONFLICTING: Mapping[str, Call] = {
    "wait for the stream": lambda capture: library().cuStreamSynchronize(capture.handle),
    "ask for the stream": lambda capture: library().cuStreamQuery(capture.handle),
    "wait for the device": lambda _: library().cuCtxSynchronize(),
}
"""Calls that no mode permits in any thread."""
UNSAFE: Mapping[str, Call] = {
    "allocate": allocate,
    "copy": copy,
    "wait for another stream": lambda capture: library().cuStreamSynchronize(handle_of(capture.other)),
    "ask for another stream": lambda capture: library().cuStreamQuery(handle_of(capture.other)),
    "wait for an event": lambda capture: library().cuEventSynchronize(ctypes.c_void_p(capture.earlier.cuda_event)),
    "ask for an event": lambda capture: library().cuEventQuery(ctypes.c_void_p(capture.earlier.cuda_event)),
}
"""Calls that only some modes permit."""


@contextmanager
def mode_of_thread(mode: int) -> Iterator[None]:
    value = ctypes.c_int(mode)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    try:
        yield
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))


@pytest.mark.parametrize("mode", [GLOBAL, RELAXED])
@pytest.mark.parametrize("name", [*CONFLICTING])
def test_waits_for_the_captured_stream_are_refused(new_capture: NewCapture, fill: Fill, name: str, mode: int) -> None:
    capture = new_capture(mode)
    assert CONFLICTING[name](capture) == UNSUPPORTED
    assert fill(capture.handle) == INVALIDATED
    assert capture.end() == INVALIDATED
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", [*UNSAFE])
def test_calls_that_a_graph_cannot_repeat_are_refused(new_capture: NewCapture, name: str) -> None:
    capture = new_capture()
    assert UNSAFE[name](capture) == UNSUPPORTED
    assert capture.end() == INVALIDATED


@pytest.mark.parametrize(
    ("mode", "is_other_thread", "mode_there", "is_allowed"),
    [
        (RELAXED, False, GLOBAL, True),
        (THREAD_LOCAL, False, GLOBAL, False),
        (GLOBAL, False, THREAD_LOCAL, False),
        (GLOBAL, False, RELAXED, True),
        (GLOBAL, True, GLOBAL, False),
        (GLOBAL, True, THREAD_LOCAL, True),
        (THREAD_LOCAL, True, GLOBAL, True),
    ],
)
def test_modes_of_captures_and_of_threads(
    new_capture: NewCapture, mode: int, is_other_thread: bool, mode_there: int, is_allowed: bool
) -> None:
    """The cases are those of the driver's manual at cuThreadExchangeStreamCaptureMode."""
    capture = new_capture(mode)

    def call() -> list[int]:
        torch.cuda.set_device(0)  # A new thread has no context.
        with mode_of_thread(mode_there):
            return [UNSAFE[name](capture) for name in ("allocate", "ask for an event")]

    with ThreadPoolExecutor(1) as thread:
        errors = thread.submit(call).result() if is_other_thread else call()
    assert errors == ([0, 0] if is_allowed else [UNSUPPORTED, INVALIDATED])
    assert capture.end() == (0 if is_allowed else INVALIDATED)


def test_the_host_cannot_wait_for_a_captured_event(new_capture: NewCapture) -> None:
    capture = new_capture(RELAXED)
    event = ctypes.c_void_p(capture.captured.cuda_event)
    assert library().cuEventQuery(event) == CAPTURED_EVENT
    assert capture.end() == INVALIDATED
    assert library().cuEventSynchronize(event) == CAPTURED_EVENT


def test_the_default_stream_waits_for_blocking_streams(new_capture: NewCapture, fill: Fill) -> None:
    capture = new_capture(RELAXED, NON_BLOCKING)
    assert fill(None) == 0
    assert capture.end() == 0
    capture = new_capture(RELAXED, BLOCKING)
    assert fill(None) == IMPLICIT
    assert capture.end() == INVALIDATED


def test_a_capture_cannot_wait_for_events_outside(new_capture: NewCapture) -> None:
    capture = new_capture()
    event = ctypes.c_void_p(capture.earlier.cuda_event)
    assert library().cuStreamWaitEvent(capture.handle, event, 0) == ISOLATION
    assert capture.end() == INVALIDATED


def test_two_captures_cannot_be_merged(new_capture: NewCapture) -> None:
    first, second = new_capture(), new_capture()
    event = ctypes.c_void_p(first.captured.cuda_event)
    assert library().cuStreamWaitEvent(second.handle, event, 0) == MERGE
    assert [first.end(), second.end()] == [INVALIDATED, INVALIDATED]


def test_a_capture_must_end_in_its_thread_and_stream(new_capture: NewCapture) -> None:
    capture = new_capture()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(capture.end).result() == WRONG_THREAD
    assert capture.end() == INVALIDATED
    capture = new_capture()
    capture.other.wait_event(capture.captured)
    graph = ctypes.c_void_p()
    assert library().cuStreamEndCapture(handle_of(capture.other), ctypes.byref(graph)) == UNMATCHED
    assert capture.end() == INVALIDATED


@pytest.mark.parametrize("is_joined", [True, False])
def test_work_of_another_stream_must_be_joined(new_capture: NewCapture, fill: Fill, is_joined: bool) -> None:
    capture = new_capture()
    capture.other.wait_event(capture.captured)
    assert fill(ctypes.c_void_p(capture.other.cuda_stream)) == 0
    event = capture.other.record_event()
    if is_joined:
        library().cuStreamWaitEvent(capture.handle, ctypes.c_void_p(event.cuda_event), 0)
    assert capture.end() == (0 if is_joined else UNJOINED)
    torch.cuda.synchronize()


@triton.jit
def increment(values, numel: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, numel)
    tl.store(values + offsets, tl.load(values + offsets) + 1)


def by_triton(values: torch.Tensor) -> None:
    increment[(1,)](values, NUMEL)


def by_torch(values: torch.Tensor) -> None:
    values.add_(1)


@pytest.mark.parametrize("add_one", [by_torch, by_triton])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_branches_of_a_graph_must_be_ordered(
    is_ordered: bool, add_one: Callable[[torch.Tensor], None], reports: Reports
) -> None:
    values = torch.zeros(NUMEL, device="cuda")
    graph = torch.cuda.CUDAGraph()
    # Two streams of torch's pool, which it gives out in turn.
    main = torch.cuda.Stream()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            add_one(values)
        if is_ordered:
            main.wait_stream(side)
        values.mul_(2)
        main.wait_stream(side)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    text = reports.new()
    assert text.count("RACE") == (not is_ordered)
    assert is_ordered or "aten::mul_" in text


def test_a_wait_of_the_host_invalidates_a_capture() -> None:
    values = torch.ones(8, device="cuda")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            values.nonzero()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
