"""Real trainers fill real vLLM servers, which run as separate processes.

A server must hold and compute the same as a cold start from the saved checkpoint.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker, Sampling, load_config
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.serving.invitation import NO_VERSION
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, has_route, serving
from tests.hybrid_engine.backends.vllm.support import random_weights, write_checkpoint
from tests.zoo.families import served_config

PROMPTS = [[40, 41, 42, 43], [50, 51]]
NUM_VERSIONS = 3


@dataclass(frozen=True)
class Case:
    """Trainers and the servers that they fill.

    Attributes:
        family: of the model.
        trainers: number of ranks.
        actor: their layout.
        servers: arguments of each server.
        generate: further keys of generate_config.
        max_tokens: of each completion.
    """

    family: str
    trainers: int
    actor: Values
    servers: tuple[tuple[str, ...], ...] = ((),)
    generate: Values = field(default_factory=dict)
    max_tokens: int = 8


# Without AMX, vLLM decodes latent attention by a kernel compiled for DeepSeek's head size (576)
# only, and raises "Unsupported block size" for a small model. The first token needs no decoding.
DECODES = torch.cpu._is_amx_tile_supported()
TP2 = ("--tensor-parallel-size", "2")
CASES = {
    "qwen2, tp2 to tp1": Case("qwen2", 2, {"tensor_model_parallel_size": 2}),
    "qwen3_moe, ep2 to tp2": Case("qwen3_moe", 2, {"expert_model_parallel_size": 2}, (TP2,)),
    "llama, one trainer to tp2": Case("llama", 1, {}, (TP2,)),
    "qwen2, fsdp2 to tp1 and tp2": Case("qwen2", 2, {"fsdp": {}}, ((), TP2)),
    "deepseek_v2, tp2 pp2 to tp1": Case(
        "deepseek_v2",
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        max_tokens=8 if DECODES else 1,
    ),
    "llama, one trainer to two replicas": Case("llama", 1, {}, (("--data-parallel-size", "2"),)),
    "llama, by messages": Case("llama", 2, {}, ((),), {"transport": "collective"}),
}
ALWAYS = ("qwen2, tp2 to tp1",)


def config_of(model: str, urls: list[str], actor: Values, **generate: Any) -> Any:
    keys = {
        "servers": urls,
        "verify": "full",
        "bucket_mb": 1,
        "timeout_seconds": 60,
        "max_model_len": 128,
        **generate,
    }
    actor_keys = {"params_dtype": "float32", "seq_length": 32, "optimizer": {"lr": 1e-2}, **actor}
    return load_config({"model": model, "actor_config": actor_keys, "generate_config": keys})


def train_step(worker: ActorHybridWorker, step: int) -> None:
    torch.manual_seed(step)
    tokens = torch.randint(0, 90, (4, 33))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    worker.update(batch, lambda batch, log_probs: -log_probs.mean())


def publish_versions(
    model: str, urls: list[str], case: Case, out: str
) -> tuple[list[Any], list[dict[str, str]]]:
    """Publish and withdraw each version; return the last one's completions, and checksums by
    server.
    """
    of_versions = []
    with ActorHybridWorker(config_of(model, urls, case.actor, **case.generate)) as worker:
        servers = [HttpServer(url, 60) for url in urls]
        for version in range(NUM_VERSIONS):
            with worker.rollout_context():
                report = worker.sharding.last_report
                assert report.bytes_received == report.bytes_least > 0
                assert report.tensors_verified > 0
                sampling = Sampling(max_tokens=case.max_tokens, temperature=0.0)
                completions = worker.generate_sequences(PROMPTS, sampling)
                of_versions.append([(first.token_ids, first.logprobs) for first, *_ in completions])
                sums = []
                if worker.rank == 0:
                    assert all(version_of(server) in (None, str(version)) for server in servers)
                    sums = [checksums(server) for server in servers]
                worker.barrier("checked")
            with worker.train_context():
                if worker.rank == 0:
                    assert all(version_of(server) in (None, NO_VERSION) for server in servers)
                    assert all(server.get("is_paused")["is_paused"] for server in servers)
                worker.save_hf_checkpoint(f"{out}/v{version}")
                train_step(worker, version)
    assert len(set(map(str, of_versions))) == NUM_VERSIONS
    return of_versions[-1], sums


def checksums(server: HttpServer) -> dict[str, str]:
    """Return vLLM's checksums of the weights; empty for vLLM before 0.32, which has none.

    Without them, the switch's own verification is the only check.
    """
    if not has_route(server, "weight_checker"):
        return {}
    return server.post("weight_checker", {"action": "checksum"})["checksums"]


def version_of(server: HttpServer) -> str | None:
    """Return the version of the weights; None for vLLM 0.26, which does not report it."""
    return (
        str(server.get("weight_info")["weight_version"])
        if has_route(server, "weight_info")
        else None
    )


def complete(
    server: HttpServer,
    max_tokens: int,
    prompts: list[list[int]] = PROMPTS,
    temperature: float = 0.0,
) -> list[Any]:
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": temperature, "logprobs": 0}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choices = server.post("v1/completions", body)["choices"]
    return [
        (tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
        for choice in choices
    ]


def write_model(directory: Path, family: str, **changed: Any) -> str:
    """Write a checkpoint of random weights."""
    config = served_config(family, torch_dtype="float32", **changed)
    return write_checkpoint(directory, config, random_weights(config, 7, torch.float32))


@pytest.mark.parametrize("name", ALWAYS)
def test_a_server_computes_the_same_as_a_cold_start(
    engines: Ranks, tmp_path: Path, name: str
) -> None:
    assert_matches_cold_start(engines, tmp_path, CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in ALWAYS])
def test_servers_of_other_families_and_layouts(engines: Ranks, tmp_path: Path, name: str) -> None:
    assert_matches_cold_start(engines, tmp_path, CASES[name])


def assert_matches_cold_start(engines: Ranks, tmp_path: Path, case: Case) -> None:
    model = write_model(tmp_path / "model", case.family)
    with ExitStack() as ends:
        servers = [
            ends.enter_context(
                serving(model, tmp_path / f"server{number}", *FILLED, *PLAIN, *arguments)
            )
            for number, arguments in enumerate(case.servers)
        ]
        urls = [server.url for server in servers]
        results = engines.launch(
            publish_versions, case.trainers, model, urls, case, str(tmp_path), timeout=400
        )
    completions, sums = results[0]
    for number, arguments in enumerate(case.servers):
        with serving(
            tmp_path / f"v{NUM_VERSIONS - 1}", tmp_path / f"cold{number}", *PLAIN, *arguments
        ) as cold:
            assert checksums(HttpServer(cold.url, 60)) == sums[number]
            if len(case.servers) == 1:  # otherwise ranks used different servers
                assert complete(HttpServer(cold.url, 60), case.max_tokens) == completions


def draw(model: str, urls: list[str]) -> list[Any]:
    with ActorHybridWorker(config_of(model, urls, {})) as worker, worker.rollout_context():
        sampling = Sampling(n=3, temperature=0.7, top_k=20, max_tokens=8, ignore_eos=True, seed=3)
        return worker.generate_sequences([*PROMPTS, PROMPTS[0]], sampling)


@pytest.mark.long
def test_a_server_samples_the_same_as_vllm_in_process(engines: Ranks, tmp_path: Path) -> None:
    """The distribution and the random streams are the same."""
    model = write_model(tmp_path / "model", "qwen2")
    (in_process,) = engines.launch(draw, 1, model, [], timeout=400)
    with serving(model, tmp_path / "server", *FILLED, *PLAIN) as server:
        served = engines.launch(draw, 2, model, [server.url], timeout=400)
    assert served[0] == served[1]
    expected = itertools.chain.from_iterable(in_process)
    sampled = itertools.chain.from_iterable(served[0])
    for completion, reference in zip(sampled, expected, strict=True):
        assert completion.token_ids == reference.token_ids
        assert completion.temperature == reference.temperature
        assert reference.logprobs == pytest.approx(completion.logprobs, abs=1e-5)
