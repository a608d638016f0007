"""A real vLLM: quantised weights, memory and limits of samplings. The ranks assert.

The matrix (tools/verify/test_matrix.py) compares log-probabilities with transformers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.vllm import InferenceEngine, Sampling, internals
from hybrid_engine.backends.vllm.process_state import ProcessSettings
from hybrid_engine.backends.vllm.requests import sampling_params
from hybrid_engine.config.inference_rules import QUANTIZATIONS
from hybrid_engine.errors import ConfigError, GenerationError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import refused
from tests.harness.launch import on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import (
    Answers,
    answers_of,
    build,
    job,
    sizes,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@on_engines(2, timeout=600)
def test_quantisation_over_two_ranks(tmp_path: Path) -> None:
    """Serve fp8 and plain weights; vLLM's own load quantises them too."""
    job()
    # The config of a quantised checkpoint; weights of training are not quantised.
    config = {
        **support.QWEN3,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    weights = [support.random_weights(config, seed) for seed in range(2)]
    path = support.write_checkpoint(tmp_path / "weights", support.QWEN3, weights[1])
    engine_path = support.write_config(tmp_path / "config", config)
    moe = support.write_config(tmp_path / "experts", support.QWEN3_MOE)

    def build_with(
        quantization: str | None, where: str = engine_path, model: dict[str, Any] = config
    ) -> Any:
        return build(where, model, sizes=sizes(tensor=2), quantization=quantization)

    fp8 = _serve(build_with("fp8_per_channel"), weights, path, "torch.float8_e4m3fn")
    plain = _serve(build_with("none"), weights, path, "torch.bfloat16")
    assert fp8 != plain
    for method, where, model, message in (
        ("awq", engine_path, support.QWEN3, "'awq' on cpu"),
        ("awq", engine_path, support.QWEN3, "Use 'fp8_per_channel', or leave it out"),
        ("no such", engine_path, support.QWEN3, "'no such' on cpu"),
        ("fp8_per_channel", moe, support.QWEN3_MOE, "kernels for quantised experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_with(method, where, model)
    # vLLM accepts the method on CPU, and does nothing to dense layers.
    without_effect = "int8_per_channel_weight_only"
    refusal = pytest.raises(ConfigError, match="quantises none of the")
    with mock.patch.dict(QUANTIZATIONS, {"cpu": (without_effect,)}), refusal:  # type: ignore[arg-type]
        build_with(without_effect)


@on_engines(1, timeout=600)
def test_releases_free_memory_and_keep_the_settings_of_torch(tmp_path: Path) -> None:
    """Over three releases and switches, and then with weights of NaN."""
    job()
    torch.set_float32_matmul_precision("high")  # vLLM sets the highest
    torch.set_num_threads(2)
    settings = [ProcessSettings.now()]
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 4096,
    }
    config = {**support.LLAMA, **sizes}
    engine = build(support.write_config(tmp_path / "large", config), config)
    settings.append(ProcessSettings.now())
    weights = support.random_weights(config, 0)
    released = []
    committed = []
    for _ in range(3):
        engine.release()
        released.append(_resident())
        support.write_by_records(engine.adaptor, weights)
        committed.append(_resident())
    engine.reset_caches()
    engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    settings.append(ProcessSettings.now())
    support.write_by_records(
        engine.adaptor, {**weights, "model.norm.weight": weights["model.norm.weight"] * torch.nan}
    )
    for call in (
        lambda: engine.generate([[1, 2, 3]], Sampling(n=2, max_tokens=2)),
        lambda: engine.prompt_logprobs([[1, 2, 3]]),
    ):
        with refused(GenerationError, "nan-computed"):
            call()
    assert settings[0] == settings[1] == settings[2], "vLLM changed torch's settings"
    nbytes = engine.adaptor.nbytes / 1e6
    for before, after in zip(released, committed, strict=True):
        assert after - before > 0.9 * nbytes, "released weights stayed in memory"
    # On CPU vLLM keeps embedding and head twice, and the allocator may keep a module or two.
    assert max(committed) - min(released) < 1.5 * nbytes, (committed, released)
    assert committed[-1] - committed[0] < 0.2 * nbytes, committed
    engine.shutdown()


@on_engines(1, timeout=600)
def test_vllm_accepts_the_documented_limits_of_every_field_of_sampling() -> None:
    extremes: dict[str, Sequence[Any]] = {
        "n": (1, 16384),
        "temperature": (0.01, 1, 2.0),
        "top_p": (1e-9, 1),
        "top_k": (0, 2**31 - 1),
        "max_tokens": (1, 2**31 - 1),
        "seed": (None, 0, 2**62),
        "logprobs": (False, True),
        "stop_token_ids": ((), (0, 2**31 - 1)),
        "ignore_eos": (False, True),
    }
    tried = [
        Sampling(temperature=0),
        *(
            Sampling(min_p=value, repetition_penalty=penalty)
            for value in (0, 1.0)
            for penalty in (1e-9, 1, 1e9)
        ),
        *(Sampling(stop=stop, min_tokens=least) for stop in ((), ("x", " ")) for least in (0, 16)),
        *(
            Sampling(**dict(zip(extremes, values, strict=True)))
            for values in itertools.product(*extremes.values())
        ),
    ]
    assert all(sampling_params(sampling).n == sampling.n for sampling in tried)


def _serve(
    engine: InferenceEngine,
    weights: Sequence[TensorDict],
    last_checkpoint: str,
    dtype: str,
) -> Answers:
    """Switch twice, release and fill; answers must stay, weights must equal a native load."""
    for values in weights:
        support.fill_by_records(engine.adaptor, values)
        for cache in internals.model_runner_of(engine.llm).kv_caches:
            cache.fill_(torch.nan)  # as a diverged policy leaves it
        engine.reset_caches()
        assert not any(cache.any() for cache in internals.model_runner_of(engine.llm).kv_caches)
    answers = answers_of(engine)
    native = support.native_parameters(engine, last_checkpoint)
    engine.release()
    assert engine.adaptor.resident_nbytes() == 0
    filled = support.fill_by_records(engine.adaptor, weights[-1])
    engine.reset_caches()
    assert support.differences(filled, native) == []
    assert (
        str(internals.model_runner_of(engine.llm).model.model.layers[0].mlp.down_proj.weight.dtype)
        == dtype
    )
    assert answers_of(engine) == answers
    engine.shutdown()
    return answers


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
