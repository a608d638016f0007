"""Stage 2, both engines in one process: build, switches, failed wake-ups, and a second engine after the first.

Leaves a checkpoint and completions drawn with the same weights, for test_stage2c_fresh.py.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from benchmarks.offload_figures import copied_nbytes
from benchmarks.timings import PeakOfDevice, plain_host_copies
from hybrid_engine.assembly import build_inference_engine
from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory.cuda_driver import INSTALL_HINT, CudaDriver, driver_of, taken_nbytes
from hybrid_engine.ranks.digests import box_digest
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from hybrid_engine.tools.verify.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.tools.verify.machine import GIB
from hybrid_engine.trainer.worker import ActorHybridWorker
from tests.gpu.conftest import Noted
from tests.gpu.process_state import FROZEN, ProcessState
from tests.gpu.sizes import NUM_SWITCHES, SLACK, is_software_gpu, most_in_switches
from tests.gpu.small_job import GREEDY, Answer, SmallJob, differences

if TYPE_CHECKING:
    from hybrid_engine.config import HybridConfig
    from tests.software_gpu.device import Timeline

pytestmark = [pytest.mark.engines, pytest.mark.slow]

LEAST_SHARE = 0.05
MOST_LEFT = 0.75 * GIB
"""Device memory that libraries may have taken between the build and the end: half of vLLM's weights."""
_MIB = 2**20
_AT_ONCE = 2**36  # bytes of device memory: no smaller than is worth a try


@dataclass(frozen=True)
class Shortage:
    """A switch to vLLM in which one call finds no memory.

    Attributes:
        owner, method: what is called.
        number: of the call, from 0.
        left: bytes that are there all the same.
    """

    owner: object
    method: str
    number: int = 0
    left: int = 0


