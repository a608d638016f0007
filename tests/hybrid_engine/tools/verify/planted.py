"""A plug-in of vLLM that makes its reload leave one tensor unchanged.

It is installed in a directory as the entry point of a distribution, so each vLLM process loads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STALE = "model.layers.1.input_layernorm.weight"


def install_stale_reload(directory: Path) -> dict[str, str]:
    """Install the plug-in, and return the PYTHONPATH for processes that must load it."""
    dist_info = directory / "planted-0.1.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0.1\n")
    (dist_info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nplanted = {__name__}:register\n")
    repository = str(Path(__file__).resolve().parents[3])
    paths = [str(directory), repository, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def register() -> None:
    """Patch vLLM's reload. vLLM may call this more than once."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.reload_weights
    if original.__module__ == __name__:
        return

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.model.get_parameter(STALE).detach().clone()
        original(self, *args, **kwargs)
        self.model.get_parameter(STALE).data.copy_(before)

    GPUModelRunner.reload_weights = reload_weights
