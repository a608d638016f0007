"""torch's settings are training's outside of vLLM, and vLLM's inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hybrid_engine.backends.vllm.process.torch_settings import TorchSettings, torch_settings_kept


@pytest.fixture
def before() -> Iterator[TorchSettings]:
    settings = TorchSettings.now()
    yield settings
    settings.enter()


def change() -> TorchSettings:
    """As vLLM does."""
    torch.set_float32_matmul_precision("high" if torch.get_float32_matmul_precision() == "highest" else "highest")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cuda.enable_cudnn_sdp(not torch.backends.cuda.cudnn_sdp_enabled())
    return TorchSettings.now()


def test_what_is_changed_inside_is_as_before_afterwards(before: TorchSettings) -> None:
    with torch_settings_kept():
        changed = change()
        assert changed == TorchSettings.now() != before
    assert TorchSettings.now() == before
    with torch_settings_kept(changed):
        assert TorchSettings.now() == changed
    assert TorchSettings.now() == before


def test_an_error_leaves_them_too(before: TorchSettings) -> None:
    with pytest.raises(KeyboardInterrupt), torch_settings_kept():
        change()
        raise KeyboardInterrupt
    assert TorchSettings.now() == before


def test_the_current_stream_comes_back(before: TorchSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is replaced: streams are only handed around."""
    current = ["training's"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    with torch_settings_kept(replace(before, stream="vLLM's")):
        assert current == ["vLLM's"]
    assert current == ["training's"]
