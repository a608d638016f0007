"""vLLM's wheel without what the stages do not need: 50 MB of 330."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

EXTENSIONS = {"vllm/_C_stable_libtorch.abi3.so": 2, "vllm/_moe_C_stable_libtorch.abi3.so": 3}
"""Large ones, each by itself -> the first stage that needs it; the second is for experts."""
SMALL = 64 * 1024
"""Bytes up to which an extension is carried with the rest."""
EMPTY = "vllm/vllm_flash_attn/_vllm_fa2_C.py"
"""In place of FlashAttention's extension, which its package wants to import; attention is Triton's."""
_LEFT_OUT = (".h", ".hpp", ".cuh", ".cu", ".inl")
"""Sources of kernels that other extensions would compile."""


def is_carried(name: str, nbytes: int) -> bool:
    """Whether a file of the wheel is carried with the rest."""
    if name.endswith(".so"):
        return nbytes <= SMALL
    return name != "vllm/vllm-rs" and not (name.startswith("vllm/third_party/") and name.endswith(_LEFT_OUT))


def files_of(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Name and contents of what is carried of the wheel, but for EXTENSIONS."""
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            if not info.is_dir() and is_carried(info.filename, info.file_size):
                yield info.filename, archive.read(info)
    yield EMPTY, b""


def extension_of(wheel: Path, name: str) -> bytes:
    """Contents of one of EXTENSIONS. Raises KeyError where the wheel has none of this name."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)
