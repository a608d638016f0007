"""Ranks on two pretended hosts hold the same as on one; no byte crosses the network twice."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.ranks import rank_tree
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout
from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.end_to_end.digests import digest
from tests.hybrid_engine.planning.cases import network_lower_bound
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HEADERS_AND_PADDING = 1 << 16
TOGETHER = "aaaa"
APART = "aabb"
"""The host of each rank."""
ACTOR = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "params_dtype": "bfloat16"}


def switch_on_hosts(model: Path, hosts: tuple[str, ...]) -> SimpleNamespace:
    """Switch from two pipeline stages of TP 2 to uncut models, twice with an update between.

    `hosts`: by rank. Figures of the result belong to the second switch.
    """
    config = workers.configuration(model, ACTOR, {"bucket_mb": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "MOST_TOGETHER", 2)  # so that the first ranks of hosts agree for the others
        job = Job.join(config.generate_config.timeout_seconds, host=hosts[int(os.environ["RANK"])])
    worker = ActorHybridWorker(config, job=job)
    digests: list[dict[str, str]] = [{}, {}]
    for seed, digests_by_name in enumerate(digests):
        digested = worker.inference.adaptor.observed(
            lambda name, tensor, kept=digests_by_name: kept.update({name: digest(tensor)})
        )
        with digested, worker.rollout_context():
            completions = worker.inference.generate([[1, 2, 3]], workers.GREEDY)
            report = worker.sharding.last_report
        with worker.train_context():
            worker.update(workers.batch(seed), workers.cross_entropy)
    plan = worker.sharding.plan
    layouts: list[Any] = [None] * len(hosts)
    dist.all_gather_object(layouts, (worker.sharding.training.layout(), worker.sharding.inference.layout()))
    source, destination = (Layout.merge(side) for side in zip(*layouts, strict=True))
    worker.shutdown()
    job.close()
    return SimpleNamespace(
        digests=digests,
        token_ids=completions[0][0].token_ids,
        bytes_received=report.bytes_received,
        bytes_least=report.bytes_least,
        bytes_across_hosts=report.bytes_across_hosts,
        network_lower_bound=network_lower_bound(source, destination, hosts),
        transports=set(report.bytes_by_transport),
        staging_bytes=report.staging_bytes,
        planned_staging_bytes=staging_nbytes(plan.buckets, plan.relays, worker.rank),
    )


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    model = workers.write_model(tmp_path_factory.mktemp("model"), "qwen3")
    calls = {hosts: (switch_on_hosts, (model, tuple(hosts))) for hosts in (TOGETHER, APART)}
    return engines.launch_in_turn(4, calls, timeout=400)


OneAndTwoHosts = tuple[list[SimpleNamespace], list[SimpleNamespace]]
"""Observations by rank: on one host, and on two."""


@pytest.fixture
def one_and_two_hosts(outcomes: Outcomes) -> OneAndTwoHosts:
    return outcomes[TOGETHER], outcomes[APART]


def test_vllm_holds_and_generates_the_same_on_every_rank(one_and_two_hosts: OneAndTwoHosts) -> None:
    together, apart = one_and_two_hosts
    assert [switched.digests for switched in (*together, *apart)] == [together[0].digests] * 8
    assert [switched.token_ids for switched in apart] == [switched.token_ids for switched in together]
    before, after = together[0].digests
    assert before.keys() == after.keys()
    assert before != after, "the update did not arrive"


def test_no_byte_is_received_twice(one_and_two_hosts: OneAndTwoHosts) -> None:
    together, apart = one_and_two_hosts
    for switched in (*together, *apart):
        assert switched.bytes_received == switched.bytes_least > 0
    assert [switched.bytes_least for switched in apart] == [switched.bytes_least for switched in together]


def test_shared_memory_serves_a_host_and_messages_the_rest(one_and_two_hosts: OneAndTwoHosts) -> None:
    together, apart = one_and_two_hosts
    assert [switched.transports for switched in together] == [{"shared_memory"}] * 4
    assert [switched.transports for switched in apart] == [{"shared_memory", "collective"}] * 4


def test_each_host_receives_missing_bytes_once(one_and_two_hosts: OneAndTwoHosts) -> None:
    _, apart = one_and_two_hosts
    for host, ranks in {"a": apart[:2], "b": apart[2:]}.items():
        assert sum(rank.bytes_across_hosts for rank in ranks) == ranks[0].network_lower_bound[host] > 0
    assert min(switched.bytes_across_hosts for switched in apart) > 0


def test_relays_stage_the_planned_bytes(one_and_two_hosts: OneAndTwoHosts) -> None:
    together, apart = one_and_two_hosts
    assert [(switched.staging_bytes, switched.planned_staging_bytes) for switched in together] == [(0, 0)] * 4
    for switched in apart:
        assert 0 < switched.planned_staging_bytes <= switched.staging_bytes
        assert switched.staging_bytes < switched.planned_staging_bytes + HEADERS_AND_PADDING
