"""Dense families in Megatron compared with transformers, before and after training."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.config import ActorConfig
from hybrid_engine.errors import ConfigError, HybridEngineError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches import chunked_scores
from tests.harness.launch import Call, Outcomes, Ranks
from tests.harness.values import Values
from tests.zoo import padded_batches
from tests.zoo.megatron_models import DENSE_FLOAT32, load_canonical, negative_log_likelihood, running
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import build_hf_model, label_log_probs, save_model, token_batch, train_hf_model

# fp32 sums are only reordered; logits reach about 5.
ATOL = 2e-5
# Adam turns rounding errors of tiny gradients into whole steps.
TRAINED_ATOL = 1e-4
NUM_STEPS = 2

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
MODELS: dict[str, tuple[str, Values]] = {
    "llama": ("llama", {}),
    "llama, biases, other rotary base": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, four layers": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen3, one kv head": ("qwen3", {"num_key_value_heads": 1}),
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

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
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
    "gemma2, four layers pp2, ends do nothing": ("gemma2, four layers", {**PP2, "noop_layers": (0, 3)}),
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
# Name -> model, actor settings; the remaining ranks are data parallel.
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


def make_batch() -> TensorDict:
    """Sequences longer than every window; token 129 is the last before Megatron's padding."""
    batch = token_batch(3, 4, 12)
    batch["tokens"][0, 0] = batch["tokens"][0, 5] = batch["labels"][0, 4] = 129
    return batch


@dataclass(frozen=True)
class RankResult:
    """Results of one rank for the whole batch.

    Attributes:
        reports: one per training step.
        log_probs: after training.
    """

    reports: list[dict[str, float]]
    log_probs: torch.Tensor


def run_layout(path: Path, settings: Values) -> RankResult:
    config = ActorConfig(**{**DENSE_FLOAT32, **settings, "optimizer": {"lr": 3e-3, "weight_decay": 0.1}})
    # several chunks of tokens a row, the last one shorter
    with running(path, config) as run, attributes_set([chunked_scores], MAX_LOGIT_NBYTES=1500):
        load_canonical(run, path)
        engine = run.engine
        batch = share_of(run.engine, make_batch())
        reports = []
        for _ in range(NUM_STEPS):
            reports.append(engine.train_step(batch, negative_log_likelihood))
            engine.log_probs(batch)  # scoring between steps must not affect training
        assert engine.model.version == NUM_STEPS
        log_probs = engine.data_parallel.gather(engine.log_probs(batch))
        return RankResult(reports, log_probs)


def read_padded(path: Path, settings: Values) -> dict[str, padded_batches.Read]:
    with running(path, ActorConfig(**{**DENSE_FLOAT32, **settings, "seq_length": padded_batches.WIDTH})) as run:
        load_canonical(run, path)
        return padded_batches.read_all(run.engine)


@dataclass(frozen=True)
class BadLosses:
    """Errors of invalid losses, whether the weights stayed, and the report of a valid loss."""

    errors: list[str]
    weights_stay: bool
    valid_report: dict[str, float]


def refuse_losses(path: Path) -> BadLosses:
    """Train with invalid losses on two pipeline stages; the last stage computes the loss."""
    config = ActorConfig(**{**DENSE_FLOAT32, **PP2})
    losses: list[Any] = [
        lambda _batch, _log_probs: None,
        lambda _batch, log_probs: -log_probs.sum(0),
        lambda batch, _log_probs: batch["weights"],
        lambda _batch, log_probs: log_probs.mean() * float("nan"),
    ]
    with running(path, config) as run:
        load_canonical(run, path)
        before = run.engine.log_probs(make_batch())
        errors = []
        for loss in losses:
            with pytest.raises(HybridEngineError) as caught:
                run.engine.train_step(make_batch(), loss)
            errors.append(f"{type(caught.value).__name__}: {caught.value}")
        weights_stay = torch.equal(run.engine.log_probs(make_batch()), before) and run.engine.model.version == 0
        valid_report = run.engine.train_step(make_batch(), lambda _batch, log_probs: -log_probs.mean())
        return BadLosses(errors, weights_stay, valid_report)


@dataclass(frozen=True)
class HalfPrecision:
    """A step in bfloat16: prior log-probabilities, the loss, and parameters it did not change."""

    log_probs: torch.Tensor
    loss: float
    unchanged: list[str]


def run_bfloat16(path: Path) -> HalfPrecision:
    config = ActorConfig(**{**DENSE_FLOAT32, **TP2, "params_dtype": "bfloat16", "optimizer": {"lr": 1e-2}})
    with running(path, config) as run:
        load_canonical(run, path)
        # Logits are divided by the temperature before softmax.
        batch = make_batch() | {"temperature": torch.full((4,), WARM)}
        before = {name: parameter.clone() for name, parameter in run.engine.model.weights.model.named_parameters()}
        log_probs = run.engine.log_probs(batch)
        report = run.engine.train_step(batch, negative_log_likelihood)
        after = run.engine.model.weights.model.named_parameters()
        unchanged = [name for name, parameter in after if torch.equal(parameter, before[name])]
        return HalfPrecision(log_probs, report["loss"], unchanged)


