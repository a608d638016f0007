"""A vLLM server for tests: `vllm serve`, whose processes on a CPU are forks of a process with all
imports done.

    with serving(directory, "--load-format", "hybrid_engine", ...) as server:
        server.url, server.processes(), server.log

vLLM spawns its engine core and workers, and each process spends 15 s of CPU time on importing vLLM.
Without a GPU they are forked here instead, unless VLLM_WORKER_MULTIPROC_METHOD is "spawn"; nothing
else of vLLM is changed. `vllm serve` looks up a distribution name that the CPU build does not have,
so the server is started by its module.

SERVER_PYTHON names the interpreter of an environment with another vLLM, for all servers.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_engine.serving.clients import HttpServer

from tests.harness.hosts import Host

REPO_ROOT = Path(__file__).resolve().parents[2]
REQUEST = {
    "prompt": [5, 6, 7, 8],
    "max_tokens": 8,
    "temperature": 0.0,
    "logprobs": 0,
    "return_token_ids": True,
}
"""Body of a request whose completion is compared with what a trainer computes."""
PLAIN = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8"),
    *(
        "--kv-cache-memory-bytes",
        str(64 << 20),
        "--uvicorn-log-level",
        "warning",
        "--skip-tokenizer-init",
    ),
)
FILLED = (
    "--load-format",
    "hybrid_engine",
    "--weight-transfer-config",
    '{"backend": "hybrid_engine"}',
)
ENVIRONMENT = {
    **{
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    },
    **{
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
    },
}
_NOT_INHERITED = ("VLLM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


@dataclass
class Server:
    """A running server.

    Attributes:
        url: its base URL.
        pid: process that answers HTTP; it leads a session of its own.
        log: output of all its processes.
    """

    url: str
    pid: int
    log: Path

    def processes(self) -> dict[str, list[int]]:
        """Return ids of its processes by vLLM's names for them: APIServer, EngineCore, Worker."""
        pids: dict[str, list[int]] = {}
        for pid in _session(self.pid):
            name = (
                Path(f"/proc/{pid}/comm")
                .read_text()
                .strip()
                .removeprefix("VLLM::")
                .partition("_")[0]
            )
            pids.setdefault(name, []).append(pid)
        return pids


def _session(leader: int) -> list[int]:
    """Return the ids of all processes of a session."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                pids.append(int(entry.parent.name))
    return sorted(pids)


@contextlib.contextmanager
def serving(
    model: str | Path,
    directory: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    host: Host | None = None,
) -> Iterator[Server]:
    """Run a server of a model; end all of its processes afterwards.

    Args:
        model: directory of the model; a path on `host`, if given.
        directory: receives the log; a path on this host.
        port: port to listen at; default: a free one.
        host: simulated host that runs the server at its address on the link; default: this host,
            loopback.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "server.log"
    port_file = directory / "port"
    port_file.unlink(missing_ok=True)
    address = host.address if host else "127.0.0.1"
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    command = [
        python,
        "-m",
        __name__,
        str(port_file),
        address,
        str(port or 0),
        str(model),
        *arguments,
    ]
    path = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A server must not inherit variables set by an engine in this process or by a launcher.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)
    }
    settings = {**inherited, **ENVIRONMENT, "PYTHONPATH": path, **(environment or {})}
    prefix = host.command() if host else []
    with log.open("w") as out:
        process = subprocess.Popen(
            [*prefix, *command], stdout=out, stderr=out, env=settings, start_new_session=True
        )
    try:
        with host.network() if host else contextlib.nullcontext():
            server = _once_up(process, port_file, address, log)
        yield server
    finally:
        _end(process)


def _once_up(process: subprocess.Popen[bytes], port_file: Path, address: str, log: Path) -> Server:
    import requests

    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.is_file() and (port := port_file.read_text()):
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"http://{address}:{port}/health", timeout=5).ok:
                    return Server(f"http://{address}:{port}", process.pid, log)
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-5000:]}")


def has_route(server: HttpServer, route: str) -> bool:
    """Return whether this version of vLLM has the HTTP route."""
    return f"/{route}" in server.get("openapi.json")["paths"]


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        for pid in _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                if number is signal.SIGKILL or pid == process.pid:
                    os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (process.poll() is None or _session(process.pid)):
            time.sleep(0.05)
    process.wait()


def main() -> None:
    """Serve, until killed."""
    import socket

    import torch

    from hybrid_engine.backends.vllm.isolation import register_model_class

    port_file, address, wanted, model, *arguments = sys.argv[1:]
    is_spawning = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn"
    if not (is_spawning or torch.cuda.is_available()):  # CUDA does not survive a fork.
        fork_processes()
        # Otherwise vLLM spends a minute on compiling samplers at the first request.
        torch.compiler.set_stance("force_eager")
    register_model_class(model)  # Otherwise vLLM starts a process to inspect the class.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, int(wanted)))
        port = str(probe.getsockname()[1])
    sys.argv = ["server", "--model", model, "--host", address, "--port", port, *arguments]
    Path(port_file).write_text(port)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def fork_processes() -> None:
    """Make vLLM fork its processes from this one, with all imports done."""
    import multiprocessing

    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    def forking() -> Any:
        return multiprocessing.get_context("fork")

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and hasattr(module, "get_mp_context"):
            module.get_mp_context = forking  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
