"""Parameters and optimizer state stay until requests need their memory, with both engines."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from benchmarks.resharding.cases import Case
from benchmarks.timeline import KV_CACHE_MB, SAMPLING
from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import OffloadError, StateError
from hybrid_engine.memory.arena import QueuedCopy
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.switch.states import State
from hybrid_engine.tools.verify.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.trainer.worker import ActorHybridWorker
from tests.gpu.sizes import SOFTWARE_GPU
from tests.harness.errors import refused
from tests.harness.launch import Ranks

pytestmark = [pytest.mark.engines, pytest.mark.ranks, pytest.mark.slow]


class Engines:
    """Both engines, which share memory, in state TRAIN."""

    def __init__(self, directory: Path) -> None:
        case = Case("small", 1, "tp=1", "tp=1", trains=True, bucket_mb=16)
        settings = {"check_compute": "off", "verify": "full", "kv_cache_mb": KV_CACHE_MB}
        self.worker = ActorHybridWorker(case.config(directory, SOFTWARE_GPU.vllm, **settings))
        self.train()
        self.enter(State.INFER)
        self.enter(State.TRAIN)

    def train(self) -> list[int]:
        """Make a step; return digests of what was trained."""
        batch = tokens_and_labels(0, self.worker.table.dims.vocab_size, 4)
        self.worker.update(batch, cross_entropy)
        return self.digests()

    def digests(self) -> list[int]:
        self.worker.train.guard(["optimizer"])
        items = [item for item in self.worker.train.offload_items() if item.action == "copy"]
        return [box_digest(item.tensor) for item in items]

    def enter(self, state: State) -> int:
        """Return the bytes that come back."""
        report = self.worker.sharding.enter(state)
        assert report is not None
        return report.bytes_onloaded

    def draw(self) -> list[int]:
        return list(self.worker.generate_sequences([[1, 2, 3]], SAMPLING)[0][0].token_ids)

    def require_refused(self) -> None:
        for tensor in self.worker.train.guard.tensors():
            if tensor.is_cuda:
                with refused(StateError, "wrong-state"):
                    tensor.sum()

    @property
    def pending(self) -> int:
        """Bytes of the KV cache that have contents of training."""
        return self.worker.inference._sleep_mode.pending().nbytes

    def write_all_blocks(self) -> None:
        """Write every block of the KV cache, as requests would that need all."""
        self.worker.inference.reset_caches()
        pool = internals.core_of(self.worker.inference.llm).scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        for cache in internals.model_runner_of(self.worker.inference.llm).kv_caches:
            assert not cache.any(), "a block has contents of somebody else"
            cache.fill_(7)
        pool.free_blocks(blocks)


def check_what_requests_do_not_need_stays(engines: Engines) -> None:
    for states in (
        [State.INFER, State.TRAIN],
        [State.INFER, State.FORWARD, State.INFER, State.TRAIN],
    ):
        trained = engines.train()
        for state in states:
            onloaded = engines.enter(state)
            if state is State.INFER:
                drawn = engines.draw()
                pending = engines.pending
                engines.require_refused()
        assert onloaded < pending, "gradients alone come back"
        assert engines.digests() == trained
        assert drawn


def check_what_requests_need_leaves_first_and_comes_back(engines: Engines) -> None:
    trained = engines.train()
    engines.enter(State.INFER)
    drawn = engines.draw()
    pending = engines.pending
    engines.write_all_blocks()
    assert not engines.pending
    engines.worker.inference.reset_caches()
    assert engines.draw() == drawn
    assert engines.enter(State.TRAIN) >= pending
    assert engines.digests() == trained


def check_all_leaves_if_others_use_the_device(engines: Engines) -> None:
    trained = engines.train()
    engines.enter(State.INFER)
    engines.enter(State.IDLE)
    assert not engines.pending
    assert engines.enter(State.TRAIN) > 0
    assert engines.digests() == trained
    engines.enter(State.INFER)  # Memory is shared again.
    engines.enter(State.TRAIN)
    assert engines.digests() == trained


def check_a_failed_copy_keeps_the_request_from_the_memory(engines: Engines) -> None:
    trained = engines.train()
    engines.enter(State.INFER)
    drawn = engines.draw()
    pending = engines.pending
    with (
        mock.patch.object(QueuedCopy, "wait", side_effect=OSError("bus")),
        pytest.raises(OffloadError),
    ):
        engines.write_all_blocks()
    assert engines.pending == pending
    assert engines.draw() == drawn, "a request that needs few blocks goes on"
    engines.write_all_blocks()
    engines.require_refused()
    engines.enter(State.TRAIN)
    assert engines.digests() == trained


def check_memory_is_not_written_before_it_is_taken(engines: Engines) -> None:
    """Without the wait for training's contents, the memory is refused."""
    trained = engines.train()
    engines.enter(State.INFER)
    with (
        mock.patch.object(engines.worker.inference._sleep_mode, "_leave", return_value=None),
        refused(StateError, "memory-in-use", "training"),
    ):
        engines.write_all_blocks()
    engines.enter(State.TRAIN)
    assert engines.digests() == trained


CHECKS = (
    check_what_requests_do_not_need_stays,
    check_what_requests_need_leaves_first_and_comes_back,
    check_all_leaves_if_others_use_the_device,
    check_a_failed_copy_keeps_the_request_from_the_memory,
    check_memory_is_not_written_before_it_is_taken,
)


def run_checks(directory: str) -> None:
    shared = Engines(Path(directory))
    for check in CHECKS:
        check(shared)
    shared.worker.shutdown()


def test_training_and_requests_share_memory(engines: Ranks, tmp_path: Path) -> None:
    engines.launch(run_checks, 1, str(tmp_path))
