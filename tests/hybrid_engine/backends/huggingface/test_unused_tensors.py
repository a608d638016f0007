"""Checkpoint tensors that fill no parameter; files alone, without ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybrid_engine.backends.huggingface import loading
from hybrid_engine.backends.huggingface.loading import HEAD, compare_repetitions, log_unused
from hybrid_engine.backends.huggingface.safetensors_files import stored_tensors
from hybrid_engine.errors import ParameterMismatchError
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from tests.zoo.families import served_config

EMBEDDING = "model.embed_tokens.weight"
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def table() -> ModelTable:
    return table_for(served_config("qwen2", tie_word_embeddings=True))


def compare(path: Path, table: ModelTable, head: Change) -> None:
    embedding = torch.randn(table.shapes[EMBEDDING], generator=torch.Generator().manual_seed(0))
    save_file({EMBEDDING: embedding, HEAD: head(embedding)}, path / "model.safetensors")
    stored = stored_tensors(path)
    for rank in range(2):
        list(compare_repetitions(path, stored, table, rank, 2))


def with_one_change(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[-1, -1] += 1
    return tensor


@pytest.mark.parametrize("head", [torch.clone, torch.Tensor.bfloat16, torch.Tensor.double])
def test_a_tied_head_equal_to_the_embedding_is_accepted(
    tmp_path: Path, table: ModelTable, head: Change
) -> None:
    compare(tmp_path, table, head)


@pytest.mark.parametrize("step_nbytes", [1, 10_000, 1 << 30])
def test_a_tied_head_with_other_values_is_refused(
    tmp_path: Path, table: ModelTable, monkeypatch: pytest.MonkeyPatch, step_nbytes: int
) -> None:
    """A head of another size is in test_hf_checkpoint.py."""
    monkeypatch.setattr(loading, "_STEP_NBYTES", step_nbytes)
    with pytest.raises(ParameterMismatchError, match=rf"{HEAD}: 1 elements .* {EMBEDDING}"):
        compare(tmp_path, table, with_one_change)


def test_an_untied_head_may_differ_from_the_embedding(tmp_path: Path) -> None:
    compare(tmp_path, table_for(served_config("qwen2")), with_one_change)


def test_unused_tensors_are_logged(
    tmp_path: Path, table: ModelTable, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {EMBEDDING: torch.zeros(table.shapes[EMBEDDING]), name: torch.ones(8)}
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, loading.__name__):
        log_unused(tmp_path, stored_tensors(tmp_path), table)
    (line,) = caplog.messages
    assert line.endswith(f": {name}")
