"""Ranks on two pretended hosts hold the same as on one; no byte crosses the network twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid_engine import ActorHybridWorker
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.ranks import rank_tree
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout
from tests.harness.launch import of_all_ranks, on_engines
from tests.hybrid_engine.end_to_end.digests import digest
from tests.hybrid_engine.planning.cases import network_lower_bound
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HEADERS_AND_PADDING = 1 << 16
TOGETHER = "aaaa"
APART = "aabb"
"""The host of each rank."""
ACTOR = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "params_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3")


@on_engines(4, timeout=400)
def test_vllm_holds_and_generates_the_same_on_one_host_and_on_two(model: Path) -> None:
    assert switched_on(model, APART) == switched_on(model, TOGETHER)


def switched_on(model: Path, hosts: str) -> tuple[list[dict[str, str]], tuple[int, ...], int]:
    """Switch from two pipeline stages of TP 2 to uncut models, twice with an update between; check
    the second switch.

    Return the digests of vLLM's weights in both switches, its tokens, and the least bytes.
    """
    config = workers.configuration(model, ACTOR, {"bucket_mb": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rank_tree, "MAX_TOGETHER", 2
        )  # so that the first ranks of hosts agree for the others
        job = Job.join(config.generate_config.timeout_seconds, host=hosts[int(os.environ["RANK"])])
    worker = ActorHybridWorker(config, job=job)
    digests = [{}, {}]
    for seed, digests_by_name in enumerate(digests):
        digested = worker.inference.adaptor.observed(
            lambda name, tensor, kept=digests_by_name: kept.update({name: digest(tensor)})
        )
        with digested, worker.rollout_context():
            completions = worker.inference.generate([[1, 2, 3]], workers.GREEDY)
            report = worker.sharding.last_report
        with worker.train_context():
            worker.update(workers.batch(seed), workers.cross_entropy)
    before, after = digests
    assert before.keys() == after.keys()
    assert before != after, "the update did not arrive"
    observed = digests, completions[0][0].token_ids
    assert of_all_ranks(observed) == [observed] * 4
    assert report.bytes_received == report.bytes_least > 0
    plan = worker.sharding.plan
    planned_staging = staging_nbytes(plan.buckets, plan.relays, worker.rank)
    if hosts == TOGETHER:
        assert set(report.bytes_by_transport) == {"shared_memory"}
        assert (report.staging_bytes, planned_staging) == (0, 0)
    else:
        assert set(report.bytes_by_transport) == {"shared_memory", "collective"}
        assert 0 < planned_staging <= report.staging_bytes < planned_staging + HEADERS_AND_PADDING
        check_missing_bytes_arrive_once(worker, hosts, report.bytes_across_hosts)
    worker.shutdown()
    job.close()
    return *observed, report.bytes_least


def check_missing_bytes_arrive_once(worker: ActorHybridWorker, hosts: str, nbytes: int) -> None:
    """Each host receives over the network what its ranks need and lack, and each rank a part."""
    sharding = worker.sharding
    layouts = of_all_ranks((sharding.training.layout(), sharding.inference.layout()))
    source, destination = (Layout.merge(side) for side in zip(*layouts, strict=True))
    received = of_all_ranks(nbytes)
    assert min(received) > 0
    least = network_lower_bound(source, destination, tuple(hosts))
    assert {"a": sum(received[:2]), "b": sum(received[2:])} == {host: least[host] for host in "ab"}
