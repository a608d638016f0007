"""vLLM's layerwise reload compared with a fresh load: the reason for derivation.py.

The reload writes new weights into a processed model layer by layer, and would replace much of
backends/vllm/weights. In vLLM 0.32 it loses a head that is tied to the embedding if the head's
kernel computes with a packed copy. oneDNN packs float32 on every x86 CPU, bfloat16 on some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm import internals
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import PROMPTS, gap, job, plain_llm
from tests.zoo.families import served_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def distributions(checkpoint: str, reload_from: str | None = None) -> tuple[list[torch.Tensor], bool]:
    """Return distributions after each token of PROMPTS, and whether the head is copied."""
    from vllm import SamplingParams

    from hybrid_engine.backends.vllm.requests import completions_of, prompt_distributions

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    with plain_llm(checkpoint, dtype="float32") as llm:  # "auto" would mean bfloat16
        if reload_from is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": reload_from})
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        is_head_copied = outlives_its_weight(internals.model_runner_of(llm).model.lm_head)
    completions = [completion for output in outputs for completion in completions_of(output, params)]
    return list(map(prompt_distributions, completions)), is_head_copied


def outlives_its_weight(head: Any) -> bool:
    """Zero the weight of a head and return whether its output stays the same."""
    ones = torch.ones(1, head.weight.shape[1], dtype=head.weight.dtype)
    before = head.quant_method.apply(head, ones)
    head.weight.data.zero_()
    return torch.equal(head.quant_method.apply(head, ones), before)


@on_engines(1)
@pytest.mark.parametrize("is_tied", [False, True])
def test_only_a_tied_head_whose_kernel_has_a_copy_is_lost(tmp_path: Path, is_tied: bool) -> None:
    """If this fails, vLLM reloads tied heads: try its reload instead of derivation.py."""
    job()
    config = served_config("qwen3", tie_word_embeddings=is_tied, torch_dtype="float32")
    weights = [support.random_weights(config, seed, torch.float32) for seed in range(2)]
    before, after = (support.write_checkpoint(tmp_path / str(number), config, weights[number]) for number in range(2))
    fresh, is_head_copied = distributions(after)
    reloaded, _ = distributions(before, reload_from=after)
    largest_gap = max(gap(*pair) for pair in zip(fresh, reloaded, strict=True))
    assert largest_gap > 0.1 if is_tied and is_head_copied else largest_gap == 0
