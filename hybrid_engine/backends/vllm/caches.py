"""The memory of vLLM's caches of every kind: keys and values, MLA's latent vectors, states of linear attention.

A block that a request leaves keeps what it held, and kernels read more of a block than what is valid in it: a masked
score is zero, and zero times NaN is NaN. So what a diverged policy left would spoil later requests in the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals


def zero_caches(llm: Any) -> None:
    """Zero all of the memory behind every cache; takes as long as writing it."""
    for storage in {each.data_ptr(): each for each in _storages(llm)}.values():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def _storages(llm: Any) -> Iterator[torch.UntypedStorage]:
    """Memory of what vLLM's layers and its model runner hold: views of whatever shape, alone or in tuples."""
    runner, tree_leaves = internals.model_runner_of(llm), internals.TREE_LEAVES.load()
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    held = [*runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)]
    return (leaf.untyped_storage() for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor))
