"""A plug-in of a test's vLLM, whose reload leaves one tensor as it was: `planted(directory)` is the environment.

It is installed in `directory`, as an entry point of a distribution, so that vLLM finds it in each of its processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STALE = "model.layers.1.input_layernorm.weight"


def planted(directory: Path) -> dict[str, str]:
    """PYTHONPATH of a process whose vLLM loads the plug-in."""
    place = directory / "planted-0.1.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0.1\n")
    (place / "entry_points.txt").write_text(f"[vllm.general_plugins]\nplanted = {__name__}:register\n")
    repository = str(Path(__file__).resolve().parents[3])
    paths = [str(directory), repository, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def register() -> None:
    """Called by vLLM, maybe more than once."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.reload_weights
    if original.__module__ == __name__:
        return

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.model.get_parameter(STALE).detach().clone()
        original(self, *args, **kwargs)
        self.model.get_parameter(STALE).data.copy_(before)

    GPUModelRunner.reload_weights = reload_weights
