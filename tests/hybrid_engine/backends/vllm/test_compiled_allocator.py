"""The next engine in a process gets memory, and nothing of the one before stays: with vLLM's own compiled allocator.

Its file is in vLLM's wheel for CUDA, which `make offline-bundle` downloads.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid_engine.backends.vllm import fake_libcuda
from tests.hybrid_engine.backends.vllm.fake_libcuda.sleeping import LIBRARIES

pytestmark = pytest.mark.slow  # imports vLLM in a process of its own

REPOSITORY = Path(__file__).resolve().parents[4]
SOURCE = Path(fake_libcuda.__file__).parent / "libcuda.c"
ALLOCATOR = "cumem_allocator.abi3.so"


def compiled_allocator() -> bytes | None:
    """Of the installed vLLM, or of a wheel that was downloaded."""
    spec = importlib.util.find_spec("vllm.cumem_allocator")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).read_bytes()
    for wheel in sorted(REPOSITORY.glob("build/offline-wheels/vllm-*.whl")):
        return zipfile.ZipFile(wheel).read(f"vllm/{ALLOCATOR}")
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See sleeping.py."""
    if (contents := compiled_allocator()) is None:
        pytest.skip(f"{ALLOCATOR} is neither installed nor in a wheel of build/offline-wheels")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("libraries")
    (folder / ALLOCATOR).write_bytes(contents)
    (folder / "empty.c").write_text("")
    sources = {"libcuda.so.1": SOURCE, **dict.fromkeys(LIBRARIES, folder / "empty.c")}
    for name, source in sources.items():
        command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    """By case."""
    command = [sys.executable, "-m", "tests.hybrid_engine.backends.vllm.fake_libcuda.sleeping", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def test_an_engine_that_was_asleep_leaves_nothing(found: dict[str, dict[str, Any]]) -> None:
    assert found["one_after_the_other"] == {"built": 194, "left": 0}


def test_weights_that_stayed_awake_are_given_back(found: dict[str, dict[str, Any]]) -> None:
    assert found["only_the_cache_asleep"] == {"built": 194, "asleep": 130, "left": 0}


def test_tensors_that_outlive_their_engine_are_named_and_harmless(found: dict[str, dict[str, Any]]) -> None:
    late = found["late_tensors"]
    assert late.pop("refused").startswith(f"{128 * 2**20} bytes of an earlier vLLM's weights or caches are in use")
    assert late == {"built": 194, "without": None, "left": 0}
