"""LoRA adapters from memory on a real vLLM: what they compute is what transformers computes with them merged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm import vllm_support as support
from tests.zoo.families import served_config

CONFIG = served_config("qwen3", torch_dtype="float32")
PROMPTS = [[2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATOL = 5e-5  # float32; log-probabilities are around -5


def _adapter(seed: int, rank: int, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Random tensors under PEFT's names, on the modules of layer 1 and, of layer 0, on the last one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in support.checkpoint_shapes(CONFIG).items():
        module = name.removesuffix(".weight")
        if module.endswith(modules if ".layers.1." in name else modules[-1]):
            for kind, size in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
                values = torch.randn(size, generator=generator) * 0.3
                tensors[f"base_model.model.{module}.{kind}.weight"] = values
    return tensors


def _merged(
    weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    merged = dict(weights)
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            merged[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (up @ down)
    return merged


def _expected(weights: Mapping[str, torch.Tensor], sequences: list[list[int]]) -> list[torch.Tensor]:
    """Log-probability of each token after the tokens before it, by transformers."""
    import transformers

    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).float().eval()
    model.load_state_dict(dict(weights), strict=True)
    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for tokens in sequences]
    return [
        row.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0] for row, tokens in zip(logits, sequences, strict=True)
    ]


def _gap(engine: Any, weights: Mapping[str, torch.Tensor], lora: str | None) -> float:
    """Greatest difference from transformers, of prompts and of what the engine then draws."""
    from hybrid_engine.backends.vllm import Sampling

    greedy = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
    drawn = [row[0] for row in engine.generate(PROMPTS, greedy, lora=lora)]
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, drawn, strict=True)]
    expected = _expected(weights, sequences)
    scored = engine.prompt_logprobs(sequences, lora=lora)
    pairs = [*zip(scored, expected, strict=True)]
    pairs += [(torch.tensor(answer.logprobs), row[-4:]) for answer, row in zip(drawn, expected, strict=True)]
    return max((one - other).abs().max().item() for one, other in pairs)


def _engine(path: str, num_tp: int, **settings: Any) -> Any:
    from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings

    chosen = InferenceSettings(
        path,
        dtype="float32",
        sizes=InferenceParallelism(dist.get_world_size(), tensor=num_tp),
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_bytes=16 << 20,
        **settings,
    )
    return InferenceEngine(chosen, support.checkpoint_shapes(CONFIG), Job.join(600))


def adapters(directory: str, num_tp: int) -> dict[str, Any]:
    """One slot on the device and two adapters, so that each drives out the other."""
    from hybrid_engine.backends.vllm import LoraSettings

    dist.init_process_group("gloo")
    weights = [support.random_weights(CONFIG, seed, torch.float32) for seed in range(2)]
    path = support.write_checkpoint(Path(directory) / "weights", CONFIG, weights[1])
    engine = _engine(path, num_tp, max_loras=1, max_lora_rank=8)
    support.fill_by_records(engine.adaptor, weights[0])
    engine.reset_caches()
    wide, narrow = LoraSettings(8, 16.0, EVERYWHERE), LoraSettings(4, 2.0, ("q_proj", "down_proj"))
    first, other, second = _adapter(0, 8, EVERYWHERE), _adapter(1, 4, narrow.target_modules), _adapter(2, 8, EVERYWHERE)
    result: dict[str, Any] = {}
    engine.set_lora("policy", wide, first)
    engine.set_lora("judge", narrow, other)
    result["base"] = _gap(engine, weights[0], None)
    result["policy"] = _gap(engine, _merged(weights[0], first, 2.0), "policy")
    result["judge"] = _gap(engine, _merged(weights[0], other, 0.5), "judge")
    result["policy again"] = _gap(engine, _merged(weights[0], first, 2.0), "policy")
    engine.set_lora("policy", wide, second)
    result["new version"] = _gap(engine, _merged(weights[0], second, 2.0), "policy")
    result["without one"] = _gap(engine, weights[0], None)
    filled = support.fill_by_records(engine.adaptor, weights[1])
    engine.reset_caches()
    result["differences"] = support.differences(filled, support.native_parameters(engine, path))
    result["switched base"] = _gap(engine, _merged(weights[1], second, 2.0), "policy")
    engine.release()
    support.fill_by_records(engine.adaptor, weights[0])
    engine.reset_caches()
    result["after a release"] = _gap(engine, _merged(weights[0], other, 0.5), "judge")
    result["far from the base"] = _gap(engine, weights[0], "policy")
    engine.remove_lora("judge")
    result["errors"] = _errors(engine, first)
    engine.shutdown()
    plain = _engine(path, num_tp)
    result["errors"]["off"] = _error_of(lambda: plain.set_lora("policy", wide, first))
    plain.shutdown()
    for name, config in (("experts", served_config("qwen3_moe")), ("gpt2", served_config("gpt2"))):
        other_path = support.write_config(Path(directory) / name, config)
        result["errors"][name] = _error_of(lambda path=other_path: _engine(path, num_tp, max_loras=1))
    dist.destroy_process_group()
    return result


def _errors(engine: Any, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    from hybrid_engine.backends.vllm import LoraSettings, Sampling

    name = next(iter(tensors))
    lonely = {name: tensors[name]}
    misnamed = {"model.layers.0.down_proj.lora_A.weight": tensors[name]}
    return {
        "removed": _error_of(lambda: engine.generate(PROMPTS, Sampling(), lora="judge")),
        "twice": _error_of(lambda: engine.remove_lora("judge")),
        "empty": _error_of(lambda: engine.set_lora("x", LoraSettings(8, 8.0, EVERYWHERE), {})),
        "lonely": _error_of(lambda: engine.set_lora("x", LoraSettings(8, 8.0, EVERYWHERE), lonely)),
        "misnamed": _error_of(lambda: engine.set_lora("x", LoraSettings(8, 8.0, EVERYWHERE), misnamed)),
        "size": _error_of(lambda: engine.set_lora("x", LoraSettings(4, 8.0, EVERYWHERE), tensors)),
        "rank": _error_of(lambda: engine.set_lora("x", LoraSettings(64, 8.0, EVERYWHERE), tensors)),
        "module": _error_of(lambda: engine.set_lora("x", LoraSettings(8, 8.0, ("q_proj",)), tensors)),
    }


def _error_of(call: Any) -> str:
    from hybrid_engine.errors import HybridEngineError

    try:
        call()
    except HybridEngineError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_adapters_from_memory_compute_what_merged_weights_do(engines: Ranks, tmp_path: Path) -> None:
    """Cut over two ranks; whole ones are in the matrix."""
    for result in engines.launch(adapters, 2, str(tmp_path), 2):
        errors = result.pop("errors")
        assert result.pop("differences") == []
        assert result.pop("far from the base") > 0.1, "the adapter changes nothing"
        assert len(result) == 8 and max(result.values()) < ATOL, result
        assert errors["off"].startswith("StateError: vLLM was built without LoRA: set max_loras")
        assert errors["removed"].startswith("StateError: no LoRA 'judge'; there are: policy")
        assert errors["twice"].startswith("StateError: no LoRA 'judge'")
        assert "it has no tensors" in errors["empty"]
        assert "down_proj.lora_B.weight is missing" in errors["lonely"]
        assert "not a base_model.model." in errors["misnamed"]
        assert "is not of rank 4" in errors["size"] and "64 is more than max_lora_rank 8" in errors["rank"]
        assert errors["experts"].startswith("ConfigError") and "do not run on CPU" in errors["experts"]
        assert "GPT2LMHeadModel takes no LoRA" in errors["gpt2"]
        assert "down_proj is not in target_modules q_proj" in errors["module"]
