"""What vLLM's own layerwise reload computes, against a fresh load of the same checkpoint: why derivation.py is there.

It puts new weights into a model that vLLM has processed, layer by layer, and would replace much of
backends/vllm/weights. With vLLM 0.32 it loses a head that is tied to the embedding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import PROMPTS, gap, job, plain_llm
from tests.zoo.families import served_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def distributions(checkpoint: str, reload_from: str | None = None) -> list[torch.Tensor]:
    """Log-probabilities of the whole vocabulary after each token of PROMPTS, after a reload if one is asked for."""
    from vllm import SamplingParams

    from hybrid_engine.backends.vllm.requests import distributions_of_prompt

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    with plain_llm(checkpoint) as llm:
        if reload_from is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": reload_from})
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [distributions_of_prompt(output.prompt_logprobs) for output in outputs]


def gaps(directory: str) -> dict[str, float]:
    """By model, the greatest difference of a reload and a fresh load."""
    job()
    found = {}
    for name, is_tied in (("untied", False), ("tied", True)):
        config = served_config("qwen3", tie_word_embeddings=is_tied, torch_dtype="bfloat16")
        before, after = (
            support.write_checkpoint(Path(directory, f"{name} {seed}"), config, support.random_weights(config, seed))
            for seed in range(2)
        )
        fresh, reloaded = distributions(after), distributions(before, reload_from=after)
        found[name] = max(gap(*pair) for pair in zip(fresh, reloaded, strict=True))
    return found


@pytest.fixture(scope="module")
def by_model(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    (found,) = engines.launch(gaps, 1, str(tmp_path_factory.mktemp("reload")), timeout=300)
    return found


def test_a_head_of_its_own_is_reloaded(by_model: dict[str, float]) -> None:
    assert by_model["untied"] == 0


def test_a_tied_head_is_lost(by_model: dict[str, float]) -> None:
    """If this fails, vLLM reloads tied heads: try its reload in place of derivation.py, with experts and MLA too."""
    assert by_model["tied"] > 0.1
