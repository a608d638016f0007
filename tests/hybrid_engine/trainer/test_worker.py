"""Jobs and models that a worker refuses; end_to_end/ has running workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from hybrid_engine.config import GenerateConfig, HybridConfig
from hybrid_engine.errors import ConfigError, DependencyError
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer import worker
from hybrid_engine.trainer.worker import ActorHybridWorker
from tests.harness.errors import has_violations, refused, violated, violations_of
from tests.zoo.families import served_config, write_config


def test_a_job_with_another_timeout_is_refused_before_building(job: None) -> None:
    config = HybridConfig(model=Path("nowhere"), generate_config=GenerateConfig(timeout_seconds=40))
    differs = has_violations(("generate_config.timeout_seconds", "different-timeouts"))
    joined = Job.join(30)
    with pytest.raises(ConfigError, match=r"40.*30", check=differs):
        ActorHybridWorker(config, job=joined)
    joined.agreement.conclude("the job is still usable")


def test_a_schedule_needs_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer_param_scheduler", None)
    with refused(DependencyError, "needs-package"):
        worker._builder(
            HybridConfig(
                model=Path("nowhere"), actor_config={"fsdp": {}, "optimizer": {"schedule": {}}}
            ),
            None,
        )


def test_a_module_needs_fsdp() -> None:
    with violated(ConfigError, ("actor_config.fsdp", "not-supported")):
        worker._builder(HybridConfig(model=Path("nowhere")), torch.nn.Linear(1, 1))


@pytest.mark.slow  # imports vLLM
def test_a_model_that_cannot_generate_is_refused_before_building(
    job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker, "_builder", lambda *_: lambda *arguments, **named: pytest.fail("it is built")
    )
    model = write_config(
        tmp_path, served_config("llama", head_dim=16, max_position_embeddings=1 << 20)
    )
    generate = GenerateConfig(timeout_seconds=30, kv_cache_mb=1)  # too small for a sequence
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)
    )  # torch sets it with its first import of vLLM
    environment = dict(os.environ)
    with pytest.raises(ConfigError) as caught:
        ActorHybridWorker(
            HybridConfig(model=model, random_weights=True, generate_config=generate),
            job=Job.join(30),
        )
    assert [key for key, _ in violations_of(caught.value)] == [
        "model",
        "generate_config.kv_cache_mb",
    ]
    assert dict(os.environ) == environment  # a refused worker leaves no variables of vLLM
