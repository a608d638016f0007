"""Build the software GPU's libraries from `native/` with gcc and g++, and the headers in the CUDA
wheels.

    libraries = build()    # a folder in the environment; takes a minute, once
    libcuda = build_driver()   # the driver alone, without torch's CUDA wheel: seconds

Functions that torch's and vLLM's libraries link, but no source here defines, return "not
supported".
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
TORCH = SITE_PACKAGES / "torch"
NCCL_HEADERS = SITE_PACKAGES / "nvidia/nccl/include"

_COMMON = ("-fPIC", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter")
_CPP = ("-std=c++20", *_COMMON)
_CACHE = Path(sys.prefix) / "software_gpu"
_OPERATORS = "operators.cpp"
_LOOKED_UP = (
    "cuStreamWriteValue32",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuMulticastUnbind",
    "cuMulticastGetGranularity",
    "cuGreenCtxCreate",
    "cuCtxFromGreenCtx",
)
"""Functions of the driver that torch looks up by name at its start instead of linking them."""


@dataclass(frozen=True)
class Library:
    """A replaced library of NVIDIA.

    Attributes:
        name: file name and soname.
        sources: files of `native/`.
        functions: pattern of the names of its functions.
        unsupported: result of functions that are not implemented: cudaErrorNotSupported,
            ncclInvalidUsage.
        links: other libraries of the software GPU.
        is_versioned: whether symbols have the library's name as version, as programs link them.
    """

    name: str
    sources: Sequence[str]
    functions: str
    unsupported: int
    links: Sequence[str] = ()
    is_versioned: bool = False


DRIVER = Library(
    "libcuda.so.1",
    (
        "accounts.cpp",
        "checker.cpp",
        "devices.cpp",
        "memory.cpp",
        "peers.cpp",
        "streams.cpp",
        "timeline.cpp",
        "virtual_memory.cpp",
    ),
    r"cu(Mem|Ctx|Device|Stream|Event|Graph|Func|Launch|Module|Library|Kernel|Tensor|Multicast|Pointer|Get|Init)\w*",
    801,
)
LIBRARIES = (
    DRIVER,
    Library(
        "libcudart.so.13",
        ("runtime.cpp",),
        r"(__)?cuda[A-Z]\w*",
        801,
        links=("libcuda.so.1",),
        is_versioned=True,
    ),
    Library(
        "libnccl.so.2",
        (
            "nccl.cpp",
            "nccl_calls.cpp",
            "nccl_collectives.cpp",
            "nccl_communicator.cpp",
            "nccl_exchange.cpp",
            "nccl_groups.cpp",
            "nccl_reductions.cpp",
        ),
        r"p?nccl[A-Z]\w*",
        3,
        links=("libcuda.so.1",),
    ),
    Library("libnvidia-ml.so.1", ("nvml.cpp",), r"nvml[A-Z]\w*", 3),
)


def build() -> Path:
    """Return the folder of the libraries; build them if the sources or the wheels have changed."""
    return _built([Path(__file__), *sorted(NATIVE.iterdir()), TORCH / "version.py"], _build_in)


def build_driver() -> Path:
    """Return the driver's library. Raises PackageNotFoundError without CUDA's headers."""
    return (
        _built([Path(__file__), *_read_by_driver(DRIVER.sources)], _build_driver_in) / DRIVER.name
    )


def _built(sources: Iterable[Path], build_in: Callable[[Path], None]) -> Path:
    """Return the folder of files built from `sources`; `build_in` fills it if it does not exist."""
    folder = _CACHE / _digest_of(sources)
    if folder.is_dir():
        return folder
    _CACHE.mkdir(parents=True, exist_ok=True)
    being_built = Path(tempfile.mkdtemp(dir=_CACHE))
    try:
        build_in(being_built)
        being_built.rename(folder)
    except OSError:
        if not folder.is_dir():  # Otherwise another process was faster.
            raise
    finally:
        shutil.rmtree(being_built, ignore_errors=True)
    return folder


def _build_in(folder: Path) -> None:
    linked = sorted([*TORCH.glob("lib/lib*.so"), *SITE_PACKAGES.glob("vllm/*.so")])
    undefined = _symbols("-D", "--undefined-only", *linked)
    sources = [
        _OPERATORS,
        *(source for library in LIBRARIES for source in library.sources),
    ]  # The longest first.
    objects = _objects_of(sources)
    for library in LIBRARIES:
        _link(folder, library, [objects[source] for source in library.sources], undefined)
    torch = (
        "-L",
        TORCH / "lib",
        *(f"-l{name}" for name in ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")),
    )
    # The driver and the runtime are loaded before.
    unresolved = "-Wl,--unresolved-symbols=ignore-all"
    _run("g++", "-shared", objects[_OPERATORS], *torch, unresolved, "-o", folder / "operators.so")
    _run("gcc", "-shared", *_COMMON, NATIVE / "redirect.c", "-o", folder / "redirect.so")
    for path in SITE_PACKAGES.glob("*.libs/libcudart*.so*"):
        _link_alias(folder, path.name)


def _build_driver_in(folder: Path) -> None:
    _link(folder, DRIVER, [*_objects_of(DRIVER.sources).values()], undefined=())


def _read_by_driver(sources: Iterable[str]) -> list[Path]:
    """Return all files that objects of the driver depend on."""
    return [
        *(NATIVE / source for source in sources),
        *sorted(NATIVE.glob("*.h")),
        _cuda_headers() / "cuda.h",
    ]


def _cuda_headers() -> Path:
    return Path(str(distribution("nvidia-cuda-runtime").locate_file("nvidia/cu13/include")))


def _objects_of(sources: Sequence[str]) -> dict[str, Path]:
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(sources, threads.map(_compiled, sources), strict=True))


def _link_alias(folder: Path, name: str) -> None:
    """Link a runtime under the name of a package's copy: the linker requires that name."""
    runtime = "libcudart.so.13"
    command = [
        "g++",
        "-shared",
        "-x",
        "c",
        "/dev/null",
        f"-Wl,-soname,{name}",
        "-Wl,-rpath,$ORIGIN",
    ]
    command += [
        "-Wl,--no-as-needed",
        "-L",
        folder,
        f"-l:{runtime}",
        f"-Wl,--version-script={folder / runtime}.map",
    ]
    _run(*command, "-o", folder / name)


