"""Stage 2, one GPU with Megatron and vLLM: build, switches, a failed wake-up, and a second engine after the first.

    python -m hybrid_engine.verification.gpu.engine_checks JOB RESULTS      as one rank

Leaves a checkpoint and completions drawn with the same weights, for fresh_checks.py.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from hybrid_engine.backends.vllm import Sampling
from hybrid_engine.switch.digests import box_digest
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State
from hybrid_engine.verification.comparison import cross_entropy, tokens_and_labels
from hybrid_engine.verification.gpu.checks import Check, NothingToCheckError, Planned, judged, run_checks
from hybrid_engine.verification.gpu.gpus import GIB
from hybrid_engine.verification.gpu.small_job import MAX_TOKENS, SmallJob, differences
from hybrid_engine.verification.gpu.timings import plain_host_copies
from hybrid_engine.worker import ActorHybridWorker

if TYPE_CHECKING:
    from hybrid_engine.config import HybridConfig

NUM_SWITCHES = 5
_LEAST_SHARE = 0.05
_MOST_SECONDS = 60.0
_SLACK = 1.05
_MIB = 2**20


class EngineChecks:
    """The checks of one mode: eager, or with CUDA graphs."""

    def __init__(self, job: SmallJob) -> None:
        self._job, self._on_gpu = job, job.device == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")
        self._config: HybridConfig = job.config()
        self._worker: ActorHybridWorker | None = None
        self._settings = _settings()
        self._completions: list[list[int]] = []
        self._taken: dict[str, int] = {}
        self._peaks: list[int] = []

    def planned(self) -> list[Planned]:
        """In order."""
        mode = self._job.mode
        build, settings, switches, completions, failed, again = (
            f"{mode}: {what}"
            for what in ("build", "settings", "switches", "completions", "failed wake-up", "shut down")
        )
        return [
            Planned(build, self._build),
            Planned(settings, self._settings_kept, (build,)),
            Planned(switches, self._switches, (build,)),
            Planned(completions, self._complete, (switches,)),
            Planned(failed, self._failed_wake_up, (completions,)),
            Planned(again, self._built_again, (completions,)),
        ]

    def _build(self) -> Iterator[Check]:
        started = time.perf_counter()
        self._worker = ActorHybridWorker(self._config)
        seconds = time.perf_counter() - started
        self._taken["build"] = self._observe()
        yield self._check("build", True, f"{seconds:.1f} s", seconds=seconds)

    def _settings_kept(self) -> Iterator[Check]:
        before, now = self._settings, _settings()
        changed = [name for name in sorted({*before, *now}) if now.get(name) != before.get(name)]
        note = "; ".join(f"{name}: {now.get(name)}, was {before.get(name)}" for name in changed)
        yield self._check("settings and environment as before", not changed, note=note)

    def _switches(self) -> Iterator[Check]:
        """Train, switch, compare all weights, and back."""
        there, back = [], []
        for number in range(NUM_SWITCHES):
            self._train(number)
            self._taken["train"] = self._observe()
            with self._peak_observed():
                there.append(self._enter(State.INFER))
            self._taken["infer"] = self._observe()
            back.append(self._enter(State.TRAIN))
        num_tensors, wrong = there[0].tensors_verified, [each.tensors_verified for each in there]
        compared = len(set(wrong)) == 1 and num_tensors > 0
        figure = f"{num_tensors} tensors of {there[0].bytes_verified / GIB:.3f} GiB, {NUM_SWITCHES} times"
        yield self._check("all weights compared in the switch", compared, figure, note=f"{wrong} in turn")
        yield self._timed("switch to vLLM, the first", [there[0]])
        yield self._timed("switch to vLLM", there[1:])
        yield self._timed("switch to training", back[1:])
        if self._on_gpu:
            yield self._peak()

    def _complete(self) -> Iterator[Check]:
        worker = self._require()
        worker.save_hf_checkpoint(self._job.checkpoint)
        self._enter(State.INFER)
        self._completions = self._draw()
        self._job.answers.write_text(json.dumps(self._completions))
        again = self._draw()
        self._enter(State.TRAIN)
        note = differences(again, self._completions)
        figure = f"{len(self._completions)} of {MAX_TOKENS} tokens"
        yield self._check("completions, twice the same", not note, figure, note=note)

    def _failed_wake_up(self) -> Iterator[Check]:
        """No memory is left when the KV cache wakes: all is as before, and the next switch goes well."""
        worker, error = self._require(), None
        before = self._digests()
        with mock.patch.object(worker.inference, "wake_kv_cache", self._starved(worker.inference.wake_kv_cache)):
            try:
                self._enter(State.INFER)
            except Exception as raised:
                error = raised
        if error is None:
            self._enter(State.TRAIN)
            yield self._check("failed wake-up", False, note="it did not fail, though there was no memory for it")
            return
        state = worker.sharding.state
        kept = state is State.TRAIN and self._digests() == before
        note = f"the state is {state.value}, or training's contents changed, after: {error}"
        figure = "by a driver without memory" if self._on_gpu else "by an error put in its place"
        yield self._check("failed wake-up: training is as before", kept, figure, note=note)
        self._enter(State.INFER)
        found = self._draw()
        self._enter(State.TRAIN)
        note = differences(found, self._completions)
        yield self._check("failed wake-up: the next switch", not note, "the same completions", note=note)

    def _built_again(self) -> Iterator[Check]:
        """Shut down while vLLM sleeps, as it does in training; then another engine in the same process."""
        self._require().shutdown()
        self._worker = None
        left = self._observe()
        yield self._check("shut down asleep", True, f"{left / GIB:.2f} GiB taken then" if self._on_gpu else "")
        if not self._job.eager:
            raise NothingToCheckError("built again: with eager engines")
        self._worker = worker = ActorHybridWorker(self._config)
        worker.load_hf_checkpoint(self._job.checkpoint)
        self._enter(State.INFER)
        note = differences(self._draw(), self._completions)
        worker.shutdown()
        self._worker = None
        yield self._check("built again", not note, "the same completions", note=note)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _require(self) -> ActorHybridWorker:
        assert self._worker is not None
        return self._worker

    def _check(
        self, name: str, is_good: bool, figure: str = "", floor: str = "", note: str = "", **values: float
    ) -> Check:
        return judged(f"{self._job.mode}: {name}", is_good, figure, floor, note, **values)

    def _train(self, seed: int) -> None:
        vocabulary = self._require().table.dims.vocab_size
        self._require().update(tokens_and_labels(seed, vocabulary, 4), cross_entropy)

    def _enter(self, state: State) -> ReshardReport:
        report = self._require().sharding.enter(state)
        assert report is not None, "another state"
        return report

    def _draw(self) -> list[list[int]]:
        """Without what is cached of an earlier call, whose kernels would be others."""
        self._require().inference.reset_caches()
        sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        completions = self._require().generate_sequences(self._job.prompts(), sampling)
        return [list(answers[0].token_ids) for answers in completions]

    def _timed(self, name: str, reports: list[ReshardReport]) -> Check:
        """Beside plain copies of what is offloaded and onloaded; the comparison of all weights does not count."""
        verified = [each.seconds_by_phase.get("verify", 0.0) for each in reports]
        seconds = statistics.median(each.seconds - more for each, more in zip(reports, verified, strict=True))
        moved = {"offload": reports[-1].bytes_offloaded, "onload": reports[-1].bytes_onloaded}
        floors = [self._plain_copy(name, nbytes) for name, nbytes in moved.items() if nbytes]
        floor, figure = sum(floors), f"{seconds:.3f} s, and {statistics.median(verified):.3f} to compare"
        if not self._on_gpu:
            return self._check(name, True, figure, "not judged", seconds=seconds, floor_seconds=floor)
        is_good = seconds <= _MOST_SECONDS and floor / seconds >= _LEAST_SHARE
        limit = (
            f"{floor / seconds:.0%} of the rate of plain page-locked copies, {floor:.3f} s; at least {_LEAST_SHARE:.0%}"
        )
        return self._check(name, is_good, figure, limit, seconds=seconds, floor_seconds=floor)

    def _plain_copy(self, name: str, nbytes: int) -> float:
        """Seconds, from those of a part: host memory for all of it may not be there."""
        part = min(nbytes, GIB)
        return plain_host_copies(self._device, part, 1)[name] * nbytes / part

    def _peak(self) -> Check:
        """Of all switches to vLLM: at most what is there on either side of them, and two buckets."""
        most = max(self._taken["train"], self._taken["infer"]) + 2 * self._config.generate_config.bucket_mb * _MIB
        peak = max(self._peaks)
        figure = (
            f"{peak / GIB:.2f} GiB (training {self._taken['train'] / GIB:.2f}, vLLM {self._taken['infer'] / GIB:.2f})"
        )
        values = {"nbytes": peak, "training_nbytes": self._taken["train"], "infer_nbytes": self._taken["infer"]}
        floor = f"at most {_SLACK:g} times the larger and two buckets, {most / GIB:.2f} GiB"
        return self._check(
            "device memory in a switch, most at once", peak <= _SLACK * most, figure, floor, note="", **values
        )

    def _observe(self) -> int:
        """Bytes taken on the device by everybody, without what torch keeps for later."""
        if not self._on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return _taken(self._device)

    @contextmanager
    def _peak_observed(self) -> Iterator[None]:
        """Asks the driver all the while: our buffers and vLLM's are outside of torch's allocator."""
        if not self._on_gpu:
            yield
            return
        done, seen = threading.Event(), [0]

        def observe() -> None:
            while not done.wait(0.002):
                seen.append(_taken(self._device))

        thread = threading.Thread(target=observe)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self._peaks.append(max(seen))

    def _starved(self, wake: Callable[[], None]) -> Callable[[], None]:
        """`wake` while the device has no memory for it; without a device an error in its place."""

        def starved() -> None:
            if not self._on_gpu:
                raise RuntimeError("CUDA Error: out of memory (put in by check-gpu)")
            torch.cuda.empty_cache()
            needed = self._config.generate_config.kv_cache_mb or 0
            room = torch.cuda.mem_get_info(self._device)[0] - needed * _MIB // 2
            filler = torch.empty(max(0, room), dtype=torch.uint8, device=self._device)
            try:
                wake()
            finally:
                del filler
                torch.cuda.empty_cache()

        return starved

    def _digests(self) -> list[int]:
        """Of all that an offload copies."""
        items = [item for item in self._require().train.offload_items() if item.action == "copy"]
        return [int(box_digest(item.tensor, item.tensor.dtype)) for item in items]


def _taken(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _settings() -> dict[str, Any]:
    """Of torch and the process, which vLLM changes for itself."""
    found: dict[str, Any] = {
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        **{f"${name}": value for name, value in os.environ.items() if name.startswith("VLLM_")},
    }
    if torch.cuda.is_available():
        found["stream"] = torch.cuda.current_stream().stream_id
        found["cuDNN attention"] = torch.backends.cuda.cudnn_sdp_enabled()
    return found


def main(job: str, results: str) -> None:
    """Run the checks in this process, the only rank of a job."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    run_checks(EngineChecks(SmallJob(**json.loads(job))).planned(), Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
