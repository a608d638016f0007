"""Verdicts of `verify`, and the small models that it makes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hybrid_engine.config import load_config
from hybrid_engine.errors import ComputationError, ConfigError
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.tools.verify import verify
from hybrid_engine.tools.verify.cases import SEQ_LENGTH, Case, case_of, values_to_verify
from hybrid_engine.tools.verify.comparison import (
    LOGITS_ATOL,
    NUM_SWITCHES,
    Verdict,
    difference_of,
    join,
    tokens_and_labels,
    write_random_checkpoint,
)
from hybrid_engine.tools.verify.reference import Reference
from hybrid_engine.tools.verify.small_models import VOCABULARY, Divisors, reduced_config
from tests.harness.values import Values
from tests.hybrid_engine.tools.programs import invoke
from tests.zoo import published_configs
from tests.zoo.families import INFER_KEYS, TRAIN_KEYS, read_config, write_config

GOOD = Verdict(
    "case",
    num_parameters=3,
    bytes_received=8,
    bytes_least=8,
    training=1e-6,
    vllm=None,
    spread=9.0,
    num_versions=NUM_SWITCHES,
)


@pytest.mark.parametrize(
    ("rounding", "has_fault"), [({}, True), ({"bfloat16": 0.2}, True), ({"bfloat16": 0.4}, False)]
)
def test_transformers_in_the_same_dtype_bounds_rounding(
    rounding: dict[str, float], has_fault: bool
) -> None:
    """Multipliers of Granite's logits enlarge rounding, in transformers too."""
    verdict = replace(GOOD, served_dtype="bfloat16", vllm=0.59, rounding=rounding)
    assert bool(verdict.faults) == has_fault


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": "rank 1: boom"}, "rank 1: boom"),
        (
            {"different": ["rank 0 lm_head.weight"]},
            "rank 0 lm_head.weight: not bitwise what vLLM loads",
        ),
        ({"num_parameters": 0}, "0 parameters compared"),
        ({"num_versions": 2}, "over 2 changing versions"),
        ({"bytes_received": 9}, "9 bytes received, but 8 are enough"),
        ({"training": 0.1}, "megatron: log-probabilities differ"),
        ({"trainer": "fsdp2", "training": 0.1}, "fsdp2: log-probabilities differ"),
        ({"vllm": float("nan")}, "vllm: log-probabilities differ"),
        ({"spread": 0.5}, "too uniform to compare"),
    ],
)
def test_every_fault_is_reported(change: Values, message: str) -> None:
    assert replace(GOOD, vllm=LOGITS_ATOL["float32"]).faults == []
    faults = replace(GOOD, **change).faults
    assert len(faults) == 1
    assert message in faults[0]


@pytest.mark.slow
def test_refused_head_sizes_are_remarked_on() -> None:
    (remark,) = verify._heads_refused_here(8, "cpu")
    assert "refused on this machine: its attention heads have 8 elements" in remark
    for num_elements, device in ((64, "cpu"), (8, "cuda"), (None, "cpu")):
        assert verify._heads_refused_here(num_elements, device) == []


def test_the_figure_is_named_after_the_trainer() -> None:
    assert [*GOOD.as_dict()][5:8] == ["megatron", "vllm", "statistic"]
    assert GOOD.as_dict()["megatron"] == GOOD.training
    assert "seen" not in GOOD.as_dict()
    assert [*replace(GOOD, trainer="fsdp2").as_dict()][5:8] == ["fsdp2", "vllm", "statistic"]


def test_the_median_ignores_a_few_positions() -> None:
    """8 of 21 positions differ; a fault in the weights changes all of them."""
    expected = torch.randn(3, 7, 5).log_softmax(-1)
    near = expected.clone()
    far = expected.clone()
    near.view(21, 5)[:8, 0] += 3.0
    far[..., 0] += 3.0
    assert difference_of(near, expected, "largest") > 0.1
    assert difference_of(near, expected, "median") < 1e-5
    assert difference_of(far, expected, "median") > 0.1


@pytest.mark.parametrize("family", published_configs.PUBLISHED)
def test_small_models_keep_the_architecture(family: str) -> None:
    published = published_configs.PUBLISHED[family]
    large = table_for(published)
    small = table_for(reduced_config(published, 4, Divisors((1, 2))))
    assert small.dims.num_layers == 4
    assert small.dims.vocab_size == VOCABULARY
    assert small.dims.tied_embeddings == large.dims.tied_embeddings
    assert bool(small.dims.num_experts) == bool(large.dims.num_experts)
    assert small.dims.num_mtp_layers == large.dims.num_mtp_layers
    assert small.dims.num_heads % 2 == 0
    assert small.rules != large.rules or small.shapes != large.shapes
    assert kinds(small) == kinds(large)
    assert sum(map(math.prod, small.shapes.values())) < 8e6


