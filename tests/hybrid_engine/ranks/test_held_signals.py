"""Signals wait for the end of a block, and come once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from hybrid_engine.ranks.signals_and_forks import signals_held

Handler = Callable[[int, FrameType | None], None]


@pytest.fixture
def handle() -> Iterator[Callable[[int, Handler], None]]:
    before: dict[int, object] = {}

    def put(number: int, handler: Handler) -> None:
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield put
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_handler_runs_at_the_end_of_the_block(handle: Callable[[int, Handler], None]) -> None:
    came: list[int] = []
    handle(signal.SIGUSR1, lambda number, _frame: came.append(number))
    with signals_held(), signals_held():
        send(signal.SIGUSR1)
        assert came == []
    assert came == [signal.SIGUSR1]
    send(signal.SIGUSR1)
    assert came == [signal.SIGUSR1] * 2


def test_every_handler_runs_though_one_raises(handle: Callable[[int, Handler], None]) -> None:
    came: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handle(signal.SIGUSR1, stop)
    handle(signal.SIGUSR2, lambda number, _frame: came.append(number))
    with pytest.raises(KeyboardInterrupt), signals_held():
        send(signal.SIGUSR1)
        send(signal.SIGUSR2)
    assert came == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is stop


def test_every_handler_is_put_back_and_runs_though_one_that_is_back_raises(
    handle: Callable[[int, Handler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    came, put = list[int](), signal.signal

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def put_and_send(number: int, handler: Handler) -> None:
        put(number, handler)
        if handler is stop:
            send(number)

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    handlers = {signal.SIGUSR1: note, signal.SIGUSR2: stop, signal.SIGWINCH: note}
    for number, handler in handlers.items():
        handle(number, handler)
    with pytest.raises(KeyboardInterrupt), signals_held():
        send(signal.SIGUSR1)
        send(signal.SIGWINCH)
        monkeypatch.setattr(signal, "signal", put_and_send)
    monkeypatch.undo()
    assert came == [signal.SIGUSR1, signal.SIGWINCH]
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_who_listens_at_the_file_descriptor_hears_of_it_once(handle: Callable[[int, Handler], None]) -> None:
    """Twice would be a second Ctrl-C."""
    handle(signal.SIGUSR1, lambda _number, _frame: None)
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        reader.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            with signals_held():
                send(signal.SIGUSR1)
            assert reader.recv(9) == bytes([signal.SIGUSR1])
        finally:
            signal.set_wakeup_fd(before)


def test_other_threads_hold_nothing() -> None:
    found: list[object] = []

    def look() -> None:
        with signals_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
