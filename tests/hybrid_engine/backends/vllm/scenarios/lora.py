"""LoRAs from memory: beside each other, over new versions, switches and releases, against merged weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from hybrid_engine.backends.vllm import InferenceEngine, LoraSettings, Sampling, internals
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.scenarios.asking import Refusal, build, gap, job, refusal_of, sizes
from tests.zoo.checkpoint_shapes import checkpoint_shapes
from tests.zoo.families import served_config

CONFIG = {**support.QWEN3, "torch_dtype": "float32"}
PROMPTS = [[2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WIDE, NARROW = LoraSettings(8, 16.0, EVERYWHERE), LoraSettings(4, 2.0, ("q_proj", "down_proj"))

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Refused:
    """What cannot be: names that are gone, tensors that do not fit, engines that take none."""

    removed: Refusal
    removed_twice: Refusal
    empty: Refusal
    lonely: Refusal
    misnamed: Refusal
    size: Refusal
    rank: Refusal
    module: Refusal
    off: Refusal
    experts: Refusal
    gpt2: Refusal


@dataclass(frozen=True)
class Loras:
    """What one rank brought back.

    Attributes:
        gaps: by moment, the greatest difference from transformers with the LoRA merged.
        far_from_base: the same from transformers without it, for it must change something.
        differences: parameters with other bits than vLLM loads itself, after a switch of the base.
        refused: see there.
        left: parts of the engine that something still holds after its shutdown.
        num_resets: how often vLLM's own state for LoRAs was written anew by the time that all memory was back.
    """

    gaps: dict[str, float]
    far_from_base: float
    differences: list[str]
    refused: Refused
    left: list[str]
    num_resets: int


def run(directory: str, num_tp: int) -> Loras:
    """One slot on the device and two LoRAs, so that each drives out the other."""
    job()
    weights = [support.random_weights(CONFIG, seed, torch.float32) for seed in range(2)]
    path = support.write_checkpoint(Path(directory) / "weights", CONFIG, weights[1])
    engine = _build(path, num_tp, max_loras=1, max_lora_rank=8)
    support.fill_by_records(engine.adaptor, weights[0])
    engine.reset_caches()
    first, second = _random_lora(0, WIDE), _random_lora(2, WIDE)
    other = _random_lora(1, NARROW)
    engine.set_lora("policy", WIDE, first)
    engine.set_lora("judge", NARROW, other)
    gaps = {
        "base": _gap(engine, weights[0], None),
        "policy": _gap(engine, _merged(weights[0], first, WIDE), "policy"),
        "judge": _gap(engine, _merged(weights[0], other, NARROW), "judge"),
        "policy again": _gap(engine, _merged(weights[0], first, WIDE), "policy"),
    }
    engine.set_lora("policy", WIDE, second)
    gaps["new version"] = _gap(engine, _merged(weights[0], second, WIDE), "policy")
    gaps["without one"] = _gap(engine, weights[0], None)
    filled = support.fill_by_records(engine.adaptor, weights[1])
    engine.reset_caches()
    differences = support.differences(filled, support.native_parameters(engine, path))
    gaps["switched base"] = _gap(engine, _merged(weights[1], second, WIDE), "policy")
    engine.release()
    runner = internals.model_runner_of(engine.llm)
    support.fill_by_records(engine.adaptor, weights[0])
    with mock.patch.object(runner, "reset_lora_state", side_effect=runner.reset_lora_state) as reset:
        engine.wake_kv_cache()
    engine.reset_caches()
    gaps["after a release"] = _gap(engine, _merged(weights[0], other, NARROW), "judge")
    far_from_base = _gap(engine, weights[0], "policy")
    engine.remove_lora("judge")
    parts = {"llm": engine.llm, "runner": runner, "manager": runner.lora_manager, "model": runner.model}
    living = {name: weakref.ref(part) for name, part in parts.items()}
    num_resets = reset.call_count
    del runner, parts, reset
    refused = _refused(engine, first, Path(directory), num_tp)
    left = [name for name, part in living.items() if part() is not None]
    return Loras(gaps, far_from_base, differences, refused, left, num_resets)


def _build(path: str, num_tp: int, **settings: int) -> InferenceEngine:
    return build(path, CONFIG, dtype="float32", sizes=sizes(tensor=num_tp), **settings)


def _refused(engine: InferenceEngine, tensors: Tensors, base: Path, num_tp: int) -> Refused:
    name = next(iter(tensors))
    misnamed = {"model.layers.0.down_proj.lora_A.weight": tensors[name]}

    def deliver(settings: LoraSettings, tensors: Tensors, engine: InferenceEngine = engine) -> Refusal:
        return refusal_of(lambda: engine.set_lora("x", settings, tensors))

    removed = refusal_of(lambda: engine.generate(PROMPTS, Sampling(), lora="judge"))
    removed_twice = refusal_of(lambda: engine.remove_lora("judge"))
    empty, lonely = deliver(WIDE, {}), deliver(WIDE, {name: tensors[name]})
    wrong_name, size = deliver(WIDE, misnamed), deliver(LoraSettings(4, 8.0, EVERYWHERE), tensors)
    rank = deliver(LoraSettings(64, 8.0, EVERYWHERE), tensors)
    module = deliver(LoraSettings(8, 8.0, ("q_proj",)), tensors)
    engine.shutdown()
    plain = _build(support.write_config(base / "plain", CONFIG), num_tp)
    off = deliver(WIDE, tensors, plain)
    plain.shutdown()
    paths = [support.write_config(base / family, served_config(family)) for family in ("qwen3_moe", "gpt2")]
    experts, gpt2 = (refusal_of(functools.partial(_build, path, num_tp, max_loras=1)) for path in paths)
    return Refused(removed, removed_twice, empty, lonely, wrong_name, size, rank, module, off, experts, gpt2)


def _random_lora(seed: int, settings: LoraSettings) -> dict[str, torch.Tensor]:
    """Under PEFT's names, on the modules of layer 1 and, of layer 0, on the last one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in checkpoint_shapes(CONFIG).items():
        module, chosen = name.removesuffix(".weight"), settings.target_modules
        if module.endswith(chosen if ".layers.1." in name else chosen[-1]):
            for kind, size in (("lora_A", (settings.rank, shape[1])), ("lora_B", (shape[0], settings.rank))):
                values = torch.randn(size, generator=generator) * 0.3
                tensors[f"base_model.model.{module}.{kind}.weight"] = values
    return tensors


def _merged(weights: Tensors, tensors: Tensors, settings: LoraSettings) -> dict[str, torch.Tensor]:
    merged = dict(weights)
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            merged[f"{module}.weight"] = weights[f"{module}.weight"] + settings.alpha / settings.rank * (up @ down)
    return merged


def _expected(weights: Tensors, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Log-probability of each token after the tokens before it, by transformers."""
    import transformers

    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).float().eval()
    model.load_state_dict(dict(weights), strict=True)
    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for tokens in sequences]
    return [
        row.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0] for row, tokens in zip(logits, sequences, strict=True)
    ]


def _gap(engine: InferenceEngine, weights: Tensors, lora: str | None) -> float:
    """Greatest difference from transformers, of prompts and of what the engine then draws."""
    greedy = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
    drawn = [row[0] for row in engine.generate(PROMPTS, greedy, lora=lora)]
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, drawn, strict=True)]
    expected = _expected(weights, sequences)
    scored = engine.prompt_logprobs(sequences, lora=lora)
    pairs = [*zip(scored, expected, strict=True)]
    pairs += [(torch.tensor(answer.logprobs), row[-4:]) for answer, row in zip(drawn, expected, strict=True)]
    return max(gap(one, other) for one, other in pairs)
