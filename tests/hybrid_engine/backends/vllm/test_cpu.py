"""vLLM's kernel on a CPU that rotates queries, as mended."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.backends.vllm import internals

HEADS, ELEMENTS, TOKENS = 3, 64, 5


def rotated(queries: torch.Tensor, key: torch.Tensor | None, *, is_mended: bool) -> tuple[torch.Tensor, ...]:
    """By a rotary embedding that vLLM made while its kernel was mended, or was not."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from hybrid_engine.backends.vllm.cpu.cpu_worker import _on_rows

    def make() -> torch.nn.Module:
        return RotaryEmbedding(ELEMENTS, ELEMENTS, 32, 10000.0, False, torch.float32)

    # As an eager engine has it: with vLLM's kernels, not with torch's operations.
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        if is_mended:
            with internals.ROTATE.replaced(_on_rows):
                embedding = make()
        else:
            embedding = make()
    return embedding(torch.arange(TOKENS), queries.clone(), None if key is None else key.clone())


@pytest.fixture
def queries() -> torch.Tensor:
    """[tokens, heads, elements]."""
    return torch.randn(TOKENS, HEADS, ELEMENTS, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow  # imports vLLM
def test_queries_by_head_are_rotated_as_those_in_rows(queries: torch.Tensor) -> None:
    key = queries[:, :1] * 2
    rows, row = rotated(queries.flatten(1), key.flatten(1), is_mended=False)
    by_head, one_head = rotated(queries, key, is_mended=True)
    assert torch.equal(by_head.flatten(1), rows)
    assert torch.equal(one_head.flatten(1), row)


@pytest.mark.slow  # imports vLLM
def test_without_keys_there_are_none(queries: torch.Tensor) -> None:
    rotated_queries, key = rotated(queries, None, is_mended=True)
    assert rotated_queries.shape == queries.shape
    assert key is None


@pytest.mark.slow  # imports vLLM
def test_vllm_needs_it_still(queries: torch.Tensor) -> None:
    """If this fails the kernel follows strides, and ROTATE may go."""
    rows, _ = rotated(queries.flatten(1), queries[:, :1].flatten(1), is_mended=False)
    by_head, _ = rotated(queries, queries[:, :1], is_mended=False)
    assert not torch.equal(by_head.flatten(1), rows)