def kinds(table: ModelTable) -> set[str]:
    """Return the names of a model's tensors, without their numbers."""
    return {
        ".".join("#" if part.isdigit() else part for part in name.split("."))
        for name in table.shapes
    }


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_sizes"),
    [
        (32, 8, (2, 4)),
        (14, 2, (2, 1)),
        (48, 12, (4, 3)),
        (128, 128, (8,)),
        (8, 1, (2,)),
        (6, 6, (3, 2)),
        (9, 3, ()),
    ],
)
def test_heads_divide_by_the_layouts(heads: int, kv_heads: int, tp_sizes: tuple[int, ...]) -> None:
    config = {
        **published_configs.QWEN3_8B,
        "hidden_size": 128 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    small = reduced_config(config, 4, Divisors(tp_sizes))
    for tp in tp_sizes:
        assert small["num_attention_heads"] % tp == 0
        assert small["num_key_value_heads"] % tp == 0 or tp % small["num_key_value_heads"] == 0
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small["hidden_size"] % small["num_attention_heads"] == 0


@pytest.mark.parametrize("family", ["gemma-2", "gemma-3"])
def test_windows_of_small_models_matter(family: str) -> None:
    """Both kinds of layers remain, and windows are shorter than the compared sequences."""
    windows = table_for(reduced_config(published_configs.PUBLISHED[family], 4)).extras.windows
    assert None in windows
    assert all(window is None or window < SEQ_LENGTH for window in windows)
    assert any(windows)


def test_small_tokens_and_layer_lists(tmp_path: Path) -> None:
    config = {**published_configs.LLAMA_3_8B, "layer_types": ["full_attention"] * 32}
    small = reduced_config(config, 3)
    assert small["layer_types"] == ["full_attention"] * 3
    assert all(token < VOCABULARY for token in (small["bos_token_id"], *small["eos_token_id"]))
    assert small["pad_token_id"] is None
    sparse = reduced_config({**published_configs.QWEN3_30B_A3B, "mlp_only_layers": [1, 40]}, 3)
    assert table_for(sparse).transformer["moe_layer_freq"] == [1, 0, 1]


@pytest.mark.slow
def test_an_unknown_model_type_is_computed_by_its_architecture(tmp_path: Path) -> None:
    """Kimi-K2 is a DeepSeek-V3 with another model_type and its own code."""
    known = reduced_config(published_configs.DEEPSEEK_V3, 4)
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    tokens = tokens_and_labels(0, VOCABULARY, 2)["tokens"]
    log_probs = []
    with Reference() as reference:
        for config in (known, {**known, "model_type": "kimi_k2", **code}):
            directory = tmp_path / config["model_type"]
            model_dir = write_config(directory / "config", config)
            write_random_checkpoint(directory, model_dir, table_for(config), "float32", 0)
            log_probs.append(reference.log_probs(directory, tokens))
    assert torch.equal(*log_probs)


QWEN3_MOE = published_configs.PUBLISHED["qwen3-moe"]


@pytest.mark.parametrize(
    ("model", "ranks", "train", "infer", "num_layers"),
    [
        ({**QWEN3_MOE, "num_experts": 12}, 3, {"ep": 3}, {"ep": 3}, 4),
        ({**QWEN3_MOE, "num_hidden_layers": 6}, 3, {"pp": 3}, {}, 6),
        ({**QWEN3_MOE, "num_experts": 40}, 20, {"ep": 10, "etp": 1}, {"ep": 20}, 4),
        ({**QWEN3_MOE, "num_hidden_layers": 48}, 15, {"pp": 3, "vpp": 4}, {"pp": 5}, 12),
        (published_configs.DEEPSEEK_V3, 64, {"tp": 2, "pp": 8, "ep": 4, "etp": 1, "first": 5},
         {"tp": 4, "ep": 32}, 12),
        (published_configs.DEEPSEEK_V3, 32, {"pp": 4, "ep": 8, "layout": "E|t*31|t*30|mL"},
         {"ep": 8}, 61),
        (published_configs.DEEPSEEK_V3, 8, None, {"tp": 8, "ep": 8}, 4),
        ({**published_configs.QWEN3_8B,
          **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 20),
          "intermediate_size": 1920, "vocab_size": 64000}, 10, {"tp": 5}, {"tp": 5, "pp": 2}, 4),
    ],
)  # fmt: skip
def test_small_models_satisfy_the_published_layouts(
    model: Values,
    ranks: int,
    train: Values | None,
    infer: dict[str, int],
    num_layers: int,
    tmp_path: Path,
) -> None:
    """`train` None: FSDP2."""
    sections = {
        "actor_config": {"fsdp": {}}
        if train is None
        else {TRAIN_KEYS[name]: size for name, size in train.items()},
        "generate_config": {INFER_KEYS[name]: size for name, size in infer.items()},
    }
    published = write_config(tmp_path / "published", model)
    config = load_config(
        {"model": str(published), **sections}, ranks, weights_only=True, own_weights=True
    )
    case = case_of("case", published, tmp_path / "small", ranks, *values_to_verify(config))
    small = table_for(read_config(Path(case.model)))
    assert small.dims.num_layers == num_layers
    assert sum(map(math.prod, small.shapes.values())) < 8e7
    reduced = case.config(ranks)
    expected = config.train_sizes(ranks)
    if isinstance(expected, TrainParallelism):
        expected = replace(expected, make_vocab_size_divisible_by=8)
    assert reduced.train_sizes(ranks) == expected
    assert reduced.generate_config.sizes(ranks) == config.generate_config.sizes(ranks)


