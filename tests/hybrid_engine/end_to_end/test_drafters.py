"""Megatron trains DeepSeek-V3 with an MTP layer, and vLLM drafts with it: weights, and tokens drawn
with drafts.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine import ActorHybridWorker, Sampling
from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm import support
from tests.zoo import workers
from tests.zoo.families import read_config

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.timeout(900)]

NUM_LAYERS = 4
MTP_LAYER = f"model.layers.{NUM_LAYERS}."
NUM_UPDATES = 2
STEPS_PER_UPDATE = 24
PERIOD = 12
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
DRAFTING = {"verify": "full", "vllm": MTP}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}
LONG = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[3, 4, 5], [0, 1, 2, 3], [9, 10], [7, 8, 9]]


def counting(seed: int) -> TensorDict:
    """Return sequences that count upwards, which both the model and its MTP layer can learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(PERIOD, (8, 1), generator=generator) + torch.arange(workers.SEQ_LENGTH + 1)
    rows %= PERIOD
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def keep_copy(copies: TensorDict, name: str, tensor: torch.Tensor) -> None:
    copies[name] = tensor.detach().clone()


def check_versions(worker: ActorHybridWorker, checkpoints: Path, num_steps: int) -> None:
    """Train, switch and generate; save each version, and compare it with what vLLM holds."""
    assert worker.train.unserved == []
    for version in range(NUM_UPDATES + 1):
        with worker.train_context():
            for step in range(num_steps if version else 0):
                worker.update(counting(100 * version + step), workers.cross_entropy)
        path = checkpoints / f"version{version}"
        worker.save_hf_checkpoint(path)
        filled = {}
        keep = functools.partial(keep_copy, filled)
        with worker.inference.adaptor.observed(keep), worker.rollout_context():
            worker.generate(PROMPTS, LONG)
            native = native_parameters(worker.inference, str(path))
        assert support.differences(filled, native) == []
        assert sum(name.startswith("drafter.") for name in native) == 18
        report = worker.sharding.last_report
        assert report.bytes_received == report.bytes_least


TWO_RANKS: dict[str, tuple[Values, Values]] = {
    "tp2 -> tp2": ({**TP2, "expert_model_parallel_size": 1}, {"infer_tensor_parallel_size": 2}),
    "pp2 -> tp2": (PP2, {"infer_tensor_parallel_size": 2}),
}


def write_model(directory: Path) -> Path:
    return workers.write_model(
        directory,
        "deepseek_v3",
        **{"num_nextn_predict_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        **{"num_hidden_layers": NUM_LAYERS, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@on_engines({2: TWO_RANKS}, timeout=600)
def test_every_switch_fills_model_and_drafter_bit_by_bit(
    model: Path, tmp_path: Path, case: str
) -> None:
    actor, generate = TWO_RANKS[case]
    with workers.build_worker(model, actor, {**DRAFTING, **generate}) as worker:
        check_versions(worker, tmp_path, num_steps=2)


@on_engines(1, timeout=600)
def test_mtp_tensors_are_served_to_a_drafter_only(model: Path) -> None:
    with workers.build_worker(model, {}) as worker:
        of_mtp = [
            name for name in table_for(read_config(model)).shapes if name.startswith(MTP_LAYER)
        ]
        assert list(worker.train.unserved) == of_mtp


@on_engines(1, timeout=600)
def test_tokens_of_drafts_have_the_probabilities_of_the_model(model: Path, tmp_path: Path) -> None:
    """Compare log-probabilities of drawn tokens with those of the same tokens in a prompt."""
    num_tokens = Counter[str]()
    with workers.build_worker(model, {}, DRAFTING) as worker:
        check_versions(worker, tmp_path, STEPS_PER_UPDATE)
        scheduler = internals.core_of(worker.inference.llm).scheduler
        make = scheduler.make_spec_decoding_stats

        def count(*args: Any, **named: Any) -> Any:
            num_tokens.update(
                {key: named[key] for key in ("num_draft_tokens", "num_accepted_tokens")}
            )
            return make(*args, **named)

        with worker.rollout_context():
            with mock.patch.object(scheduler, "make_spec_decoding_stats", count):
                groups = worker.generate(
                    PROMPTS, Sampling(max_tokens=LONG.max_tokens, ignore_eos=True)
                )
            for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
                (row,) = worker.inference.prompt_logprobs([[*prompt, *completion.token_ids]])
                assert completion.logprobs == pytest.approx(
                    row[len(prompt) - 1 :].tolist(), abs=1e-4
                )
    # None with vLLM's kernel, which reads uninitialised temperatures.
    assert num_tokens["num_accepted_tokens"] > num_tokens["num_draft_tokens"] / 10
