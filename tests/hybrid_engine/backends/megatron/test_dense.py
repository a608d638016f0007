"""The dense families in Megatron against transformers: the same weights, the same tokens, the same numbers, also after
training; and their parameters against Megatron's own names for them. All in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from hybrid_engine.models.variants import RotaryScaling
from hybrid_engine.worker import share_of
from tests.harness.core_versions import IS_0_16
from tests.harness.launch import Ranks
from tests.zoo.families import SIZES, read_config
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, running
from tests.zoo.tiny_models import build_hf_model, label_log_probs, save_model, token_batch, train_hf_model

# fp32: sums in another order only. Logits reach about 4.
ATOL = 1e-5
# Adam turns the rounding of tiny gradients into whole steps; so wider after training.
TRAINED_ATOL = 1e-4
NUM_STEPS = 2

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.1": ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "llama, linear scaling": ("llama", {"rope_parameters": LINEAR}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "gemma2": ("gemma2", {}),
    "gemma2, four layers": ("gemma2", {"num_hidden_layers": 4, "num_key_value_heads": 1}),
    "gemma3": ("gemma3", {}),
    "gemma3, linear scaling, untied": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": ("gpt2", {}),
    "gpt2, untied, exact gelu": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu"}),
}

TP1: dict[str, Any] = {}  # two data parallel ranks
TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama 3.1", TP1),
    ("llama 3.1", TP2),
    ("llama, linear scaling", PP2),
    ("qwen2 with windows", TP1),
    ("qwen2 with windows", TP2),
    ("glm", TP1),
    ("glm", TP2),
    ("glm4", TP1),
    ("glm4", SP2),
    ("gemma2", TP1),
    ("gemma2", TP2),
    *([("gemma2, four layers", SP2)] if IS_0_16 else []),
    ("gemma2, four layers", {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    ("gemma2, four layers", {**PP2, "noop_layers": (0, 3)}),
    ("gemma3", TP1),
    ("gemma3", SP2),
    ("gemma3, linear scaling, untied", PP2),
    ("gpt2", TP1),
    ("gpt2", SP2),
    ("gpt2", PP2),
    ("gpt2, untied, exact gelu", TP2),
]
BFLOAT16 = ("llama 3.1", "qwen2 with windows", "glm", "glm4", "gemma2", "gemma3", "gpt2")
SCALINGS = (("llama3", 8.0, 1.0, 4.0, 8192), ("llama3", 32.0, 1.5, 6.0, 4096), ("linear", 8.0, 1.0, 4.0, 8192))


@dataclass(repr=False)
class Seen:
    """What one rank brings back: by index in LAYOUTS, by model of BFLOAT16, by index in SCALINGS; a refusal."""

    layouts: list[dict[str, Any]] = field(default_factory=list)
    bfloat16: dict[str, dict[str, Any]] = field(default_factory=dict)
    frequencies: list[torch.Tensor] = field(default_factory=list)
    too_long: str = ""


def make_batch() -> dict[str, torch.Tensor]:
    """Sequences longer than every window; token 129 is the last before Megatron's padding."""
    batch = token_batch(3, 4, 12)
    batch["tokens"][0, 0] = batch["tokens"][0, 5] = batch["labels"][0, 4] = 129
    return batch


def run_all(paths: dict[str, Path]) -> Seen:
    """On each of two ranks."""
    seen = Seen()
    for model, settings in LAYOUTS:
        seen.layouts.append(run_layout(paths[model], settings))
    for model in BFLOAT16:
        seen.bfloat16[model] = run_bfloat16(paths[model])
    from hybrid_engine.backends.megatron.model_variants import scaled_frequencies

    seen.frequencies = [scaled_frequencies(plain_frequencies(), RotaryScaling(*scaling)) for scaling in SCALINGS]
    seen.too_long = refusal_of_long_sequences(paths["gpt2"])
    return seen


def run_layout(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = ActorConfig(**{**DENSE_FLOAT32, **settings, "optimizer": {"lr": 3e-3, "weight_decay": 0.1}})
    with running(path, config) as run:
        load_canonical(run, path)
        engine, batch = run.engine, share_of(run.engine, make_batch())
        result = {
            "logits": engine.gather_over_data_parallel(engine.logits(batch["tokens"])),
            "names": list(megatron_names(run)),
        }
        result["reports"] = [engine.train_step(batch, negative_log_likelihood) for _ in range(NUM_STEPS)]
        result["final"] = engine.gather_over_data_parallel(engine.log_probs(batch))
        return result


def megatron_names(run: Any) -> Iterator[tuple[str, str]]:
    """A parameter's name, and what Megatron calls it in a checkpoint, both with global layer numbers.

    There the local layer spec takes the names of Transformer Engine's (`sharded_state_dict_keys_map`).
    """
    from megatron.core.utils import unwrap_model

    from tests.megatron_patches.gpt import sharded_tensors

    for chunk in unwrap_model(run.actor.chunks):
        homes = {parameter.data_ptr(): name for name, parameter in run.engine.weights.model.named_parameters()}
        for tensor in sharded_tensors(chunk):
            if (name := homes.get(tensor.data.data_ptr())) is not None:  # the second half of gate and up has none
                layer = ".".join(name.split(".")[:3]) + "."
                yield name, tensor.key.replace("decoder.layers.", layer, 1)


def run_bfloat16(path: Path) -> dict[str, Any]:
    config = ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "bfloat16", "optimizer": {"lr": 1e-2}})
    with running(path, config) as run:
        load_canonical(run, path)
        batch = make_batch()
        before = {name: parameter.clone() for name, parameter in run.engine.weights.model.named_parameters()}
        log_probs = run.engine.log_probs(batch)
        report = run.engine.train_step(batch, negative_log_likelihood)
        unchanged = [name for name, p in run.engine.weights.model.named_parameters() if torch.equal(p, before[name])]
        return {"log_probs": log_probs, "loss": report["loss"], "unchanged": unchanged}


