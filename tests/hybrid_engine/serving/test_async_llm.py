"""A publisher around a user's own trainer, and an `AsyncLLM` in the same process."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker, Sampling
from hybrid_engine.attaching.attachment import apply_patches
from hybrid_engine.backends.huggingface import load_pretrained
from hybrid_engine.backends.vllm.server.async_server import VllmActor
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.trainer.megatron.actor import build_actor
from tests.harness.launch import REPO_ROOT, Ranks
from tests.harness.values import Values
from tests.harness.vllm_server import ENVIRONMENT, fork_processes
from tests.hybrid_engine.serving.test_servers import PROMPTS, config_of, write_model

NUM_TOKENS = 8
ENGINE = {
    **{
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
    },
    **{"enforce_eager": True, "skip_tokenizer_init": True},
}


def complete(server: VllmActor) -> list[Any]:
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "logprobs": 0}
    answers = [server.complete({"prompt": prompt, **sampling})["choices"] for prompt in PROMPTS]
    return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for (choice,) in answers]


def stream_by_snippet(server: VllmActor, publisher: WeightPublisher) -> list[list[int]]:
    """Return the parts that the snippet of docs/servers.md streams, then the whole completion."""
    page = (REPO_ROOT / "docs" / "servers.md").read_text().partition("## Streaming")[2]
    (snippet, *_) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {"server": server, "publisher": publisher}
    exec(compile(snippet, "docs/servers.md", "exec"), names)
    whole = server.complete({"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0.0})["choices"][
        0
    ]["token_ids"]
    return [*map(list, names["parts"]), whole]


def publish_to_async_llm(model: str) -> Values:
    os.environ.update(ENVIRONMENT)
    fork_processes()
    torch.compiler.set_stance("force_eager")  # or samplers compile for a minute
    results = Values()
    server = VllmActor(model=model, **ENGINE)
    try:
        with ExitStack() as ends, closing(Job.join(60)) as job:
            config = config_of(model, [], {})
            table = table_for(config.hf_config())
            apply_patches()
            trainer = build_actor(config, table, job, ends).engine.model
            load_pretrained(config.model, trainer.weights.base, table, job)
            publisher = WeightPublisher(trainer, [server], config=config.generate_config, job=job)
            with closing(publisher):
                for name in ("first", "second"):
                    publisher.publish()
                    results[name] = complete(server)
                    if name == "first":
                        results["streamed"] = stream_by_snippet(server, publisher)
                    publisher.withdraw()
                    for buffer in trainer.weights.buffers().values():
                        buffer.mul_(1.5)
            results["is paused"] = server._call("is_paused")
    finally:
        server.shutdown()
    return results


def generate_in_process(model: str) -> list[Any]:
    config = config_of(model, [], {})
    with ActorHybridWorker(config) as worker, worker.rollout_context():
        completions = worker.generate_sequences(
            PROMPTS, Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
        )
    return [(list(first.token_ids), list(first.logprobs)) for first, *_ in completions]


@pytest.mark.long
def test_a_publisher_fills_an_async_llm(engines: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    (results,) = engines.launch(publish_to_async_llm, 1, model, timeout=400)
    assert results["first"] == engines.launch(generate_in_process, 1, model, timeout=300)[0]
    *parts, whole = results["streamed"]
    assert len(parts) > 1
    assert [token for part in parts for token in part] == whole
    assert results["second"] != results["first"]
    assert results["is paused"]
