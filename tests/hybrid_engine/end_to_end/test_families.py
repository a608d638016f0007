"""Families: accepted if both sides compute the same, otherwise refused by code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_engine import HybridEngine, Sampling
from hybrid_engine.backends.fsdp.attention import live_attention, recorded
from hybrid_engine.compute_check.attention import (
    attention_differences,
    compared_positions,
    grouped,
    original_length,
)
from hybrid_engine.compute_check.config_reads import one_sided
from hybrid_engine.compute_check.gap import tokens_within
from hybrid_engine.compute_check.probes import ProbeLimits
from hybrid_engine.errors import ConfigError, HybridEngineError
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm.test_live_attention import config_of, vllm_readings
from tests.hybrid_engine.models.small_configs import SMALL, VARIANTS, variant_config
from tests.zoo.families import FAMILIES, write_config

MOST = 1e-3
"""Most nats between vLLM and the trainer, of any token, in float32."""
MAX_MODEL_LEN = 208
WEIGHTS = 0.05
"""Standard deviation of matrices."""
SAMPLING = Sampling(max_tokens=4, ignore_eos=True)
# Model -> code of its refusal. Both sides compute all others the same.
REFUSED = {
    "Phi-3, above its original length": "attention-differs",
    "Ministral-3, above its original length": "read-by-trainer-alone",
    "OLMoE, clamped": "read-by-trainer-alone",
    "gpt-oss, another limit": "read-by-trainer-alone",
    "Mistral, scaled by position": "read-by-vllm-alone",
    "Mistral, scaled logits": "read-by-vllm-alone",
}
DECIDED_BY_A_RUN = {
    "Cohere-2, windows": "log-probabilities-differ",  # one token more in vLLM's
    "Apertus": "log-probabilities-differ",  # vLLM's activation has bfloat16 coefficients
}
MOST_SEEN = [
    *("Exaone-4, layers without rotation", "Gemma-4, shared keys and values", "Falcon-H1"),
    *(
        "LFM2-MoE, a router's bias",
        "Phi-3, below its original length",
        "gpt-oss, published quantisation",
    ),
    *(
        "Phi-3, above its original length",
        "Ministral-3, above its original length",
        "OLMoE, clamped",
    ),
    *("gpt-oss, another limit", "Mistral, scaled logits"),
]
"""Models that engines compute in every run of the tests."""
NOT_BUILT_HERE = {
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
}


def of_each(judge: Callable[[Path, str], Any], directory: str, names: list[str]) -> Values:
    dist.init_process_group("gloo")
    return {name: judge(Path(directory, str(index)), name) for index, name in enumerate(names)}


def reading(directory: Path, name: str) -> str:
    """Return the code with which a model's readings alone refuse it, or ""."""
    config = (
        config_of(name, {"max_position_embeddings": 512})
        if name in FAMILIES
        else variant_config(name)
    )
    write_config(directory, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    settings = model.config.to_dict()
    original = original_length(settings)
    of_trainer = recorded(model)
    positions = compared_positions(MAX_MODEL_LEN - 1, settings)
    layers, reads = vllm_readings(directory, MAX_MODEL_LEN, positions)
    violations, _ = one_sided(
        of_trainer.reads, reads, original is not None and original < MAX_MODEL_LEN
    )
    if violations:
        return violations[0].code
    # Rotary modules have values on no meta device.
    live = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    trainer = live_attention(live, of_trainer.calls, positions)
    windows = {layer.window or 0 for layer in layers.values()}
    _, tokens = tokens_within([ProbeLimits(max_length=MAX_MODEL_LEN - 1)], windows)
    unreached, _ = attention_differences(
        grouped(trainer), grouped(layers), MAX_MODEL_LEN - 1, tokens.shape[1]
    )
    return "attention-differs" if unreached else ""


def verdict(directory: Path, name: str) -> str | float:
    """Return the code of a model's refusal, or the largest difference in nats."""
    config = variant_config(name)
    write_config(directory, config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
        for tensor in [*model.parameters(), *biases]:
            # Larger than transformers' initial weights, so that logits differ.
            if tensor.dim() > 1 or not isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(WEIGHTS * torch.randn(tensor.shape, generator=generator))
    if "Phi-3" in name:
        # transformers keeps the frequencies of the longest sequence until a shorter one comes.
        model(torch.zeros(1, 320, dtype=torch.int64))
    rollout = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "kv_cache_mb": 32,
        "verify": "full",
    }
    try:
        engine = HybridEngine(model=model, rollout_config=rollout, shard=False)
    except ConfigError as error:
        return error.findings[0].code
    except HybridEngineError as error:
        return error.code
    # vLLM's Mamba layers on a CPU compute a single chunk for all sequences.
    length = 60 if name == "Falcon-H1" else MAX_MODEL_LEN - 8
    prompts = torch.randint(3, config["vocab_size"], (2, length), generator=generator)
    try:
        with engine.rollout_context():
            groups = engine.inference.generate(prompts.tolist(), [SAMPLING] * 2)
            scored = engine.inference.prompt_logprobs(prompts.tolist())
    except HybridEngineError as error:
        return error.code
    finally:
        engine.shutdown()
    gaps = []
    for row, (group, of_prompt) in enumerate(zip(groups, scored, strict=True)):
        tokens = torch.tensor([[*prompts[row].tolist(), *group[0].token_ids]])
        with torch.no_grad():
            rows = model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        trained = rows.gather(1, tokens[0, 1:, None])[:, 0]
        gaps.append(
            (trained - torch.cat([of_prompt, torch.tensor(group[0].logprobs)])).abs().max().item()
        )
    return max(gaps)


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_readings_refuse_only_what_no_run_reaches(engines: Ranks, tmp_path: Path) -> None:
    names = [name for name in (*SMALL, *VARIANTS, *FAMILIES) if name not in NOT_BUILT_HERE]
    (seen,) = engines.launch(of_each, 1, reading, str(tmp_path), names, timeout=500)
    assert {name: code for name, code in seen.items() if code} == REFUSED


@pytest.mark.parametrize(
    "names",
    [
        MOST_SEEN,
        pytest.param([name for name in VARIANTS if name not in MOST_SEEN], marks=pytest.mark.long),
    ],
    ids=["few", "all others"],
)
@pytest.mark.engines
@pytest.mark.timeout(600)
def test_engines_accept_what_both_sides_compute(
    engines: Ranks, tmp_path: Path, names: list[str]
) -> None:
    (seen,) = engines.launch(of_each, 1, verdict, str(tmp_path), names, timeout=500)
    for name in names:
        code = (REFUSED | DECIDED_BY_A_RUN).get(name)
        gap = seen[name]
        assert gap == code if code is not None else (isinstance(gap, float) and gap < MOST), (
            f"{name}: {gap}"
        )