def refusal_of_long_sequences(path: Path) -> str:
    with pytest.raises(ConfigError) as caught, running(path, ActorConfig(**{**DENSE_FLOAT32, "seq_length": 65})):
        pass
    return str(caught.value)


def plain_frequencies() -> torch.Tensor:
    return 1.0 / (5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes) in MODELS.items()
    }


@pytest.fixture(scope="module")
def seen(engines: Ranks, paths: dict[str, Path]) -> list[Seen]:
    """By rank."""
    return engines.launch(run_all, 2, paths)


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    """What transformers computes, by model."""
    results, batch = {}, make_batch()
    for name, (family, changes) in MODELS.items():
        model = build_hf_model(family, **changes)
        with torch.no_grad():
            logits = model(batch["tokens"]).logits
        losses, norms, final = train_hf_model(model, batch, NUM_STEPS, weight_decay=0.1)
        results[name] = {"logits": logits, "losses": losses, "norms": norms, "final": final}
    return results


def test_logits_are_those_of_transformers(seen: list[Seen], expected: dict[str, dict[str, Any]]) -> None:
    for rank, results in enumerate(seen):
        for (model, settings), result in zip(LAYOUTS, results.layouts, strict=True):
            logits = expected[model]["logits"]
            assert logits.abs().max() > 1, "logits this small show little"
            at = f"{model}, {settings}, rank {rank}"
            torch.testing.assert_close(result["logits"], logits, atol=ATOL, rtol=0, msg=lambda m, at=at: f"{at}: {m}")


def test_training_follows_transformers_with_adam(seen: list[Seen], expected: dict[str, dict[str, Any]]) -> None:
    """So every parameter gets its gradient, norms under tensor and sequence parallelism included."""
    for results in seen:
        for (model, settings), result in zip(LAYOUTS, results.layouts, strict=True):
            at, reference, reports = f"{model}, {settings}", expected[model], result["reports"]
            assert reference["losses"][1] < reference["losses"][0], "the reference does not learn"
            assert [report["loss"] for report in reports] == pytest.approx(reference["losses"], abs=ATOL), at
            assert [report["grad_norm"] for report in reports] == pytest.approx(reference["norms"], rel=1e-3), at
            torch.testing.assert_close(
                result["final"], reference["final"], atol=TRAINED_ATOL, rtol=0, msg=lambda m, at=at: f"{at}: {m}"
            )


def test_bfloat16_models_train(seen: list[Seen], expected: dict[str, dict[str, Any]]) -> None:
    batch = make_batch()
    for results in seen:
        for model, result in results.bfloat16.items():
            log_probs = label_log_probs(expected[model]["logits"], batch["labels"])
            difference = (result["log_probs"] - log_probs).abs()
            assert difference.max() < 0.3, model  # bf16 has 8 bits
            assert difference.mean() < 0.05, model
            assert result["loss"] == pytest.approx(expected[model]["losses"][0], abs=0.1), model
            assert result["unchanged"] == [], model


def test_names_are_megatrons_with_both_layer_specs(seen: list[Seen], paths: dict[str, Path]) -> None:
    """A name in Megatron's checkpoints, which is the one that Transformer Engine's layers use, finds the same rule."""
    differing = set()
    for results in seen:
        for (model, _), result in zip(LAYOUTS, results.layouts, strict=True):
            table = table_for(read_config(paths[model]))
            assert len(result["names"]) > 5
            for name, key in result["names"]:
                assert table.match(name) is not None, name
                assert table.match(name) == table.match(key), f"{name} and {key}"
                if name != key and name.startswith("decoder.layers."):  # else the tied head, saved as the embedding
                    differing.add(key.split(".", 3)[3])
    assert differing == {
        f"{linear}.layer_norm_{kind}"
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("index", range(len(SCALINGS)))
def test_rotary_frequencies_are_those_of_transformers(seen: list[Seen], index: int) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = dict(zip(names, SCALINGS[index], strict=True))
    config = transformers.LlamaConfig(**{**SIZES, "head_dim": 128, "rope_parameters": {**rope, "rope_theta": 5e5}})
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(seen[0].frequencies[index], frequencies, rtol=1e-6, atol=0)
    assert not torch.equal(frequencies, plain_frequencies())


def test_learned_positions_end(seen: list[Seen]) -> None:
    assert all("actor_config.seq_length: 65, but the model has 64 positions" in results.too_long for results in seen)
