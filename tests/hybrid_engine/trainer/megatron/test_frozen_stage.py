"""A stage of which every parameter is frozen: Megatron's optimizer has nothing to step there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch


def test_its_weights_have_the_version_of_the_others() -> None:
    from hybrid_engine.backends.megatron.live_model import LiveModel
    from hybrid_engine.trainer.megatron.pipeline_engine import PipelineEngine

    class Stage(MagicMock):
        version = LiveModel.version
        learning_rate, scheduler = 0.1, None
        optimizer = MagicMock(is_stub_optimizer=True, **{"step.return_value": (True, 0.0, 0)})

        def _run(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def _require_optimizer(self) -> Any:
            return self.optimizer

        def _average(self, _: Any) -> dict[str, float]:
            return {}

    stage = Stage(weights=SimpleNamespace(model=SimpleNamespace(ddp_chunks=[])))
    for steps in (1, 2):
        report = PipelineEngine.train_step(stage, {"tokens": torch.zeros(1, 1)}, lambda *_: None)
        assert (report["skipped"], stage.version) == (0.0, steps)
