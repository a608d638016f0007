"""What vLLM is told while its groups are built, of what matters on GPUs only.

Its device is the job's, and addresses in CUDA graphs reach its custom all-reduce in the order of the group; kernels are
recorded, not run.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.process.group_placement import building_groups, register_graph_buffers
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks

ORDER = [0, 2, 1, 3]


@pytest.mark.ranks
@pytest.mark.engines
def test_each_ranks_addresses_are_at_its_place_in_the_group(engines: Ranks) -> None:
    expected = ([[10 * rank] for rank in ORDER], [[10 * rank + 1, rank] for rank in ORDER])
    assert engines.launch(registered, 4) == [expected] * 4


def registered() -> tuple[list[list[int]], list[list[int]]]:
    """Handles and offsets that the kernel is given on this rank."""
    dist.init_process_group("gloo")
    group = dist.new_group(ORDER, backend="gloo", sort_ranks=False)
    rank, given = dist.get_rank(), []
    ops = internals.CUSTOM_OPS.load()
    ops.get_graph_buffer_ipc_meta = lambda pointer: ([10 * rank], [10 * rank + 1, rank])
    ops.register_graph_buffers = lambda pointer, handles, offsets: given.append((handles, offsets))
    with internals.REGISTER_GRAPH_BUFFERS.replaced(lambda original: register_graph_buffers):
        as_vllm_calls_it = internals.REGISTER_GRAPH_BUFFERS.load()
        as_vllm_calls_it(SimpleNamespace(group=group, rank=dist.get_rank(group), _ptr=0))
    dist.destroy_process_group()
    (once,) = given
    return once


@pytest.mark.ranks
@pytest.mark.engines
def test_vllm_takes_the_device_of_the_job(engines: Ranks) -> None:
    assert engines.launch(local_ranks, 1) == [("5", "0")]


def local_ranks() -> tuple[str, str]:
    """LOCAL_RANK while vLLM is built for a job on GPU 5, and afterwards."""
    job = Job.join(60, device=torch.device("cuda", 5))
    with building_groups(InferenceSettings("model"), job):
        inside = os.environ["LOCAL_RANK"]
    job.close()
    return inside, os.environ["LOCAL_RANK"]
