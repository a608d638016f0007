"""What a guest may change in a process, or leave there: settings, child processes, shared memory."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from hybrid_engine.backends.vllm.process_state import ProcessSettings
from hybrid_engine.tools.launching import children_of
from hybrid_engine.tools.verify.machine import is_secret

FROZEN = "objects frozen by the collector"
"""The setting that vLLM changes for as long as it lives: its start-up heap is not looked through again and again."""

# What stays: the driver's own, of hardware (cuda.*) or of the software GPU, and tqdm's lock, a semaphore.
_OWN_SHARED_MEMORY = re.compile(r"(/dev/shm/(?!cuda\.|software_gpu\.|sem\.)\S+|/memfd:hybrid_engine\.\S+)")
_STAYING = ("multiprocessing.resource_tracker", "_inductor/compile_worker", "_inductor.compile_worker")
"""Python's and torch's helpers, which stay as long as the process that first needs them."""


@dataclass(frozen=True)
class ProcessState:
    """This process at one time.

    Attributes:
        settings: of torch, Python and the environment, by name.
        children: pid -> command, of those that run.
        shared_memory: names of what is mapped, also of what has lost its name.
    """

    settings: Mapping[str, object]
    children: Mapping[int, str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(dict(_settings()), dict(_children()), frozenset(_shared_memory()))

    def changes(self, before: ProcessState, but: Collection[str] = ()) -> list[str]:
        """Settings that differ, for people; `but`: those that may."""
        names = sorted({*before.settings, *self.settings}.difference(but))
        was, now = before.settings.get, self.settings.get
        changed = [name for name in names if now(name) != was(name)]
        return [f"{name} changed" if is_secret(name) else f"{name}: {now(name)}, was {was(name)}" for name in changed]

    def left_behind(self, before: ProcessState) -> list[str]:
        """What was not there before, for people."""
        children = [f"process {pid}: {self.children[pid]}" for pid in sorted(self.children.keys() - before.children)]
        return children + [f"shared memory {name}" for name in sorted(self.shared_memory - before.shared_memory)]


def _settings() -> Iterator[tuple[str, object]]:
    present = ProcessSettings.now()
    for each in fields(present):
        if each.name != "environment":
            yield each.name.replace("_", " "), getattr(present, each.name)
    for name, value in present.environment.items():
        yield f"${name}", value
    yield "gradients", torch.is_grad_enabled()
    yield "default dtype", torch.get_default_dtype()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "garbage collector", gc.isenabled()
    yield "garbage collector's thresholds", gc.get_threshold()
    yield FROZEN, gc.get_freeze_count()


def _children() -> Iterator[tuple[int, str]]:
    for pid in children_of(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended
            continue
        if command and not any(
            helper in command for helper in _STAYING
        ):  # without a command it has ended, and nobody has asked how
            yield pid, command


def _shared_memory() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := _OWN_SHARED_MEMORY.search(line):
            yield found[1]
