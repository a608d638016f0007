"""An import hook that lets PyPI's torchvision, built for CUDA, run beside a torch for CPUs.

Its C extension cannot be loaded there, and `import torchvision` fails, because it describes two
operators of that extension for which there is then no schema. The hook declares them when
torchvision is imported. They cannot be called; transforms of images are torch and PIL alone.

Processes get the hook by their PYTHONPATH (tests/zoo/vision_models.py).
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []


class OperatorSchemas(MetaPathFinder):
    """Declares torchvision's operators just before its first import; finds no module itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision" and not _libraries:
            import torch

            if torch.version.cuda is None:
                # A library takes its declarations back at its collection.
                _libraries.append(torch.library.Library("torchvision", "DEF"))
                for schema in SCHEMAS:
                    _libraries[0].define(schema)


sys.meta_path.insert(0, OperatorSchemas())
