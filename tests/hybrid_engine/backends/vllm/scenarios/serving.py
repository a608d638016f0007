"""Quantised weights, memory over switches, and what transformers computes with the same weights."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hybrid_engine.backends.vllm import InferenceEngine, Sampling, internals
from hybrid_engine.backends.vllm.arguments import CPU_WORKER
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN
from hybrid_engine.backends.vllm.generation.sampling_params import sampling_params
from hybrid_engine.backends.vllm.process.isolation import destroy_groups
from hybrid_engine.backends.vllm.process.process_settings import ProcessSettings
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.scenarios.asking import (
    PROMPTS,
    Answers,
    Refusal,
    Scored,
    answers_of,
    build,
    gap,
    job,
    refusal_of,
    sizes,
)
from tests.zoo.families import served_config

# What vLLM's CPU kernels for latent attention compute: heads of 512 + 64, rotary scaling as in published configs.
COMPUTABLE = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@dataclass(frozen=True)
class Served:
    """One engine over two switches and a release.

    Attributes:
        answers, answers_again: before and after the release, from the same weights.
        released_nbytes: of weights, while released.
        differences: parameters with other bits than vLLM loads itself.
        dtype: of a layer's weights in the model.
    """

    answers: Answers
    answers_again: Answers
    released_nbytes: int
    differences: list[str]
    dtype: str


@dataclass(frozen=True)
class Quantised:
    """fp8 weights beside plain ones, and beside a vLLM that loads the same checkpoint by itself."""

    native: list[Scored]
    fp8: Served
    plain: Served
    not_fed: Refusal
    unknown: Refusal
    experts: Refusal


@dataclass(frozen=True)
class Memory:
    """In MB: the weights, and the process after each release and each switch. torch's settings before vLLM was built,
    after that, and after it answered. What is said when a weight is NaN."""

    weights: float
    released: list[float]
    committed: list[float]
    settings: list[ProcessSettings]
    nan: list[Refusal]


def quantised(directory: str, num_tp: int) -> Quantised:
    """All of it."""
    job()
    base = Path(directory)
    # As a quantised checkpoint's config would say; the weights of training are not.
    config = {**support.QWEN3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    weights = [support.random_weights(config, seed) for seed in range(2)]
    path = support.write_checkpoint(base / "weights", support.QWEN3, weights[1])
    native = _plain_answers(path, num_tp, "fp8_per_channel")
    destroy_groups()
    engine_path = support.write_config(base / "config", config)
    moe = support.write_config(base / "experts", support.QWEN3_MOE)

    def serve(quantization: str | None) -> Served:
        engine = build(engine_path, config, sizes=sizes(tensor=num_tp), quantization=quantization)
        return _serve(engine, weights, path)

    def refuse(where: str, model: dict[str, Any], method: str) -> Refusal:
        return refusal_of(lambda: build(where, model, sizes=sizes(tensor=num_tp), quantization=method))

    return Quantised(
        native,
        serve("fp8_per_channel"),
        serve(None),
        not_fed=refuse(engine_path, support.QWEN3, "fp8"),
        unknown=refuse(engine_path, support.QWEN3, "no such"),
        experts=refuse(moe, support.QWEN3_MOE, "fp8_per_channel"),
    )


def memory(directory: str) -> Memory:
    """Three releases and switches."""
    job()
    torch.set_float32_matmul_precision("high")  # vLLM wants the highest
    torch.set_num_threads(2)
    settings = [ProcessSettings.now()]
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 4096}
    config = {**support.LLAMA, **sizes}
    engine = build(support.write_config(Path(directory) / "large", config), config)
    settings.append(ProcessSettings.now())
    weights = support.random_weights(config, 0)
    released, committed = [], []
    for _ in range(3):
        engine.release()
        released.append(_resident())
        support.write_by_records(engine.adaptor, weights)
        committed.append(_resident())
    engine.reset_caches()
    engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    settings.append(ProcessSettings.now())
    support.write_by_records(engine.adaptor, {**weights, "model.norm.weight": weights["model.norm.weight"] * torch.nan})
    nan = refusal_of(lambda: engine.generate([[1, 2, 3]], Sampling(n=2, max_tokens=2)))
    nan_prompt = refusal_of(lambda: engine.prompt_logprobs([[1, 2, 3]]))
    result = Memory(engine.adaptor.nbytes / 1e6, released, committed, settings, [nan, nan_prompt])
    engine.shutdown()
    return result


def gaps_to_transformers(directory: str, num_tp: int, families: Sequence[str]) -> dict[str, float]:
    """Greatest difference of vLLM's and transformers' float32 log-probabilities over two switches, by family.

    Before each switch every block of every cache holds what a diverged policy leaves there.
    """
    job()
    result: dict[str, float] = {}
    for name in families:
        config = {**served_config(name), **(COMPUTABLE if "deepseek" in name else {}), "torch_dtype": "float32"}
        weights = [support.random_weights(config, seed, torch.float32) for seed in range(2)]
        places = [Path(directory, f"{name} {seed}") for seed in range(2)]
        paths = [support.write_checkpoint(*each) for each in zip(places, (config, config), weights, strict=True)]
        # First, for vLLM changes the classes of models that it takes from transformers.
        expected = [_reference_distributions(path) for path in paths]
        engine = build(paths[0], config, dtype="float32", sizes=sizes(tensor=num_tp))
        gaps = []
        for values, theirs in zip(weights, expected, strict=True):
            support.fill_by_records(engine.adaptor, values)
            _spoil_caches(engine)
            engine.reset_caches()
            gaps += [gap(*pair) for pair in zip(engine.prompt_distributions(PROMPTS), theirs, strict=True)]
            gaps.append(_gap_while_decoding(engine))
        result[name] = max(gaps)
        engine.shutdown()
    return result


def samplings() -> int:
    """vLLM takes the extremes that are documented of every field of `Sampling`; how many were tried."""
    extremes: dict[str, Sequence[Any]] = {
        "n": (1, 16384),
        "temperature": (1e-5, 1, 2.0),
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
        *(Sampling(min_p=value, repetition_penalty=penalty) for value in (0, 1.0) for penalty in (1e-9, 1, 1e9)),
        *(Sampling(stop=stop, min_tokens=least) for stop in ((), ("x", " ")) for least in (0, 16)),
        *(Sampling(**dict(zip(extremes, values, strict=True))) for values in itertools.product(*extremes.values())),
    ]
    assert all(sampling_params(each).n == each.n for each in tried)
    with mock.patch.dict(os.environ, {"VLLM_MAX_N_SEQUENCES": "2"}):
        assert "vLLM refuses it: n must be at most 2" in refusal_of(lambda: sampling_params(tried[-1])).message
    return len(tried)


def _serve(engine: InferenceEngine, weights: Sequence[dict[str, torch.Tensor]], last_checkpoint: str) -> Served:
    for values in weights:
        support.fill_by_records(engine.adaptor, values)
        engine.reset_caches()
    answers = answers_of(engine)
    native = support.native_parameters(engine, last_checkpoint)
    engine.release()
    released = engine.adaptor.resident_nbytes()
    filled = support.fill_by_records(engine.adaptor, weights[-1])
    engine.reset_caches()
    layer = internals.model_runner_of(engine.llm).model.model.layers[0]
    dtype = str(layer.mlp.down_proj.weight.dtype)
    result = Served(answers, answers_of(engine), released, support.differences(filled, native), dtype)
    engine.shutdown()
    return result


def _plain_answers(checkpoint: str, num_tp: int, quantization: str) -> list[Scored]:
    """Greedy tokens and their log-probabilities from a vLLM in which nothing is ours but names of shared memory."""
    from vllm import LLM, SamplingParams

    os.environ[ENGINE_TOKEN] = job().agreement.gather(secrets.token_hex(8), "naming shared memory")[0]

    llm = LLM(
        checkpoint,
        quantization=quantization,
        skip_tokenizer_init=True,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=num_tp,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_memory_bytes=16 << 20,
        worker_cls=CPU_WORKER,
    )
    del os.environ[ENGINE_TOKEN]
    llm.llm_engine.engine_core._finalizer.detach()  # at collection it would end the default process group
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    return [
        Scored(
            tuple(choice.token_ids),
            tuple(at[token].logprob for at, token in zip(choice.logprobs, choice.token_ids, strict=True)),
        )
        for choice in choices
    ]


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _reference_distributions(path: str) -> list[torch.Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for tokens in PROMPTS]


def _spoil_caches(engine: InferenceEngine) -> None:
    for cache in internals.model_runner_of(engine.llm).kv_caches:
        cache.fill_(torch.nan)


def _gap_while_decoding(engine: InferenceEngine) -> float:
    """Between the log-probabilities of drawn tokens and those of the same tokens in a prompt: other kernels."""
    row = engine.generate(PROMPTS[:1], Sampling(temperature=0.0, max_tokens=6, ignore_eos=True))[0][0]
    (whole,) = engine.prompt_logprobs([[*PROMPTS[0], *row.token_ids]])
    return gap(torch.tensor(row.logprobs), whole[-6:])
