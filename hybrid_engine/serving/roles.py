"""The sides that a process does not have, where trainers and servers are processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from hybrid_engine.memory.offload_items import Guards, OffloadItem
from hybrid_engine.records.layout import Extent, Layout


class NoTraining:
    """A server's trainer (`ports.Trainer` and its weights): it holds nothing and has nothing to offload."""

    unserved: Collection[str] = ()
    frozen: Collection[str] = ()
    version = 0

    def __init__(self) -> None:
        self.guard = Guards()
        self.before_step: Callable[[], object] = lambda: None

    @property
    def weights(self) -> NoTraining:
        return self

    @property
    def base(self) -> NoTraining:
        return self

    @property
    def merged(self) -> NoTraining:
        return self

    def layout(self) -> Layout:
        return Layout({}, {}, ())

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {}

    def prepare(self) -> None:
        """Nothing is pending."""

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """There are no values."""

    def zero_padding(self) -> None:
        """There is none."""

    def zero_adapters(self) -> None:
        """There are none."""

    def offload_items(self) -> Iterable[OffloadItem]:
        return ()

    def reload_main_params(self) -> None:
        """There are none."""


class NoInference:
    """A trainer's engine (`ports.InferenceWeights` and `ports.InferenceCaches`): it holds nothing."""

    taken_before = 0

    def layout(self) -> Layout:
        return Layout({}, {}, ())

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        assert not groups, "the plan gives this rank nothing to fill"
        return {}

    def commit(self, groups: Sequence[str]) -> None:
        """There is nothing to commit."""

    def finish_fill(self) -> None:
        """There is no staging memory."""

    def abandon(self) -> None:
        """Nobody waits for this rank in `commit`."""

    def release(self, keep: Collection[str] = ()) -> None:
        """There is nothing to release."""

    def committed(self) -> Collection[str]:
        return ()

    @contextmanager
    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> Iterator[None]:
        yield

    def resident_nbytes(self) -> int:
        return 0

    def wake_kv_cache(self) -> None:
        """A server's caches are its own."""

    def reset_caches(self) -> None:
        """A server forgets what it cached when it is paused."""
