"""Deltas of messages: encoding compared with brute force, errors, and copies on both ends."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_engine.errors import TransportError
from hybrid_engine.transports import deltas
from hybrid_engine.transports.deltas import BLOCK, Deltas, apply, encode
from tests.harness.errors import has_code


def message(num_words: int, seed: int) -> torch.Tensor:
    """Return random bits, which include NaNs of all kinds and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2 * num_words,), generator=generator, dtype=torch.uint8)


def changed(old: torch.Tensor, positions: Iterable[int]) -> torch.Tensor:
    """Return `old` with other bits in these words."""
    new = old.clone()
    for position in positions:
        new.view(torch.int16)[position] ^= 1 + position % 999
    return new


def by_brute_force(new: torch.Tensor, old: torch.Tensor) -> bytes:
    """Encode a delta as the module's docstring defines it."""
    pairs = list(zip(new.view(torch.int16).tolist(), old.view(torch.int16).tolist(), strict=True))
    changes = [(number, now) for number, (now, before) in enumerate(pairs) if now != before]
    counts = [sum(number // BLOCK == block for number, _ in changes) for block in range(-(-len(pairs) // BLOCK))]
    parts = *counts, *(value for _, value in changes)
    words = b"".join(value.to_bytes(2, "little", signed=True) for value in parts)
    return words + bytes(number % BLOCK for number, _ in changes)


@st.composite
def pairs_of_messages(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (new, old): empty or ending within a block; with no, few, many or all words changed."""
    num_words = draw(st.integers(0, 5 * BLOCK))
    old = message(num_words, draw(st.integers(0, 99)))
    if not num_words:
        return old.clone(), old
    positions = st.integers(0, num_words - 1)
    ranges = st.tuples(positions, st.integers(1, 9)).map(lambda drawn: range(drawn[0] % 7, num_words, drawn[1]))
    return changed(old, draw(st.one_of(st.sets(positions, max_size=30), ranges, st.just(range(num_words))))), old


@given(pairs_of_messages(), st.integers(1, 3))
@example((changed(message(4, 0), [0, 1]), message(4, 0)), 1)  # the delta is as long as the message
def test_a_delta_holds_the_changes_if_it_is_shorter(pair: tuple[torch.Tensor, torch.Tensor], num_together: int) -> None:
    new, old = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(deltas._PARTS, "cpu", num_together)
        delta, count = encode(new, old)
        expected = by_brute_force(new, old)
        assert count == int((new.view(torch.int16) != old.view(torch.int16)).sum())
        if delta is None:
            assert len(expected) >= new.numel()
            return
        assert delta.numpy().tobytes() == (expected if count else b"")
        assert delta.numel() < new.numel() or not count
        apply(delta, old)
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    "damage",
    [
        lambda delta: delta[:-1],
        lambda delta: delta[:1],
        lambda delta: delta[:-3],
        lambda delta: torch.cat([torch.full_like(delta[:2], 255), delta[2:]]),
    ],
)
def test_an_invalid_delta_is_refused(damage: object) -> None:
    old = message(3 * BLOCK, 1)
    before = old.clone()
    delta, _ = encode(changed(old, [1, 2, 700]), old)
    with pytest.raises(TransportError, check=has_code("invalid-delta", "1536")):
        apply(damage(delta), old)
    assert torch.equal(old, before)


def test_a_message_without_a_known_copy_is_sent_whole() -> None:
    ends = Deltas()
    old = message(4 * BLOCK, 1)
    nbytes = old.numel()
    new = changed(old, [5])

    def sent_whole(*to: int, message: torch.Tensor, whole: bool = False) -> list[int]:
        ends.begin(whole=whole)
        return [peer for peer in to if ends.outgoing(0, peer, message)[0] is None]

    assert sent_whole(1, 2, message=old, whole=True) == [1, 2]
    assert (ends.counts, ends.copies_nbytes) == ({"messages_whole": 2}, 2 * nbytes)
    assert sent_whole(1, 2, 3, message=new) == [3]
    words = {"words_compared": 2 * nbytes // 2, "words_changed": 2}
    assert ends.counts == {"messages_delta": 2, "messages_whole": 1, **words}
    assert ends.copies_nbytes == 3 * nbytes
    assert sent_whole(1, message=new, whole=True) == [1]
    assert sent_whole(1, 2, message=old) == [2]  # peer 2 missed the message before


@pytest.mark.parametrize("is_copy", [True, False])
def test_the_receivers_copy_is_the_last_message(is_copy: bool) -> None:
    """Messages arrive in the copy on the host, or in other memory of a device."""
    sender = Deltas()
    receiver = Deltas()
    old = message(4 * BLOCK + 32, 1)
    for new in (old, changed(old, [0, 9, 999]), old, old):
        copy = receiver.received(0, 1, new.numel() + 512)[512:]
        contents = copy if is_copy else torch.empty_like(copy)
        delta, digest = sender.outgoing(0, 2, new)
        assert (delta is None) is (sender.counts == {"messages_whole": 1})
        if delta is None:
            contents.copy_(new)
        receiver.arrived(0, 1, contents, delta, digest)
        assert torch.equal(copy, new)
        assert torch.equal(contents, new)
        assert receiver.take_came() == ({} if delta is None else {1: delta.numel()})
    assert receiver.copies_nbytes == old.numel() + 512
    receiver.close()
    assert receiver.copies_nbytes == 0


def test_a_copy_that_differs_is_an_error() -> None:
    """The check covers an empty delta too."""
    for positions in ([], [3]):
        sender = Deltas()
        receiver = Deltas()
        old = message(BLOCK, 1)
        copy = receiver.received(7, 1, old.numel())
        assert sender.outgoing(7, 2, old) == (None, 0)
        copy.copy_(old)
        copy[100] ^= 1
        delta, digest = sender.outgoing(7, 2, changed(old, positions))
        with pytest.raises(TransportError, check=has_code("delta-mismatch", "bucket 7", "peer 1")):
            receiver.arrived(7, 1, copy, delta, digest)
