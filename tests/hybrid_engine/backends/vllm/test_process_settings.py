"""torch's settings and the environment are training's outside of vLLM, and vLLM's inside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hybrid_engine.backends.vllm.process.process_settings import ProcessSettings, process_settings_kept


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OF_TRAINING", "0")
    monkeypatch.setenv("OF_BOTH", "0")
    settings = ProcessSettings.now()
    yield
    settings.enter()


def change() -> ProcessSettings:
    """As vLLM does."""
    torch.set_float32_matmul_precision("high" if torch.get_float32_matmul_precision() == "highest" else "highest")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cuda.enable_cudnn_sdp(not torch.backends.cuda.cudnn_sdp_enabled())
    os.environ.pop("OF_TRAINING", None)
    os.environ["OF_VLLM"] = os.environ["OF_BOTH"] = "1"
    return ProcessSettings.now()


def test_what_is_changed_inside_is_as_before_afterwards() -> None:
    before = ProcessSettings.now()
    with process_settings_kept():
        changed = change()
        assert changed == ProcessSettings.now() != before
    assert ProcessSettings.now() == before
    with process_settings_kept(changed):
        assert ProcessSettings.now() == changed
    assert ProcessSettings.now() == before


def test_an_error_leaves_them_too() -> None:
    before = ProcessSettings.now()
    with pytest.raises(KeyboardInterrupt), process_settings_kept():
        change()
        raise KeyboardInterrupt
    assert ProcessSettings.now() == before


def test_the_current_stream_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is replaced: streams are only handed around."""
    current = ["training's"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    with process_settings_kept(replace(ProcessSettings.now(), stream="vLLM's")):
        assert current == ["vLLM's"]
    assert current == ["training's"]