def refuse_long_sequences(path: Path) -> str:
    with pytest.raises(ConfigError) as caught, running(path, ActorConfig(**{**DENSE_FLOAT32, "seq_length": 65})):
        pass
    return str(caught.value)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes) in MODELS.items()
    }


def in_bfloat16(model: str) -> str:
    return f"{model} in bfloat16"


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, paths: dict[str, Path]) -> Outcomes:
    """Results of all calls, on two ranks and on four."""
    calls = layout_calls(paths, TWO_RANKS)
    calls |= {in_bfloat16(model): (run_bfloat16, (paths[model],)) for model in BFLOAT16}
    calls |= {name: (read_padded, (paths[model], cut)) for name, (model, cut) in PADDED.items()}
    calls["losses"] = refuse_losses, (paths["gpt2"],)
    calls["too long"] = refuse_long_sequences, (paths["gpt2"],)
    on_two = engines.launch_in_turn(2, calls)
    on_four = engines.launch_in_turn(4, layout_calls(paths, FOUR_RANKS))
    return Outcomes({**on_two.results, **on_four.results}, {**on_two.failures, **on_four.failures})


def layout_calls(paths: dict[str, Path], layouts: dict[str, tuple[str, Values]]) -> dict[str, Call]:
    return {name: (run_layout, (paths[model], cut)) for name, (model, cut) in layouts.items()}


@dataclass(frozen=True)
class Expected:
    """Results of transformers."""

    logits: torch.Tensor
    losses: list[float]
    norms: list[float]
    log_probs: torch.Tensor


@functools.cache
def expected(model_name: str) -> Expected:
    family, changes = MODELS[model_name]
    model = build_hf_model(family, **changes)
    batch = make_batch()
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    return Expected(logits, *train_hf_model(model, batch, NUM_STEPS, weight_decay=0.1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_transformers_with_adam(outcomes: Outcomes, layout: str) -> None:
    reference = expected(LAYOUTS[layout][0])
    assert reference.losses[1] < reference.losses[0], "the reference does not learn"
    for result in outcomes[layout]:
        assert result.reports == outcomes[layout][0].reports
        assert all(report["skipped"] == 0.0 for report in result.reports)
        assert [report["loss"] for report in result.reports] == pytest.approx(reference.losses, abs=ATOL)
        # The norm is right only if every parameter has its gradient, under all layouts.
        assert [report["grad_norm"] for report in result.reports] == pytest.approx(reference.norms, rel=1e-3)
        torch.testing.assert_close(result.log_probs, reference.log_probs, atol=TRAINED_ATOL, rtol=0)


@pytest.mark.parametrize("name", PADDED)
def test_padding_and_packing_do_not_change_results(outcomes: Outcomes, name: str) -> None:
    """Scores, entropy, most likely tokens and gradients agree with the plain batch."""
    family, changes = MODELS[PADDED[name][0]]
    for reads in outcomes[name]:
        padded_batches.assert_all_ways_agree(reads, ATOL)
        padded_batches.assert_is_that_of_logits(reads["right"], build_hf_model(family, **changes))


def test_invalid_losses_are_refused_on_all_ranks(outcomes: Outcomes) -> None:
    first, last = outcomes["losses"]
    problems = ("returned None", "a tensor of shape [12]", "KeyError: 'weights'", "returned nan")
    for error, problem in zip(last.errors, problems, strict=True):
        assert error.startswith("LossError: loss function refuse_losses.<locals>.<lambda>")
        assert problem in error
    assert all(error.startswith("RemoteError: training step") for error in first.errors)
    assert first.weights_stay
    assert last.weights_stay
    assert first.valid_report == last.valid_report
    assert first.valid_report["loss"] > 0


@pytest.mark.parametrize("model", BFLOAT16)
def test_bfloat16_results_are_close_to_float32(outcomes: Outcomes, model: str) -> None:
    log_probs = label_log_probs(expected(model).logits / WARM, make_batch()["labels"])
    for result in outcomes[in_bfloat16(model)]:
        difference = (result.log_probs - log_probs).abs()
        assert difference.max() < 0.3  # bf16 has 8 bits
        assert difference.mean() < 0.05
        assert result.loss == pytest.approx(-log_probs.mean().item(), abs=0.1)


@pytest.mark.parametrize("model", BFLOAT16)
def test_a_step_in_bfloat16_changes_every_parameter(outcomes: Outcomes, model: str) -> None:
    assert [result.unchanged for result in outcomes[in_bfloat16(model)]] == [[], []]


def test_sequences_longer_than_the_learned_positions_are_refused(outcomes: Outcomes) -> None:
    text = "actor_config.seq_length: 65, but the model has 64 positions"
    assert all(text in refusal for refusal in outcomes["too long"])
