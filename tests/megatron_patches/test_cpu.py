"""Unit tests of the CPU substitutes; hybrid_engine/backends/megatron tests training on them."""

from __future__ import annotations

import functools
import importlib
import os

import pytest
import torch
import torch.distributed as dist

import megatron_patches
from megatron_patches import errors
from megatron_patches.cpu import core, cuda_names
from tests.harness.launch import on_engines


def test_a_freed_output_keeps_its_memory_while_it_may_be_sent() -> None:
    """gloo holds only the address of the memory."""
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    output = torch.arange(4.0)
    address = output.data_ptr()
    free = core._keep_output_while_sent(deallocate_output_tensor)
    free(output, deallocate_pipeline_outputs=False)
    assert output.numel() == 4
    free(output, deallocate_pipeline_outputs=True)
    assert output.numel() == 1
    assert output.kept_for_sending.data_ptr() == address
    free(None, deallocate_pipeline_outputs=True)


def test_graph_safe_rng_is_refused() -> None:
    from megatron.core.tensor_parallel import random

    megatron_patches.apply(["cpu"])
    with pytest.raises(errors.CpuUnsupportedError, match="use_cudagraphable_rng"):
        random._get_cuda_rng_state(graph_safe=True)


def compiled_targets() -> set[str]:
    """Return the targets whose code is a wrapper's, without torch's private names."""
    compiled = set()
    for target in core._COMPILED:
        module, _, path = f"megatron.core.{target}".partition(":")
        function = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        if f"{os.sep}megatron{os.sep}core{os.sep}" not in function.__code__.co_filename:
            compiled.add(target)
    return compiled


def test_compiled_functions_of_megatron_run_eagerly() -> None:
    assert compiled_targets() == set(core._COMPILED)
    megatron_patches.apply(["cpu"])
    assert compiled_targets() == set()


@on_engines(2)
def test_collectives_of_uneven_parts_and_groups_of_nccl() -> None:
    megatron_patches.apply(["cpu"])
    dist.init_process_group("gloo")
    for dtype in (torch.float32, torch.bfloat16):
        check_uneven_collectives(dtype)
    from megatron.core import parallel_state

    options = {
        "pipeline_model_parallel_comm_backend": "nccl",
        "high_priority_stream_groups": ["dp_cp", "tp", "pp"],
    }
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, **options)
    assert dist.get_backend(parallel_state.get_pipeline_model_parallel_group()) == "gloo", (
        "NCCL's options are dropped"
    )


def check_uneven_collectives(dtype: torch.dtype) -> None:
    """Gather and scatter one row of rank 0 and three rows of rank 1."""
    rank = dist.get_rank()
    sizes = [1, 3]
    own_rows = torch.full((sizes[rank], 2), float(rank + 1), dtype=dtype)
    gathered = torch.zeros(4, 2, dtype=dtype)
    cuda_names.all_gather(list(gathered.split(sizes)), own_rows)
    assert gathered[:, 0].tolist() == [1, 2, 2, 2]
    everything = torch.arange(4, dtype=dtype)[:, None].expand(4, 2) * (rank + 1)
    output = torch.zeros(sizes[rank], 2, dtype=dtype)
    cuda_names.reduce_scatter(output, list(everything.split(sizes)))
    assert output[:, 0].tolist() == [[0], [3, 6, 9]][rank]
    with pytest.raises(errors.CpuUnsupportedError, match="uneven"):
        cuda_names.all_gather(list(gathered.split(sizes)), own_rows, async_op=True)
