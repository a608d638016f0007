"""Deltas of messages: encoding compared with brute force, errors, and copies on both ends."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Costs
from hybrid_engine.transports import deltas
from hybrid_engine.transports.deltas import BLOCK, Deltas, apply, encode
from hybrid_engine.transports.messages import (
    HEADER_NBYTES,
    Message,
    StagedMessage,
    read_headers,
    stage,
    write_headers,
)
from tests.harness.errors import refused

Pair = tuple[np.ndarray, np.ndarray]


def message(num_words: int, seed: int) -> np.ndarray:
    """Return random bits, which include NaNs of all kinds and both zeros."""
    return np.random.default_rng(seed).integers(0, 256, 2 * num_words, dtype=np.uint8)


def changed(old: np.ndarray, positions: Iterable[int]) -> np.ndarray:
    """Return `old` with other bits in these words."""
    new = old.copy()
    for position in positions:
        new.view(np.int16)[position] ^= 1 + position % 999
    return new


def by_brute_force(new: np.ndarray, old: np.ndarray) -> bytes:
    """Encode a delta as the module's docstring defines it."""
    pairs = list(zip(new.view(np.int16).tolist(), old.view(np.int16).tolist(), strict=True))
    changes = [(number, now) for number, (now, before) in enumerate(pairs) if now != before]
    counts = [
        sum(number // BLOCK == block for number, _ in changes)
        for block in range(-(-len(pairs) // BLOCK))
    ]
    parts = *counts, *(value for _, value in changes)
    words = b"".join(value.to_bytes(2, "little", signed=True) for value in parts)
    return words + bytes(number % BLOCK for number, _ in changes)


@st.composite
def pairs_of_messages(draw: st.DrawFn) -> Pair:
    """Draw (new, old): empty or ending within a block; with no, few, many or all words changed."""
    num_words = draw(st.integers(0, 5 * BLOCK))
    old = message(num_words, draw(st.integers(0, 99)))
    if not num_words:
        return old.copy(), old
    positions = st.integers(0, num_words - 1)
    ranges = st.tuples(positions, st.integers(1, 9)).map(
        lambda drawn: range(drawn[0] % 7, num_words, drawn[1])
    )
    return changed(
        old, draw(st.one_of(st.sets(positions, max_size=30), ranges, st.just(range(num_words))))
    ), old


@given(pairs_of_messages(), st.integers(1, 3))
@example((changed(message(4, 0), [0, 1]), message(4, 0)), 1)  # the delta is as long as the message
def test_a_delta_holds_the_changes_if_it_is_shorter(pair: Pair, num_together: int) -> None:
    new, old = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltas, "_BLOCKS_PER_PART", num_together)
        delta, count = encode(new, old)
        expected = by_brute_force(new, old)
        assert count == int((new.view(np.int16) != old.view(np.int16)).sum())
        if delta is new:
            assert count
            assert len(expected) >= len(new)
            return
        assert delta.tobytes() == (expected if count else b"")
        assert len(delta) < len(new) or not count
        apply(delta, old)
    assert np.array_equal(old, new)


@pytest.mark.parametrize(
    "damage",
    [
        lambda delta: delta[:-1],
        lambda delta: delta[:1],
        lambda delta: delta[:-3],
        lambda delta: np.insert(delta[2:], 0, [255, 255]),
        # beyond the last block
        lambda delta: np.append(delta[:-1], np.uint8(255)),
    ],
)
def test_an_invalid_delta_is_refused(damage: object) -> None:
    old = message(3 * BLOCK - 32, 1)
    before = old.copy()
    delta, _ = encode(changed(old, [1, 2, 700]), old)
    with refused(TransportError, "invalid-delta", "1472"):
        apply(damage(delta), old)
    assert np.array_equal(old, before)


def staged(contents: np.ndarray, peer: int) -> StagedMessage:
    """Lay out a message with these contents."""
    nbytes = HEADER_NBYTES + len(contents)
    (message,) = stage([Message(peer, nbytes=nbytes)], torch.zeros(nbytes, dtype=torch.uint8))
    message.contents.copy_(torch.from_numpy(contents))
    return message


def sent(sender: Deltas, contents: np.ndarray, costs: Costs, peer: int = 2) -> StagedMessage:
    """Encode a message of bucket 7 with these contents, and write its header."""
    message = sender.encode(7, staged(contents, peer), costs)
    write_headers([message], 7, "")
    return message


def came(message: StagedMessage) -> StagedMessage:
    """Receive a message of peer 1 in other memory."""
    memory = staged(np.zeros_like(message.contents), 1)
    memory.sent[: message.sent.numel()] = message.sent
    (received,) = read_headers([memory], 7)
    assert not received.fault
    return received


def test_a_message_without_a_known_copy_is_sent_whole() -> None:
    ends = Deltas()
    costs = Costs()
    old = message(4 * BLOCK, 1)
    nbytes = len(old)
    new = changed(old, [5])

    def sent_whole(*to: int, contents: np.ndarray, whole: bool = False) -> list[int]:
        costs.counts.clear()
        ends.begin(whole=whole)
        return [peer for peer in to if sent(ends, contents, costs, peer).sent_nbytes == nbytes]

    assert sent_whole(1, 2, contents=old, whole=True) == [1, 2]
    assert (costs.counts, ends.copies_nbytes) == ({"messages_whole": 2}, 2 * nbytes)
    assert sent_whole(1, 2, 3, contents=new) == [3]
    words = {"words_compared": 2 * nbytes // 2, "words_changed": 2}
    assert costs.counts == {"messages_delta": 2, "messages_whole": 1, **words}
    assert ends.copies_nbytes == 3 * nbytes
    assert sent_whole(1, contents=new, whole=True) == [1]
    assert sent_whole(1, 2, contents=old) == [2]  # peer 2 missed the message before


def test_the_receivers_copy_is_the_last_message() -> None:
    sender = Deltas()
    receiver = Deltas()
    old = message(4 * BLOCK + 32, 1)
    for new in (old, changed(old, [0, 9, 999]), old, old):
        costs = Costs()
        delivered = sent(sender, new, costs)
        assert costs.counts["messages_whole"] == (delivered.sent_nbytes == len(new))
        received = came(delivered)
        receiver.decode(7, received)
        assert received.contents.numpy().tobytes() == new.tobytes()
    assert receiver.copies_nbytes == len(old)
    receiver.close()
    assert receiver.copies_nbytes == 0


def test_a_copy_that_differs_is_an_error() -> None:
    """The check covers an empty delta too."""
    for positions in ([], [3]):
        sender = Deltas()
        receiver = Deltas()
        old = message(BLOCK, 1)
        received = came(sent(sender, old, Costs()))
        received.contents[100] ^= 1
        receiver.decode(7, received)
        received = came(sent(sender, changed(old, positions), Costs()))
        with refused(TransportError, "delta-mismatch", "bucket 7", "peer 1"):
            receiver.decode(7, received)
