"""The example with an injected fault: `-m tests.faults.faulty_train` in place of `-m
examples.gpt_rl.train`.

The fault names a rank and a function. On that rank the function is wrapped right after the import
of its module, before other modules can import it from there. Product code is unchanged.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hybrid_engine.files.durable import write_text
from tests.faults.job import FAULT_VARIABLE, Fault, FaultError


def install(fault: Fault, happened: Path) -> None:
    """Wrap the function now if its module is imported, otherwise at the import."""
    if fault.module in sys.modules:
        _wrap(sys.modules[fault.module], fault, happened)
    else:
        sys.meta_path.insert(0, _Finder(fault, happened))


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of one module, through the other finders, that wraps its function after execution."""

    def __init__(self, fault: Fault, happened: Path) -> None:
        self._fault = fault
        self._happened = happened

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._fault.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"no module named {name}"
        assert spec.loader is not None, f"no module named {name}"
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module, self._fault, self._happened)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, fault: Fault, happened: Path) -> None:
    *owners, name = fault.function.split(".")
    owner = functools.reduce(getattr, owners, module)
    function = getattr(owner, name)
    calls = itertools.count(1)

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == fault.call:
            _inject(fault, happened)
        return function(*args, **kwargs)

    setattr(owner, name, faulty)


def _inject(fault: Fault, happened: Path) -> None:
    write_text(happened, str(time.monotonic()))
    if fault.kind == "raise":
        raise FaultError(fault.text)
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _install_from_environment() -> None:
    fault, happened = json.loads(os.environ[FAULT_VARIABLE])
    if fault is not None and fault["rank"] == int(os.environ["RANK"]):
        install(Fault(**fault), Path(happened))


if __name__ == "__main__":
    _install_from_environment()
    from examples.gpt_rl.train import main

    main()
