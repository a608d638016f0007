"""The example as its users start it, with a short configuration."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from examples.gpt_rl import settings
from hybrid_engine.tools.launching import kill_tree
from tests.harness.launch import REPO_ROOT

CONFIGS = Path(settings.__file__).parent / "configs"


def short_config(
    name: str,
    directory: Path,
    micro_batch_size: int = 16,
    generate: Mapping[str, Any] | None = None,
    rl: Mapping[str, Any] | None = None,
) -> Path:
    """A committed configuration with little to do and a checkpoint after each iteration; `generate`, `rl`: keys."""
    values = yaml.safe_load((CONFIGS / name).read_text())
    values["model"] = str((CONFIGS / values["model"]).resolve())
    values["actor_config"]["micro_batch_size"] = micro_batch_size
    values["rl_config"].update(
        data=str((CONFIGS / values["rl_config"]["data"]).resolve()),
        iterations=1000,
        prompts_per_iteration=16,
        samples_per_prompt=4,
        minibatches=2,
        temperature=0.7,
        checkpoint_every=1,
        warm_up={"max_steps": 10, "batch_size": 32},
    )
    values["generate_config"].update(generate or {})
    values["rl_config"].update(rl or {})
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(
    config: Path,
    out: Path,
    *options: str,
    num_ranks: int = 2,
    modules: Path | None = None,
    terminal: int | None = None,
) -> subprocess.Popen[str]:
    """Start a run; `modules` come before those of the repository and the environment.

    `terminal`: what it writes to, in place of a pipe.
    """
    launcher = [sys.executable, "-m", "examples.gpt_rl.torchrun", "--standalone", "--nproc-per-node", str(num_ranks)]
    found_in = [str(REPO_ROOT)] if modules is None else [str(modules), str(REPO_ROOT)]
    return subprocess.Popen(
        [*launcher, "-m", "examples.gpt_rl.train", "--config", str(config), "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(found_in)},
        cwd=REPO_ROOT,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Terminal:
    """A pseudo-terminal of so many columns, and what is shown on it."""

    def __init__(self, columns: int) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (50, columns))
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self) -> list[str]:
        """What stands there at the end, line by line; call it when whoever writes has ended."""
        os.close(self.theirs)
        self._reader.join(20)
        os.close(self._ours)
        text = self._shown.decode()
        text = re.sub(r"[^\n]*(\r\x1b\[2K|\x1b\[1A\x1b\[2K)", "", text)  # a bar that was erased
        return [line.rstrip("\r") for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).split("\n")]

    def _read(self) -> None:
        while True:
            try:
                self._shown += os.read(self._ours, 4096)
            except OSError:  # nobody has the other end any more
                return


def finish(process: subprocess.Popen[str], timeout: float = 200) -> str:
    """Everything printed; the processes are gone afterwards, whatever happened."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            kill_tree(process)
            process.communicate()
