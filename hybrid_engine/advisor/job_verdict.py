"""The answer of `plan` in four sentences: does it fit, what moves, how long, and what the figures leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.layouts.memory_plan import GIB, gib

LEFT_OUT = ("activations", "KV cache", "CUDA context", "workspaces of libraries")
"""What takes device memory beside what is counted."""
_PHASES = {"train": "training"}
"""Their names in `plan --json`, where they differ."""


@dataclass(frozen=True)
class JobVerdict:
    """What decides whether a job can run as planned; bytes of the rank that has most.

    Attributes:
        job: the plan.
    """

    job: JobPlan

    @property
    def fits(self) -> bool:
        """On the device, within vLLM's share of it, and on the host where its size is known."""
        return self.job.fits_device and self.job.cache.fits and self.job.fits_host is not False

    @property
    def room(self) -> float:
        """Bytes of the device beside the peak; negative: so much is missing."""
        return self.job.cluster.device_gib * GIB - float(self.job.peak.max())

    def sentences(self) -> dict[str, str]:
        """Heading -> what is to be said under it."""
        places = [(self.job.fits_device, self._of_device())]
        if not self.job.cache.fits:
            places.append((False, self._of_cache()))
        if self.job.fits_host is not None:
            places.append((self.job.fits_host, self._of_host()))
        fits = "; ".join(text for _, text in sorted(places, key=lambda place: place[0])) + "."
        return {
            "Fits" if self.fits else "Does not fit": fits,
            **({"Cache": f"{self._of_cache()}."} if self.job.cache.fits else {}),
            "Left out": self._left_out(),
            "Moves": self._moved(),
            "Takes": self._time(),
        }

    def as_dict(self) -> dict[str, Any]:
        """The part of `plan --json` of this name, in bytes."""
        return {
            "fits": self.fits,
            "room": self.room,
            "room_for_cache": self.job.cache.room,
            "cache_tokens": self.job.cache.num_tokens,
            "gpu_memory_utilization": self.job.cache.utilization,
            "least_gpu_memory_utilization": self.job.cache.needed,
            "peak_during": _PHASES.get(self.job.peak_phase, self.job.peak_phase),
            "left_out": list(LEFT_OUT),
        }

    def _of_device(self) -> str:
        peak, size = gib(self.job.peak.max()), f"{self.job.cluster.device_gib:g} GiB"
        phase = self.job.peak_phase
        when = {"train": "while training", "switch": "at the switch"}.get(phase, f"in the phase {phase}")
        if self.room < 0:
            return f"the peak of {peak} on a device, {when}, is {gib(-self.room)} more than its {size}"
        return f"the peak of {peak} on a device, {when}, leaves {gib(self.room)} of its {size}"

    def _of_host(self) -> str:
        largest, size = gib(self.job.host_nbytes.max()), f"{self.job.cluster.host_gib:g} GiB"
        fits = "fit" if self.job.fits_host else "do not fit"
        return f"{largest} of offloaded training state {fits} a host of {size}"

    def _of_cache(self) -> str:
        cache = self.job.cache
        share = f"vLLM's {gib(cache.share)} (gpu_memory_utilization {cache.utilization:g})"
        if cache.given is not None:
            share = f"vLLM's weights and kv_cache_mb, {gib(cache.weights + cache.given)},"
        if cache.room <= 0:
            found = f"{share} are less than its weights of {gib(cache.weights)}"
        else:
            found = f"{share} hold its weights of {gib(cache.weights)} and a KV cache of {gib(cache.room)}: "
            found += f"{cache.num_tokens:,} tokens"
            if cache.longest:
                found += f", {cache.num_sequences:.3g} sequences of {cache.longest:,}"
        if cache.fits:
            return found
        if cache.given is not None:
            return f"{found}; set kv_cache_mb for one sequence of max_model_len, within the device"
        if cache.needed > 1:
            larger = "a larger infer_tensor_parallel_size or infer_pipeline_parallel_size"
            return f"{found}. No share of the device is enough: use {larger}, or a lower max_model_len"
        return f"{found}; it starts from {cache.needed:g}, or with a lower max_model_len"

    def _left_out(self) -> str:
        return f"the peak does not count {', '.join(LEFT_OUT[:-1])} and {LEFT_OUT[-1]}."

    def _moved(self) -> str:
        moved, gathered = self.job.bytes, float(self.job.gathered.mean())
        received, least = float(moved.received.mean()), float(moved.lower_bound.mean())
        if received > least:
            text = f"{gib(received)} to a rank on average, {gib(received - least)} more than the least possible"
        else:
            text = f"{gib(received)} to a rank on average, the least that these two layouts allow"
        if gathered and (saved := 1 - received / gathered) >= 0.005:
            text += f", {saved:.0%} less than all weights on every rank ({gib(gathered)})"
        return f"{text}."

    def _time(self) -> str:
        seconds = self.job.seconds
        return (
            f"{seconds.max():.3g} s for the transfers of the slowest rank ({seconds.mean():.3g} s on average), at link "
            "speeds that are assumed, not measured."
        )
