"""LoRA from memory in a real vLLM over two ranks, compared with merged weights.

Several LoRAs over new versions, switches and releases. The ranks assert.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.vllm import InferenceEngine, LoraSettings, Sampling, internals
from hybrid_engine.errors import ConfigError, StateError
from hybrid_engine.models.lora_tensors import a_name, b_name
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import refused
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import build, gap, job, sizes
from tests.zoo.checkpoint_shapes import checkpoint_shapes
from tests.zoo.families import served_config

pytestmark = [pytest.mark.slow]

ATOL = 5e-5  # float32; log-probabilities are around -5
CONFIG = {**support.QWEN3, "torch_dtype": "float32"}
PROMPTS = [[2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WIDE = LoraSettings(8, 16.0, EVERYWHERE)
NARROW = LoraSettings(4, 2.0, ("q_proj", "down_proj"))

Tensors = Mapping[str, torch.Tensor]


@on_engines(2)
def test_loras_compute_the_same_as_merged_weights(tmp_path: Path) -> None:
    """Two LoRAs have a single slot, so that each evicts the other."""
    job()
    weights = [support.random_weights(CONFIG, seed, torch.float32) for seed in range(2)]
    path = support.write_checkpoint(tmp_path / "weights", CONFIG, weights[1])
    engine = _build(path, max_loras=1, max_lora_rank=8)
    first = _random_lora(0, WIDE)
    second = _random_lora(2, WIDE)
    other = _random_lora(1, NARROW)

    def fill(values: Tensors) -> TensorDict:
        filled = support.fill_by_records(engine.adaptor, values)
        engine.reset_caches()
        return filled

    def scores(lora: str | None = None) -> torch.Tensor:
        return torch.cat(engine.prompt_logprobs(PROMPTS, lora=lora))

    def merged(values: Tensors, lora: Tensors, settings: LoraSettings) -> torch.Tensor:
        fill(_merged(values, lora, settings))
        return scores()

    def check(lora: str | None, expected: torch.Tensor) -> None:
        torch.testing.assert_close(scores(lora), expected, atol=ATOL, rtol=0)

    with_first = merged(weights[0], first, WIDE)
    with_second = merged(weights[0], second, WIDE)
    with_other = merged(weights[0], other, NARROW)
    of_next_weights = merged(weights[1], second, WIDE)
    fill(weights[0])
    plain = scores()
    engine.set_lora("policy", WIDE, first)
    engine.set_lora("judge", NARROW, other)
    for name, expected in (
        (None, plain),
        ("policy", with_first),
        ("judge", with_other),
        ("policy", with_first),
    ):
        check(name, expected)
    engine.set_lora("policy", WIDE, second)  # a new version
    check("policy", with_second)
    check(None, plain)
    assert support.differences(fill(weights[1]), support.native_parameters(engine, path)) == []
    check("policy", of_next_weights)  # a switch keeps LoRAs
    engine.release()
    runner = internals.model_runner_of(engine.llm)
    support.fill_by_records(engine.adaptor, weights[0])
    with mock.patch.object(
        runner, "reset_lora_state", side_effect=runner.reset_lora_state
    ) as reset:
        engine.wake_kv_cache()
    assert reset.call_count == 1, "vLLM's LoRA state must be reset once its memory is back"
    engine.reset_caches()
    check("judge", with_other)
    assert gap(scores("policy"), plain) > 0.1, "the LoRA must have an effect"
    engine.remove_lora("judge")
    parts = {
        "llm": engine.llm,
        "runner": runner,
        "manager": runner.lora_manager,
        "model": runner.model,
    }
    living = {name: weakref.ref(part) for name, part in parts.items()}
    del runner, parts, reset
    _refuse_misuse(engine, first, tmp_path)
    assert [name for name, part in living.items() if part() is not None] == [], (
        "objects outlive the shutdown"
    )


def _build(path: str, **settings: int) -> InferenceEngine:
    return build(path, CONFIG, dtype="float32", sizes=sizes(tensor=2), **settings)


def _refuse_misuse(engine: InferenceEngine, tensors: Tensors, base: Path) -> None:
    """Refuse removed names, tensors that do not fit, and engines without LoRA."""
    name = next(iter(tensors))
    misnamed = {"model.layers.0.down_proj.lora_A.weight": tensors[name]}
    with refused(StateError, "unknown-lora", "policy"):
        engine.generate(PROMPTS, Sampling(), lora="judge")
    with refused(StateError, "unknown-lora", "judge"):
        engine.remove_lora("judge")
    for settings, wrong, message in (
        (WIDE, {}, "it has no tensors"),
        (WIDE, {name: tensors[name]}, "down_proj.lora_B.weight is missing"),
        (WIDE, misnamed, "not a base_model.model."),
        (LoraSettings(4, 8.0, EVERYWHERE), tensors, "is not of rank 4"),
        (LoraSettings(64, 8.0, EVERYWHERE), tensors, "64 is more than max_lora_rank 8"),
        (LoraSettings(8, 8.0, ("q_proj",)), tensors, "down_proj is not in target_modules q_proj"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.set_lora("x", settings, wrong)
    engine.shutdown()
    plain = _build(support.write_config(base / "plain", CONFIG))
    with refused(StateError, "lora-is-off", "max_loras"):
        plain.set_lora("x", WIDE, tensors)
    plain.shutdown()
    for family, message in (
        ("qwen3_moe", "do not run on CPU"),
        ("gpt2", "GPT2LMHeadModel does not support LoRA"),
    ):
        path = support.write_config(base / family, served_config(family))
        with pytest.raises(ConfigError, match=message):
            _build(path, max_loras=1)


def _random_lora(seed: int, settings: LoraSettings) -> TensorDict:
    """Return tensors by PEFT's names for the modules of layer 1 and the last module of layer 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in checkpoint_shapes(CONFIG).items():
        module = name.removesuffix(".weight")
        chosen = settings.target_modules
        if module.endswith(chosen if ".layers.1." in name else chosen[-1]):
            out, inner = shape
            tensors[a_name(name)] = torch.randn(settings.rank, inner, generator=generator)
            tensors[b_name(name)] = torch.randn(out, settings.rank, generator=generator) / 10
    return tensors


def _merged(weights: Tensors, tensors: Tensors, settings: LoraSettings) -> TensorDict:
    merged = dict(weights)
    for name in weights:
        if a_name(name) in tensors:
            product = tensors[b_name(name)] @ tensors[a_name(name)]
            merged[name] = weights[name] + settings.alpha / settings.rank * product
    return merged