def test_a_case_keeps_keys_that_affect_layouts_and_values(tmp_path: Path) -> None:
    published = write_config(tmp_path, published_configs.QWEN3_8B)
    values = {
        "model": str(published),
        "actor_config": {
            "lora": {"rank": 4},
            "seq_length": 8192,
            "optimizer": {"lr": 1e-6},
            "make_vocab_size_divisible_by": 64,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 9,
        },
        "generate_config": {
            "lora_delivery": "adapter",
            "max_model_len": 9000,
            "kv_cache_mb": 4000,
            "transport": "collective",
            "trace": "trace.json",
            "release_weights": False,
        },
    }
    config = load_config(values, 2, weights_only=True, own_weights=True)
    reduced = case_of("case", published, tmp_path / "small", 2, *values_to_verify(config)).config(2)
    actor = reduced.actor_config
    generate = reduced.generate_config
    assert (actor.lora.rank, actor.make_vocab_size_divisible_by, actor.params_dtype) == (
        4,
        64,
        "bfloat16",
    )
    assert (actor.seq_length, actor.optimizer.lr, actor.recompute_granularity) == (
        SEQ_LENGTH,
        1e-2,
        None,
    )
    assert (generate.lora_delivery, generate.transport, generate.release_weights) == (
        "adapter",
        "collective",
        False,
    )
    assert (generate.max_model_len, generate.kv_cache_mb, generate.trace) == (
        2 * SEQ_LENGTH,
        64,
        None,
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError([]), 2), (RuntimeError("no memory"), 3), (ComputationError("differs"), 1)],
)
def test_an_error_before_the_first_comparison_is_no_verdict(
    error: Exception, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of both ranks is printed once, as JSON as well. The ranks are fakes."""
    monkeypatch.setattr(verify.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(verify, "ActorHybridWorker", Mock(side_effect=error))
    case = Case("case", str(write_config(tmp_path / "model", published_configs.QWEN3_8B)))
    of_rank = verify._verdict_of_rank(case, Mock(), tmp_path, Mock())
    verdicts = [join([replace(of_rank), of_rank])]
    monkeypatch.setattr(verify, "run_cases", lambda *_: verdicts)
    result = invoke("verify", tmp_path / "model", "--ranks", 2, "--json", status=status)
    assert json.loads(result.stdout)["error"].count(str(error)) == 1
    step = "three switches on 2 processes"
    assert result.stderr.startswith(f"{step} ...\n{step} in 0 s\n")
    assert ("No verdict: rank 0: " in result.stderr) == (status > 1)


def test_the_command_runs_the_case_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments override keys of the file. The ranks are fakes."""
    write_config(tmp_path / "model", published_configs.QWEN3_8B)
    file = tmp_path / "job.yaml"
    started = []
    file.write_text(
        "model: model\nactor_config: {tensor_model_parallel_size: 2, params_dtype: float32}\n"
    )

    def run(cases: list[Case], num_ranks: int, **_: Any) -> list[Verdict]:
        config = cases[0].config(num_ranks)
        started.append((config, config.hf_config()["num_hidden_layers"], num_ranks))
        return [replace(GOOD, name=cases[0].name)]

    monkeypatch.setattr("hybrid_engine.tools.verify.verify.run_cases", run)
    sizes = (
        "generate_config.infer_pipeline_parallel_size=2",
        "generate_config.quantization=fp8_per_channel",
    )
    result = invoke("verify", file, *sizes, "--ranks", 2, "--layers", 6, "--json")
    ((config, num_layers, num_ranks),) = started
    assert (num_ranks, num_layers) == (2, 6)
    assert config.actor_config.tensor_model_parallel_size == 2
    assert (
        config.actor_config.params_dtype,
        config.generate_config.infer_pipeline_parallel_size,
    ) == ("float32", 2)
    output = json.loads(result.stdout)
    assert output["name"].endswith("quantization=fp8_per_channel on 2 ranks")
    assert "without generate_config.quantization (fp8_per_channel)" in output["remarks"][-1]
    assert output["faults"] == []
