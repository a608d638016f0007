"""Dense families in Megatron compared with transformers, before and after training."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.backends.megatron.forward_probe import probe
from hybrid_engine.errors import ConfigError, LossError
from tests.harness.errors import failing
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.values import Values
from tests.zoo.megatron_models import (
    ATOL,
    OVERLAP,
    PP2,
    SP2,
    TP2,
    VPP2,
    check_padding,
    check_training,
    loaded,
    make_batch,
    negative_log_likelihood,
    running,
)
from tests.zoo.tiny_models import TinyModel, Zoo, label_log_probs

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama, biases, other rotary base": TinyModel(
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen2, tied": TinyModel("qwen2", {"tie_word_embeddings": True}),
    "qwen3": TinyModel("qwen3"),
    "qwen3, tied, four layers": TinyModel(
        "qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}
    ),
    "qwen3, one kv head": TinyModel("qwen3", {"num_key_value_heads": 1}),
    "llama 3.1": TinyModel(
        "llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    ),
    "llama, linear scaling": TinyModel("llama", {"rope_parameters": LINEAR}),
    "qwen2 with windows": TinyModel(
        "qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "glm": TinyModel("glm"),
    "glm4": TinyModel("glm4"),
    "gemma2": TinyModel("gemma2"),
    "gemma2, four layers": TinyModel("gemma2", {"num_hidden_layers": 4, "num_key_value_heads": 1}),
    "gemma3": TinyModel("gemma3"),
    "gemma3, linear scaling, untied": TinyModel(
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
    "gpt2": TinyModel("gpt2"),
    "gpt2, untied, exact gelu": TinyModel(
        "gpt2", {"tie_word_embeddings": False, "activation_function": "gelu"}
    ),
}

TWO_RANKS: dict[str, tuple[str, Values]] = {
    "llama tp2": ("llama", TP2),
    "llama, biases dp2": ("llama, biases, other rotary base", {}),
    "llama, biases pp2": ("llama, biases, other rotary base", PP2),
    "qwen2 tp2 sp": ("qwen2, tied", SP2),
    "qwen3 tp2, micro batches of 2": ("qwen3", {**TP2, "micro_batch_size": 2}),
    "qwen3 pp2 vpp2": ("qwen3, tied, four layers", VPP2),
    "qwen3 tp2, one kv head": ("qwen3, one kv head", TP2),
    "qwen3 dp2, overlap": ("qwen3", OVERLAP),
    "qwen3 dp2, plain optimizer": ("qwen3", {"use_distributed_optimizer": False}),
    "llama 3.1 tp2": ("llama 3.1", TP2),
    "llama, linear scaling pp2": ("llama, linear scaling", PP2),
    "qwen2 with windows tp2": ("qwen2 with windows", TP2),
    "glm tp2": ("glm", TP2),
    "glm4 tp2 sp": ("glm4", SP2),
    "gemma2 tp2": ("gemma2", TP2),
    "gemma2, four layers tp2 sp": ("gemma2, four layers", SP2),
    "gemma2, four layers pp2 vpp2": ("gemma2, four layers", VPP2),
    "gemma2, four layers pp2, ends do nothing": (
        "gemma2, four layers",
        {**PP2, "noop_layers": (0, 3)},
    ),
    "gemma3 tp2 sp": ("gemma3", SP2),
    "gemma3, linear scaling, untied pp2": ("gemma3, linear scaling, untied", PP2),
    "gpt2 tp2 sp": ("gpt2", SP2),
    "gpt2 pp2": ("gpt2", PP2),
    "gpt2, untied, exact gelu tp2": ("gpt2, untied, exact gelu", TP2),
}
FOUR_RANKS: dict[str, tuple[str, Values]] = {
    "qwen3 tp2 pp2": ("qwen3", {**TP2, **PP2}),
    "qwen3 tp2 pp2 vpp2, overlap": ("qwen3, tied, four layers", {**TP2, **VPP2, **OVERLAP}),
    "qwen2 tp2 pp2": ("qwen2, tied", {**TP2, **PP2}),
    "llama tp2 dp2": ("llama", {**TP2, "micro_batch_size": 2}),
    "llama pp2 dp2, overlap": ("llama, biases, other rotary base", {**PP2, **OVERLAP}),
}
# Name -> model, actor settings.
LAYOUTS = TWO_RANKS | FOUR_RANKS
# Layouts that also read batches padded on either side, and packed batches.
PADDED: dict[str, tuple[str, Values]] = {
    "llama 3.1 dp2, padded": ("llama 3.1", {"micro_batch_size": 2}),
    "qwen2 with windows tp2, padded": ("qwen2 with windows", {**TP2, "micro_batch_size": 4}),
    "gemma2, four layers pp2 vpp2, padded": ("gemma2, four layers", VPP2),
    "gemma3 tp2 sp, padded": ("gemma3", SP2),
    "gpt2 pp2, padded": ("gpt2", {**PP2, "micro_batch_size": 2}),
}
WARM = 1.4  # temperature of the bfloat16 runs
BFLOAT16 = ("llama 3.1", "qwen2 with windows", "qwen3", "glm", "glm4", "gemma2", "gemma3", "gpt2")


@on_engines({2: TWO_RANKS, 4: FOUR_RANKS})
def test_training_equals_transformers_with_adam(zoo: Zoo, case: str) -> None:
    model, actor = LAYOUTS[case]
    check_training(zoo.saved(MODELS[model]), actor)


@on_engines(2)
@pytest.mark.parametrize("name", PADDED)
def test_padding_and_packing_do_not_change_results(zoo: Zoo, name: str) -> None:
    model, actor = PADDED[name]
    check_padding(zoo.saved(MODELS[model]), MODELS[model].build(), actor)


@on_engines(2)
def test_an_invalid_loss_is_refused_on_all_ranks(zoo: Zoo) -> None:
    """Other losses: trainer/batches/test_loss_results.py."""
    with loaded(zoo.path("gpt2"), **PP2) as run:  # the last stage computes the loss
        before = run.engine.log_probs(make_batch())
        with failing(
            LossError, "no-loss", "training step|loss function .*<lambda> returned None", on=1
        ):
            run.engine.train_step(make_batch(), lambda _batch, _log_probs: None)
        assert torch.equal(run.engine.log_probs(make_batch()), before)
        assert run.engine.model.version == 0
        report = run.engine.train_step(make_batch(), lambda _batch, log_probs: -log_probs.mean())
        assert of_all_ranks(report) == [report, report]
        assert report["loss"] > 0


@on_engines(3)
def test_a_probe_of_fewer_sequences_than_stages(zoo: Zoo) -> None:
    """An interleaved schedule takes multiples of the stages only."""
    model = TinyModel("qwen3", {"num_hidden_layers": 6})
    tokens = make_batch()["tokens"][:2]
    with torch.no_grad():
        expected = label_log_probs(model.build()(tokens).logits[:, :-1], tokens[:, 1:])
    sizes = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}
    with loaded(zoo.saved(model), **sizes) as run:
        answer = probe(run.engine.model.chunks, run.table.dims.vocab_size, tokens)
        torch.testing.assert_close(answer.log_probs, expected, atol=ATOL, rtol=0)


@on_engines(2)
@pytest.mark.parametrize("name", BFLOAT16)
def test_a_step_in_bfloat16_is_close_to_float32(zoo: Zoo, name: str) -> None:
    # Logits are divided by the temperature before softmax.
    batch = make_batch() | {"temperature": torch.full((4,), WARM)}
    with torch.no_grad():
        logits = MODELS[name].build()(batch["tokens"]).logits
    expected = label_log_probs(logits / WARM, batch["labels"])
    with loaded(
        zoo.saved(MODELS[name]), **TP2, params_dtype="bfloat16", optimizer={"lr": 1e-2}
    ) as run:
        model = run.engine.model.weights.model
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        difference = (run.engine.log_probs(batch) - expected).abs()
        assert difference.max() < 0.3  # bf16 has 8 bits
        assert difference.mean() < 0.05
        report = run.engine.train_step(batch, negative_log_likelihood)
        assert report["loss"] == pytest.approx(-expected.mean().item(), abs=0.1)
        assert not [
            name
            for name, parameter in model.named_parameters()
            if torch.equal(parameter, before[name])
        ]


@on_engines(2)
def test_sequences_longer_than_the_learned_positions_are_refused(zoo: Zoo) -> None:
    with (
        failing(ConfigError, "above-learned-positions", "65.* 64 positions"),
        running(zoo.path("gpt2"), seq_length=65),
    ):
        pass
