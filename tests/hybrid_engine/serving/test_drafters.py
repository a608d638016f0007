"""A server that drafts with MTP layers: Megatron fills model and drafter; acceptance is that of a
cold start.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.errors import ServerError
from hybrid_engine.serving.clients import HttpServer
from tests.harness.launch import Ranks
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.end_to_end.test_drafters import MTP, PROMPTS, counting, write_model
from tests.hybrid_engine.serving.test_servers import complete
from tests.zoo import workers

DRAFTS = (
    "--speculative-config",
    json.dumps(MTP["speculative_config"]),
    "--attention-backend",
    "CPU_MLA",
)


def drafted(url: str, temperature: float = 0.0) -> tuple[list[Any], list[int]]:
    """Complete prompts, one after the other; return them and the numbers of accepted and drafted
    tokens.
    """
    before = counters(url)
    completions = [
        complete(HttpServer(url, 60), 40, [prompt], temperature)[0] for prompt in PROMPTS
    ]
    return completions, [
        after - earlier for after, earlier in zip(counters(url), before, strict=True)
    ]


def counters(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    names = ("accepted_tokens", "draft_tokens")
    values = [
        re.findall(rf"^vllm:spec_decode_num_{name}_total{{.*}} (.+)$", text, re.MULTILINE)
        for name in names
    ]
    return [int(float(value)) for (value,) in values]


def publish(model: str, url: str, out: str) -> list[tuple[list[Any], list[int]]]:
    """Publish the initial weights and, after training, others; return completions and numbers of
    both.
    """
    results = []
    generate = {
        "servers": [url],
        "verify": "full",
        "timeout_seconds": 60,
        "max_model_len": 128,
        "check_compute": "off",
    }
    with workers.build_worker(Path(model), {}, generate) as worker:
        for version in range(2):
            with worker.train_context():
                for step in range(16 * version):
                    worker.update(counting(100 + step), workers.cross_entropy)
            with worker.rollout_context():
                results.append(drafted(url))
                results.append(drafted(url, temperature=1.0))
        with pytest.raises(ServerError, match="start_draft_weight_update is refused"):
            HttpServer(url, 60).post("start_draft_weight_update", {})
        with worker.train_context():
            worker.save_hf_checkpoint(out)
    return results


@pytest.mark.long
def test_a_servers_drafter_is_filled_with_its_model(engines: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with serving(model, tmp_path / "server", *FILLED, *PLAIN, *DRAFTS) as server:
        (versions,) = engines.launch(
            publish, 1, str(model), server.url, str(tmp_path / "trained"), timeout=400
        )
    (
        (_, (accepted_before, _)),
        _,
        (completions, (accepted, num_drafted)),
        (_, (accepted_of_drawn, _)),
    ) = versions
    assert accepted_of_drawn > 5  # none with vLLM's kernel, which reads uninitialised temperatures
    assert accepted > accepted_before + 10
    with serving(tmp_path / "trained", tmp_path / "cold", *PLAIN, *DRAFTS) as cold:
        cold_completions, counts = drafted(cold.url)
    assert counts == [accepted, num_drafted]
    for (tokens, logprobs), (cold_tokens, cold_logprobs) in zip(
        completions, cold_completions, strict=True
    ):
        assert tokens == cold_tokens
        assert logprobs == pytest.approx(cold_logprobs, abs=1e-5)


def test_other_drafters_of_a_server_are_refused_by_name(tmp_path: Path) -> None:
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 1,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    arguments = (*FILLED, *PLAIN, "--speculative-config", json.dumps(ngram))
    model = write_model(tmp_path / "model")
    with (
        pytest.raises(AssertionError, match="did not start"),
        serving(model, tmp_path / "server", *arguments),
    ):
        pass
    refusal = "--speculative-config with method ngram: trainers fill no drafter but the MTP layers"
    assert refusal in (tmp_path / "server" / "server.log").read_text()
