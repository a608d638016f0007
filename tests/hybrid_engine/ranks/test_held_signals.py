"""Signals are held until the end of a block, and then delivered once."""

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
def set_signal() -> Iterator[Callable[[int, Handler], None]]:
    before = {}

    def set_handler(number: int, handler: Handler) -> None:
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield set_handler
    for number, handler in before.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_handler_runs_at_the_end_of_the_block(set_signal: Callable[[int, Handler], None]) -> None:
    received = []
    set_signal(signal.SIGUSR1, lambda number, _frame: received.append(number))
    with signals_held(), signals_held():  # the outer block decides
        send(signal.SIGUSR1)
        assert received == []
    assert received == [signal.SIGUSR1]
    send(signal.SIGUSR1)
    assert received == [signal.SIGUSR1] * 2


def test_every_handler_is_restored_and_runs_even_if_another_raises(
    set_signal: Callable[[int, Handler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    received = list[int]()
    set_handler = signal.signal

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def set_and_send(number: int, handler: Handler) -> None:
        set_handler(number, handler)
        if handler is stop:
            send(number)

    def record(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    handlers = {signal.SIGUSR1: record, signal.SIGUSR2: stop, signal.SIGWINCH: record}
    for number, handler in handlers.items():
        set_signal(number, handler)
    with pytest.raises(KeyboardInterrupt), signals_held():
        send(signal.SIGUSR1)
        send(signal.SIGWINCH)
        monkeypatch.setattr(signal, "signal", set_and_send)
    monkeypatch.undo()
    assert received == [signal.SIGUSR1, signal.SIGWINCH]
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_the_wakeup_descriptor_gets_a_signal_once(
    set_signal: Callable[[int, Handler], None],
) -> None:
    """A second delivery would count as a second Ctrl-C."""
    set_signal(signal.SIGUSR1, lambda _number, _frame: None)
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


def test_other_threads_do_not_hold_signals() -> None:
    handlers = []

    def read_handler() -> None:
        with signals_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=read_handler)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