def _compiled(source: str) -> Path:
    """Return the object file of a source, cached by the digest of all its dependencies."""
    includes = [_cuda_headers(), NCCL_HEADERS]
    dependencies = _read_by_driver([source])
    if source == _OPERATORS:
        includes += [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    if source not in DRIVER.sources:
        dependencies.append(TORCH / "version.py")
    digest = _digest_of(dependencies)
    kept = _CACHE / "objects" / f"{source}.{digest}.o"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_name(f"{kept.name}.{os.getpid()}")
        _run(
            "g++", *_CPP, "-c", *(f"-I{path}" for path in includes), NATIVE / source, "-o", written
        )
        written.rename(kept)
    return kept


def _link(
    folder: Path, library: Library, objects: Sequence[Path], undefined: Iterable[str]
) -> None:
    defined = _symbols("--defined-only", *objects)
    wanted = {name for name in {*undefined, *_LOOKED_UP} if re.fullmatch(library.functions, name)}
    stubs = folder / f"{library.name}.unsupported.c"
    lines = [
        f"int {name}(void) {{ return {library.unsupported}; }}\n"
        for name in sorted(wanted - defined)
    ]
    stubs.write_text("".join(lines))
    compiled = stubs.with_suffix(".o")
    _run("gcc", "-c", "-fPIC", "-fno-builtin", "-w", stubs, "-o", compiled)
    command = [
        "g++",
        "-shared",
        *objects,
        compiled,
        f"-Wl,-soname,{library.name}",
        "-Wl,-rpath,$ORIGIN",
    ]
    command += [
        "-L",
        folder,
        *(f"-l:{name}" for name in library.links),
        "-ldl",
        "-lpthread",
        "-lrt",
    ]
    if library.is_versioned:
        versions = folder / f"{library.name}.map"
        versions.write_text(
            f"{library.name} {{ global: cuda*; __cuda*; software_gpu_*; local: *; }};\n"
        )
        command.append(f"-Wl,--version-script={versions}")
    _run(*command, "-o", folder / library.name)


def _symbols(*arguments: object) -> set[str]:
    """Return the names of functions listed by nm, without versions."""
    listing = _run("nm", *arguments)
    return {
        line.split()[-1].partition("@")[0] for line in listing.splitlines() if len(line.split()) > 1
    }


def _digest_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _run(*command: object) -> str:
    """Return the output of a command. Raises RuntimeError with its errors."""
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{result.stderr[-4000:]}")
    return result.stdout


if __name__ == "__main__":
    print(build())
