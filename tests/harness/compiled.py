"""Compilation of the C libraries of tests."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import SkipTest


def load_compiled(name: str, source: Path = Path("/dev/null")) -> None:
    """Compile a C file (default: an empty one) and load it as the shared library `name`."""
    if (compiler := shutil.which("cc")) is None:
        raise SkipTest(f"{source} requires a C compiler (cc)")
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "-shared",
            "-fPIC",
            "-O1",
            "-pthread",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-Wl,-soname,{name}",
        ]
        command = [compiler, *options, "-o", f"{folder}/{name}", "-x", "c", str(source)]
        subprocess.run(command, check=True, timeout=60)
        ctypes.CDLL(f"{folder}/{name}", ctypes.RTLD_GLOBAL)
