"""Suspended communicators return their memory, and compute as before after they are resumed."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.ranks.communicators import IdleCommunicators, require_suspension

NUM_RANKS = 2
NBYTES = 64 * 2**20


def suspend_and_resume(rank: int, store: str, connection: Connection) -> None:
    """Suspend and resume in a new process; send the sums, and the device memory taken."""
    require_suspension("suspend_communicators")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", f"file://{store}", rank=rank, world_size=NUM_RANKS, device_id=None
    )
    used, other, unused, on_host = (
        dist.new_group([0, 1], backend=name) for name in ("nccl", "nccl", "nccl", "gloo")
    )
    tensor = torch.ones(1, device=device)
    before = torch.cuda.mem_get_info(device)[0]

    def taken() -> int:
        return before - torch.cuda.mem_get_info(device)[0]

    def summed() -> float:
        ones = torch.ones_like(tensor)
        dist.all_reduce(ones, group=used)
        dist.all_reduce(ones, group=other)
        return ones.item()

    sums = [summed()]
    nbytes = [taken()]
    idle = IdleCommunicators(lambda: [used, other, other, unused, on_host])
    for _ in range(2):
        given_back = idle.suspend()
        nbytes += [given_back, taken()]
        with pytest.raises(dist.DistError, match="is suspended"):
            dist.all_reduce(tensor, group=used)
        idle.resume()
        idle.resume()
        nbytes.append(taken())
        sums.append(summed())
    connection.send((sums, nbytes))
    dist.destroy_process_group()


def test_memory_is_returned_and_taken_again_and_unused_groups_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTWARE_GPU_NCCL_NBYTES", str(NBYTES))
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(NUM_RANKS)]
    processes = [
        context.Process(target=suspend_and_resume, args=(rank, str(tmp_path / "store"), sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    total = NUM_RANKS * NBYTES
    try:
        for receiver, _ in pipes:
            assert receiver.poll(120)
            sums, nbytes = receiver.recv()
            assert sums == [4.0] * 3
            assert nbytes == [total, *[total, 0, total] * 2]
    finally:
        for process in processes:
            process.join(30)
            process.kill()
            process.join()
