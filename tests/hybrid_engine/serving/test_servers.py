"""Real trainers fill real vLLM servers, which are processes of their own.

What a server holds and computes is what a cold start of the saved checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from hybrid_engine import ActorHybridWorker, Sampling, load_config
from hybrid_engine.serving.clients import HttpServer
from tests.harness.launch import Ranks
from tests.harness.vllm_server import FILLED, PLAIN, Server, serving

PROMPTS = [[40, 41, 42, 43], [50, 51]]


def config_of(model: str, urls: list[str], actor: dict[str, Any], **generate: Any) -> Any:
    keys = {"servers": urls, "verify": "full", "bucket_mb": 1, "timeout_seconds": 60, **generate}
    actor = {"params_dtype": "float32", "seq_length": 32, "optimizer": {"lr": 1e-2}, **actor}
    return load_config({"model": model, "actor_config": actor, "generate_config": keys})


def train_step(worker: ActorHybridWorker, step: int) -> None:
    torch.manual_seed(step)
    tokens = torch.randint(0, 90, (4, 33))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    worker.update(batch, lambda batch, log_probs: -log_probs.mean())


def publish_versions(model: str, urls: list[str], actor: dict[str, Any], out: str, num: int) -> list[dict[str, Any]]:
    found = []
    with ActorHybridWorker(config_of(model, urls, actor)) as worker:
        for version in range(num):
            with worker.rollout_context():
                report = worker.sharding.last_report
                answers = worker.generate_sequences(PROMPTS, Sampling(max_tokens=8, temperature=0.0))
                found.append(
                    {
                        "answers": [(each[0].token_ids, each[0].logprobs) for each in answers],
                        "received": (report.bytes_received, report.bytes_least),
                        "version": [HttpServer(url, 30).get("weight_info")["weight_version"] for url in urls],
                        "sums": [checksums(url) for url in urls] if worker.rank == 0 else None,
                    }
                )
                worker.barrier("looked at")
            with worker.train_context():
                worker.save_hf_checkpoint(f"{out}/v{version}")
                train_step(worker, version)
    return found


def checksums(url: str) -> dict[str, str]:
    sums: dict[str, str] = HttpServer(url, 60).post("weight_checker", {"action": "checksum"})["checksums"]
    return sums


def complete(url: str) -> list[Any]:
    body = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0.0, "logprobs": 0, "return_token_ids": True}
    choices = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    return [(tuple(each["token_ids"]), tuple(each["logprobs"]["token_logprobs"])) for each in choices]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return "/tmp/tinymodel"


@pytest.fixture(scope="module")
def server(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny, tmp_path_factory.mktemp("server"), *FILLED, *PLAIN) as found:
        yield found


def test_a_server_computes_what_a_cold_start_does(engines: Ranks, tiny: str, server: Server, tmp_path: Path) -> None:
    actor = {"tensor_model_parallel_size": 2}
    by_rank = engines.launch(publish_versions, 2, tiny, [server.url], actor, str(tmp_path), 3, timeout=300)
    for number, of_rank in enumerate(zip(*by_rank, strict=True)):
        assert of_rank[0]["version"] == [str(number)]
        assert of_rank[0]["answers"] == of_rank[1]["answers"]
        assert of_rank[0]["received"] == of_rank[1]["received"]
        assert of_rank[0]["received"][0] == of_rank[0]["received"][1] > 0
    assert len({str(each["answers"]) for each in by_rank[0]}) == 3
    with serving(tmp_path / "v2", tmp_path / "cold", *PLAIN) as cold:
        assert complete(cold.url) == by_rank[0][2]["answers"]
        assert checksums(cold.url) == by_rank[0][2]["sums"][0]