class Engines:
    """Both engines, what the device and the process were like at several moments, and what is asked of them."""

    def __init__(self, job: SmallJob) -> None:
        self.job, self.on_gpu = job, job.device == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(0)
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        self.config: HybridConfig = job.config()
        self.taken = {"before": self.observe()}  # makes the context, which changes the process
        self.copied_nbytes = 0  # of the training state, to the host and back
        self.before_vllm = self.at_first = ProcessState.now()
        self.peak = PeakOfDevice(self.device)
        # of the last switch to each state, over the software GPU: its calls, and its timeline
        self.calls: dict[State, tuple[Counter[str], Timeline]] = {}
        self.calls_of_switches = self.calls  # of the last of `switches`
        started = time.perf_counter()
        with mock.patch("hybrid_engine.assembly.build_inference_engine", self._noting(build_inference_engine)):
            self.worker = ActorHybridWorker(self.config)
        self.build_seconds = time.perf_counter() - started

    def _noting(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """`build`, which finds the process as training has it: Megatron sets variables too."""

        def noted(*arguments: Any) -> Any:
            self.before_vllm = ProcessState.now()
            return build(*arguments)

        return noted

    def observe(self) -> int:
        """Bytes taken on the device by everybody, without what torch keeps for later."""
        if not self.on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return taken_nbytes(self.device)

    def changed_settings(self, *but: str) -> list[str]:
        """Settings of the process that differ from those before vLLM was built."""
        return ProcessState.now().changes(self.before_vllm, but=("$PYTEST_CURRENT_TEST", *but))

    def train(self, seed: int) -> None:
        self.worker.update(tokens_and_labels(seed, self.worker.table.dims.vocab_size, 4), cross_entropy)

    def enter(self, state: State) -> ReshardReport:
        with self._counted(state):
            report = self.worker.sharding.enter(state)
        assert report is not None, "another state"
        return report

    @contextmanager
    def _counted(self, state: State) -> Iterator[None]:
        """Keeps what the switch asks of the driver, where the driver counts."""
        if not is_software_gpu():
            yield
            return
        from tests.software_gpu.device import counted, timed

        with counted() as calls, timed() as timeline:
            yield
        self.calls[state] = calls, timeline

    def draw(self) -> list[list[int]]:
        return [answer.tokens for answer in self.draw_answers()]

    def draw_answers(self) -> list[Answer]:
        """Without what is cached of an earlier call, whose kernels would be others."""
        self.worker.inference.reset_caches()
        completions = self.worker.generate_sequences(self.job.prompts(), GREEDY)
        return [Answer(list(one[0].token_ids), list(one[0].logprobs)) for one in completions]

    def drawn_after_a_switch(self) -> list[list[int]]:
        self.enter(State.INFER)
        completions = self.draw()
        self.enter(State.TRAIN)
        return completions

    def digests(self) -> list[int]:
        items = [item for item in self.worker.train.offload_items() if item.action == "copy"]
        return [box_digest(item.tensor) for item in items]

    def shortages(self) -> Mapping[str, Shortage]:
        """When vLLM itself wakes up, at weights that wake later, and when the KV cache wakes."""
        inference, buckets = self.worker.inference, self.worker.sharding.plan.buckets
        num_calls = sum(bool(bucket.groups) for bucket in buckets)
        half_of_cache = (self.config.generate_config.kv_cache_mb or 0) * _MIB // 2
        found = (
            Shortage(inference.adaptor, "allocate"),
            Shortage(inference.adaptor, "allocate", num_calls // 2),
            Shortage(inference, "wake_kv_cache", left=half_of_cache),
        )
        return dict(zip(SHORTAGES, found, strict=True))

    def error_of(self, shortage: Shortage) -> Exception | None:
        replacement = self.starved(getattr(shortage.owner, shortage.method), shortage)
        with mock.patch.object(shortage.owner, shortage.method, replacement):
            try:
                self.enter(State.INFER)
            except Exception as error:
                return error
        return None

    def starved(self, call: Callable[..., Any], shortage: Shortage) -> Callable[..., Any]:
        """The call, without memory on the device; where there is no device, an error in its place."""
        numbers = itertools.count()

        def starved(*arguments: Any) -> Any:
            if next(numbers) != shortage.number:
                return call(*arguments)
            if not self.on_gpu:
                raise RuntimeError("CUDA Error: out of memory (put in by this check)")
            driver = driver_of(self.device.index)
            assert driver is not None, "asked before"
            with device_without_memory(driver, shortage.left):
                return call(*arguments)

        return starved

    def shut_down(self) -> list[str]:
        """End the worker, which sleeps as it does in training; say what is left, but for device memory."""
        models: dict[str, weakref.ref[object]] = {
            "vLLM's model": weakref.ref(self.worker.inference.adaptor.model),
            "the trainer": weakref.ref(self.worker.train),
        }
        self.worker.shutdown()
        del self.worker
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # of a check that failed before
            setattr(sys, name, None)
        gc.collect()
        left = ProcessState.now().left_behind(self.at_first)
        if not self.on_gpu:  # there the driver counts
            left += [f"{name} is still referred to" for name, model in models.items() if model() is not None]
        return left


Switches = tuple[list[ReshardReport], list[ReshardReport]]
"""Reports of switches to vLLM, each after a training step, and of those back."""
SHORTAGES = ("weights", "weights half-way", "KV cache")


class Together:
    eager: bool

    @pytest.fixture(scope="class")
    def engines(
        self, request: pytest.FixtureRequest, device: str, shared: Path, vllm_arguments: dict[str, Any]
    ) -> Engines:
        return Engines(SmallJob(shared, device, request.cls.eager, vllm_arguments))

    @pytest.fixture(scope="class")
    def switches(self, engines: Engines) -> Switches:
        there, back = switches = ([], [])
        for number in range(NUM_SWITCHES):
            engines.train(number)
            engines.taken["train"] = engines.observe()
            engines.copied_nbytes = copied_nbytes(engines.worker.train.offload_items())
            with engines.peak.watched():  # the driver is asked: most memory is outside of torch's allocator
                there.append(engines.enter(State.INFER))
            engines.taken["infer"] = engines.observe()
            back.append(engines.enter(State.TRAIN))
        engines.calls_of_switches = dict(engines.calls)
        return switches

    @pytest.fixture(scope="class")
    def drawn(self, engines: Engines, switches: Switches) -> list[list[list[int]]]:
        """Completions, drawn twice after one switch, of weights that are saved."""
        engines.worker.save_hf_checkpoint(engines.job.checkpoint)
        engines.enter(State.INFER)
        answers, again = engines.draw_answers(), engines.draw()
        engines.enter(State.TRAIN)
        engines.job.answers.write_text(json.dumps(answers))
        return [[answer.tokens for answer in answers], again]

    @pytest.fixture(scope="class")
    def completions(self, drawn: list[list[list[int]]]) -> list[list[int]]:
        return drawn[0]

    @pytest.fixture(scope="class")
    def left(self, engines: Engines, completions: list[list[int]]) -> list[str]:
        return engines.shut_down()

    def test_build(self, engines: Engines, noted: Noted) -> None:
        noted(f"{engines.build_seconds:.1f} s", seconds=engines.build_seconds)

    def test_settings_after_the_build(self, engines: Engines) -> None:
        assert engines.changed_settings(FROZEN) == []

    def test_all_weights_are_compared_in_the_switch(self, engines: Engines, switches: Switches, noted: Noted) -> None:
        table, compared = engines.worker.table, [each.tensors_verified for each in switches[0]]
        served = sum(map(table.is_served, table.shapes))
        noted(f"{compared[0]} tensors, {switches[0][0].bytes_verified / GIB:.3f} GiB, {NUM_SWITCHES} times")
        assert compared == [served] * NUM_SWITCHES, f"of {served} that vLLM reads"

    def test_seconds_to_vllm(self, engines: Engines, switches: Switches, noted: Noted) -> None:
        """The first is not judged: it takes page-locked host memory, which stage 1 measures."""
        first, *later = switches[0]
        judge_seconds(engines, later, noted, first=first.seconds)

    def test_seconds_to_training(self, engines: Engines, switches: Switches, noted: Noted) -> None:
        judge_seconds(engines, switches[1][1:], noted)

    @pytest.mark.gpu
    def test_most_device_memory_in_a_switch(self, engines: Engines, switches: Switches, noted: Noted) -> None:
        judge_peak(engines, noted)

    @pytest.mark.gpu
    @pytest.mark.parametrize("state", [State.INFER, State.TRAIN])
    def test_calls_of_a_switch(self, state: State, engines: Engines, switches: Switches, noted: Noted) -> None:
        """Launches, copies, waits: no more than recorded."""
        if not is_software_gpu():
            pytest.skip("the driver of hardware does not count")
        from tests.software_gpu.switch_calls import RECORDED, by_kind

        counts, timeline = engines.calls_of_switches[state]
        calls = by_kind(counts)
        noted(f"{', '.join(f'{number} {kind}' for kind, number in calls.items())}; {timeline}", **calls)
        recorded = RECORDED[state.name.lower()]
        assert {kind: number for kind, number in calls.items() if number > recorded.get(kind, 0)} == {}

    def test_completions_twice_the_same(self, drawn: list[list[list[int]]]) -> None:
        assert not differences(*drawn)

    def test_settings_after_completions(self, engines: Engines, completions: list[list[int]]) -> None:
        assert engines.changed_settings(FROZEN) == []

    @pytest.mark.parametrize("name", SHORTAGES)
    def test_failed_wake_up(self, name: str, engines: Engines, completions: list[list[int]]) -> None:
        """No memory is left when something of vLLM's wakes: all is as before, and the next switch goes well."""
        if engines.on_gpu and driver_of(engines.device.index) is None:
            pytest.skip(f"its memory cannot be taken without cuda-bindings: {INSTALL_HINT}")
        before = engines.digests()
        error = engines.error_of(engines.shortages()[name])
        if error is None:
            engines.enter(State.TRAIN)
        assert error is not None, "it did not fail, though there was no memory for it"
        assert engines.worker.sharding.state is State.TRAIN, f"after: {error}"
        assert engines.digests() == before, f"training's contents changed, after: {error}"
        more = engines.observe() - engines.taken["train"]
        assert more <= engines.taken["infer"] // 4, f"{more / GIB:.2f} GiB more are taken than in training"
        assert not differences(engines.drawn_after_a_switch(), completions)

    def test_shut_down_asleep_leaves_nothing(self, left: list[str]) -> None:
        assert left == []

    def test_settings_after_the_end(self, engines: Engines, left: list[str]) -> None:
        assert engines.changed_settings() == []

    @pytest.mark.gpu
    def test_shut_down_asleep_gives_memory_back(self, engines: Engines, left: list[str], noted: Noted) -> None:
        judge_memory_back(engines.observe() - engines.taken["before"], noted)


class TestEager(Together):
    eager = True

    def test_built_again(self, engines: Engines, completions: list[list[int]], left: list[str]) -> None:
        engines.worker = ActorHybridWorker(engines.config)
        engines.worker.load_hf_checkpoint(engines.job.checkpoint)
        engines.enter(State.INFER)
        again = engines.draw()
        engines.worker.shutdown()
        del engines.worker
        assert not differences(again, completions)


@pytest.mark.gpu
class TestGraphs(Together):
    eager = False


def judge_seconds(engines: Engines, reports: list[ReshardReport], noted: Noted, **more: float) -> None:
    """Compare with one plain copy of all that is copied; the comparison of all weights does not count."""
    verified = [each.seconds_by_phase.get("verify", 0.0) for each in reports]
    seconds = statistics.median(each.seconds - more for each, more in zip(reports, verified, strict=True))
    direction = "offload" if reports[-1].bytes_offloaded else "onload"
    assert min(each.bytes_offloaded + each.bytes_onloaded for each in reports) >= engines.copied_nbytes, "all moved"
    floor = seconds_of_plain_copy(engines.device, direction, engines.copied_nbytes)
    is_judged = engines.job.sizes.are_times_judged
    limit = f"at least {LEAST_SHARE:.0%}" if is_judged else "not judged"
    beside = f"{floor / seconds:.0%} of the rate of plain page-locked copies, {floor:.3f} s; {limit}"
    figure = f"{seconds:.3f} s, and {statistics.median(verified):.3f} to compare"
    figure += "".join(f"; the {name} {value:.3f} s" for name, value in more.items())
    noted(figure, beside, seconds=seconds, floor_seconds=floor, **more)
    assert not is_judged or floor / seconds >= LEAST_SHARE


def seconds_of_plain_copy(device: torch.device, name: str, nbytes: int) -> float:
    """From those of a part: host memory for all of it may not be there."""
    part = min(nbytes, GIB)
    return plain_host_copies(device, part, 1)[name] * nbytes / part


def judge_peak(engines: Engines, noted: Noted) -> None:
    """Of all switches to vLLM: at most what is there on either side of them, and two buckets."""
    taken, peak = engines.taken, engines.peak.nbytes
    most = most_in_switches(taken["train"], taken["infer"], engines.config.generate_config.bucket_mb)
    figure = f"{peak / GIB:.2f} GiB (training {taken['train'] / GIB:.2f}, vLLM {taken['infer'] / GIB:.2f})"
    limit = f"at most {SLACK:g} times the larger and two buckets, {most / GIB:.2f} GiB"
    noted(figure, limit, nbytes=peak, training_nbytes=taken["train"], infer_nbytes=taken["infer"])
    assert peak <= SLACK * most


def judge_memory_back(nbytes: int, noted: Noted) -> None:
    figure = f"{nbytes / GIB:.2f} GiB more are taken than before the build"
    noted(figure, f"at most {MOST_LEFT / GIB:g} GiB", nbytes=nbytes)
    assert nbytes <= MOST_LEFT


@contextmanager
def device_without_memory(driver: CudaDriver, left: int = 0) -> Iterator[None]:
    """Within the block nobody gets memory of the device, but for `left` bytes, rounded up to the driver's unit.

    torch's unused memory is taken, too: it is given back to the device before a call fails.
    """
    with ExitStack() as taken:
        with ExitStack() as spared:
            _take(driver, left, spared)
            _take(driver, sys.maxsize, taken)
        yield


def _take(driver: CudaDriver, nbytes: int, taken: ExitStack) -> None:
    """Have physical memory, mapped nowhere, until `taken` ends: so many bytes, or all there are."""
    unit = driver.granularity()
    size, missing = _AT_ONCE, nbytes
    while missing > 0 and size:
        size = min(size, -(-missing // unit) * unit)
        try:
            handle = driver.create(size)
        except DeviceMemoryError as error:
            if not error.is_out_of_memory:
                raise
            size = size // 2 // unit * unit
        else:
            taken.callback(driver.release, handle)
            missing -= size
