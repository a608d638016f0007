"""Megatron trains DeepSeek-V3 with an MTP layer, and vLLM drafts with it: weights and accepted tokens after updates."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybrid_engine import ActorHybridWorker, Sampling
from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.arguments import CPU_WORKER
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.models import table_for
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm import support
from tests.zoo import workers
from tests.zoo.families import read_config
from tests.zoo.tiny_models import read_canonical

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.timeout(900)]

NUM_LAYERS = 4
MTP_LAYER = f"model.layers.{NUM_LAYERS}."
NUM_UPDATES = 3
STEPS_PER_UPDATE = 16
PERIOD = 12
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
DRAFTING = {"verify": "full", "vllm": MTP}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}
LONG = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[3, 4, 5], [0, 1, 2, 3], [9, 10], [7, 8, 9]]


@dataclass
class Drafts:
    """Tokens that a drafter has drafted, and those of them that the model has accepted."""

    drafted: int = 0
    accepted: int = 0

    @contextmanager
    def counted(self, llm: Any) -> Iterator[None]:
        """Count the drafts of requests in this context."""
        scheduler = internals.core_of(llm).scheduler
        make = scheduler.make_spec_decoding_stats

        def count(*args: Any, **named: Any) -> Any:
            self.drafted += named["num_draft_tokens"]
            self.accepted += named["num_accepted_tokens"]
            return make(*args, **named)

        scheduler.make_spec_decoding_stats = count
        try:
            yield
        finally:
            scheduler.make_spec_decoding_stats = make

    @property
    def counts(self) -> tuple[int, int]:
        return self.accepted, self.drafted


@dataclass(frozen=True)
class Served:
    """Tokens accepted and drafted, and the tokens of a version by prompt."""

    counts: tuple[int, int]
    tokens: list[list[int]]


def counting(seed: int) -> TensorDict:
    """Return sequences that count upwards, which both the model and its MTP layer can learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(PERIOD, (8, 1), generator=generator) + torch.arange(workers.SEQ_LENGTH + 1)
    rows %= PERIOD
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def keep_copy(copies: TensorDict, name: str, tensor: torch.Tensor) -> None:
    copies[name] = tensor.detach().clone()


def served_versions(worker: ActorHybridWorker, checkpoints: Path, num_steps: int) -> list[Served]:
    """Train, switch and generate; save each version, and compare it with what vLLM holds."""
    assert worker.train.unserved == []
    served = []
    for version in range(NUM_UPDATES + 1):
        with worker.train_context():
            for step in range(num_steps if version else 0):
                worker.update(counting(100 * version + step), workers.cross_entropy)
        path = checkpoints / f"version{version}"
        worker.save_hf_checkpoint(path)
        filled = {}
        drafts = Drafts()
        keep = functools.partial(keep_copy, filled)
        with worker.inference.adaptor.observed(keep), worker.rollout_context(), drafts.counted(worker.inference.llm):
            tokens = [list(group[0].token_ids) for group in worker.generate(PROMPTS, LONG)]
            native = native_parameters(worker.inference, str(path))
        assert support.differences(filled, native) == []
        assert sum(name.startswith("drafter.") for name in native) == 18
        report = worker.sharding.last_report
        assert report.bytes_received == report.bytes_least
        served.append(Served(drafts.counts, tokens))
    return served


def check_drawn_tokens(worker: ActorHybridWorker) -> None:
    """Compare log-probabilities of drawn tokens with those of the same tokens in a prompt."""
    drafts = Drafts()
    with worker.rollout_context():
        with drafts.counted(worker.inference.llm):
            groups = worker.generate(PROMPTS, Sampling(max_tokens=LONG.max_tokens, ignore_eos=True))
        for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
            (row,) = worker.inference.prompt_logprobs([[*prompt, *completion.token_ids]])
            assert completion.logprobs == pytest.approx(row[len(prompt) - 1 :].tolist(), abs=1e-4)
    # None with vLLM's kernel, which reads uninitialised temperatures.
    assert drafts.accepted > drafts.drafted / 10


def start_cold(path: Path) -> Served:
    """Return counts and tokens of vLLM alone, built anew for a checkpoint."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ[ENGINE_TOKEN] = f"cold{os.getpid()}"
    from vllm import LLM, SamplingParams

    torch.compiler.set_stance("force_eager")
    llm = LLM(
        model=str(path),
        **{"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False},
        **{"max_model_len": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 16 << 20},
        # The worker corrects a rotary embedding of vLLM 0.32, and so its results.
        **{"attention_backend": "CPU_MLA", "worker_cls": CPU_WORKER, "async_scheduling": False},
        speculative_config={"attention_backend": "CPU_MLA", **MTP["speculative_config"]},
    )
    drafts = Drafts()
    params = SamplingParams(temperature=0.0, max_tokens=LONG.max_tokens, ignore_eos=True, detokenize=False)
    with drafts.counted(llm):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert drafts.counts == (
        metrics["vllm:spec_decode_num_accepted_tokens"],
        metrics["vllm:spec_decode_num_draft_tokens"],
    )
    internals.core_of(llm).shutdown()
    return Served(drafts.counts, [list(output.outputs[0].token_ids) for output in outputs])


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
def test_every_switch_fills_model_and_drafter_bit_by_bit(model: Path, tmp_path: Path, case: str) -> None:
    actor, generate = TWO_RANKS[case]
    with workers.build_worker(model, actor, {**DRAFTING, **generate}) as worker:
        served_versions(worker, tmp_path, num_steps=2)


@on_engines(1, timeout=600)
def test_mtp_tensors_are_served_to_a_drafter_only(model: Path) -> None:
    with workers.build_worker(model, {}) as worker:
        of_mtp = [name for name in table_for(read_config(model)).shapes if name.startswith(MTP_LAYER)]
        assert list(worker.train.unserved) == of_mtp


@on_engines(1, timeout=600)
def test_acceptance_is_that_of_a_cold_start(model: Path, tmp_path: Path) -> None:
    """And more than with the drafter of the first version, which draws the same tokens."""
    with workers.build_worker(model, {}, DRAFTING) as worker:
        served = served_versions(worker, tmp_path, STEPS_PER_UPDATE)
        check_drawn_tokens(worker)
    versions = [tmp_path / f"version{version}" for version in range(NUM_UPDATES + 1)]
    cold = [start_cold(path) for path in versions]
    assert served == cold
    stale = [start_cold(mixed(path, versions[0], path.with_name(f"stale {path.name}"))) for path in versions]
    assert cold[0] == stale[0]
    print("accepted and drafted:", [result.counts for result in cold], "stale:", [result.counts for result in stale])
    assert [result.tokens for result in cold] == [result.tokens for result in stale]
    # In all: how much the first updates teach depends on the machine.
    num_accepted, num_stale = (sum(result.counts[0] for result in results) for results in (cold, stale))
    assert num_accepted > num_stale + 20


def mixed(model: Path, drafter: Path, directory: Path) -> Path:
    """Write a checkpoint of one version with the MTP layer of another; return its directory."""
    tensors = read_canonical(model)
    tensors |= {name: tensor for name, tensor in read_canonical(drafter).items() if name.startswith(MTP_LAYER)}
    directory.mkdir()
    (directory / "config.json").write_text((model / "config.json").read_text())
    save_file(tensors, directory / "model.safetensors")
    return directory
