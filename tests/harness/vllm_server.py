"""A vLLM server for tests: `vllm serve`, on a CPU in processes that are forked from one import.

    with serving(directory, "--load-format", "hybrid_engine", ...) as server:
        server.url, server.processes(), server.log

vLLM spawns its engine core and workers, each of which imports all of it for a quarter of a minute of CPU. Here they are
forked, without a GPU, unless VLLM_WORKER_MULTIPROC_METHOD says spawn; what else they do is vLLM's own. The CPU build
has another distribution's name than `vllm serve` asks for, so the server is started by the module behind it.
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
PLAIN = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--uvicorn-log-level", "warning", "--skip-tokenizer-init"),
)
FILLED = ("--load-format", "hybrid_engine", "--weight-transfer-config", '{"backend": "hybrid_engine"}')
ENVIRONMENT = {
    **{"OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"},
}
_OF_OTHERS = ("VLLM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


@dataclass
class Server:
    """A server that is up.

    Attributes:
        url: of it.
        pid: of the process that answers HTTP; it leads a session of its own.
        log: what all its processes say.
    """

    url: str
    pid: int
    log: Path

    def processes(self) -> dict[str, list[int]]:
        """Ids of its processes, by what vLLM calls them: APIServer, EngineCore, Worker."""
        found: dict[str, list[int]] = {}
        for pid in _session(self.pid):
            name = Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("VLLM::").partition("_")[0]
            found.setdefault(name, []).append(pid)
        return found


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.parent.name))
    return sorted(found)


@contextlib.contextmanager
def serving(
    model: str | Path,
    directory: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    host: Host | None = None,
) -> Iterator[Server]:
    """A server of the model, on a port of the loopback (default: a free one); afterwards none of its processes is left.

    Args:
        model: its directory.
        directory: for its log.
        host: it runs there, at the address of the link; default: here. `model` is then a path there, and `directory`
            one here.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log, port_file = directory / "server.log", directory / "port"
    port_file.unlink(missing_ok=True)
    address = host.address if host else "127.0.0.1"
    command = [sys.executable, "-m", __name__, str(port_file), address, str(port or 0), str(model), *arguments]
    path = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # what an engine in this process has set there, or a launcher, is not meant for a server
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
    settings = {**inherited, **ENVIRONMENT, "PYTHONPATH": path, **(environment or {})}
    place = host.command() if host else []  # which become the server
    with log.open("w") as out:
        process = subprocess.Popen([*place, *command], stdout=out, stderr=out, env=settings, start_new_session=True)
    try:
        with host.network() if host else contextlib.nullcontext():
            server = _once_up(process, port_file, address, log)
        yield server
    finally:
        _end(process)


def _once_up(
    process: subprocess.Popen[bytes], port_file: Path, address: str, log: Path, seconds: float = 300
) -> Server:
    import requests

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if port_file.is_file() and (port := port_file.read_text()):
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"http://{address}:{port}/health", timeout=5).ok:
                    return Server(f"http://{address}:{port}", process.pid, log)
        time.sleep(0.1)
    raise AssertionError(f"the server is not up:\n{log.read_text()[-5000:]}")


def has_route(server: HttpServer, route: str) -> bool:
    """Whether this vLLM has it."""
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
    if not (is_spawning or torch.cuda.is_available()):  # of which a fork has nothing
        fork_processes()
        torch.compiler.set_stance("force_eager")  # samplers are compiled at the first request, for a minute
    register_model_class(model)  # else vLLM starts a process of its own to look at the class
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, int(wanted)))
        port = str(probe.getsockname()[1])
    sys.argv = ["server", "--model", model, "--host", address, "--port", port, *arguments]
    Path(port_file).write_text(port)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def fork_processes() -> None:
    """Have vLLM fork the processes that it starts, with what is imported by now."""
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
