"""State of a process that vLLM could change: settings, child processes, shared memory."""

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
"""A setting that vLLM changes during its life, so that the collector skips its start-up heap."""

# Not memory of the driver, of hardware (cuda.*) or the software GPU, and tqdm's semaphore.
_SHARED_MEMORY = re.compile(
    r"(/dev/shm/(?!cuda\.|software_gpu\.|sem\.)\S+|/memfd:hybrid_engine\.\S+)"
)
_HELPERS = (
    "multiprocessing.resource_tracker",
    "_inductor/compile_worker",
    "_inductor.compile_worker",
)
"""Helper processes of Python and torch, which last as long as the process."""


@dataclass(frozen=True)
class ProcessState:
    """State of this process at one time.

    Attributes:
        settings: settings of torch, Python and the environment, by name.
        children: commands of running child processes, by pid.
        shared_memory: names of mapped shared memory, also if unlinked.
    """

    settings: Mapping[str, object]
    children: Mapping[int, str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(dict(_settings()), dict(_children()), frozenset(_shared_memory()))

    def changes(self, before: ProcessState, but: Collection[str] = ()) -> list[str]:
        """Return descriptions of changed settings, except those in `but`."""
        changes = []
        for name in sorted({*before.settings, *self.settings}.difference(but)):
            old = before.settings.get(name)
            new = self.settings.get(name)
            if new != old:
                changes.append(
                    f"{name} changed" if is_secret(name) else f"{name}: {new}, was {old}"
                )
        return changes

    def left_behind(self, before: ProcessState) -> list[str]:
        """Return descriptions of new child processes and shared memory."""
        children = [
            f"process {pid}: {self.children[pid]}"
            for pid in sorted(self.children.keys() - before.children)
        ]
        return children + [
            f"shared memory {name}" for name in sorted(self.shared_memory - before.shared_memory)
        ]


def _settings() -> Iterator[tuple[str, object]]:
    present = ProcessSettings.now()
    for field in fields(present):
        if field.name != "environment":
            yield field.name.replace("_", " "), getattr(present, field.name)
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
            command = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
        except OSError:  # The process has ended.
            continue
        # A zombie has no command.
        if command and not any(helper in command for helper in _HELPERS):
            yield pid, command


def _shared_memory() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := _SHARED_MEMORY.search(line):
            yield match[1]
