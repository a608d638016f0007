"""What a worker asks of a job that it is given; workers that run are in end_to_end/."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_engine.config import GenerateConfig, HybridConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.ranks.job import Job
from hybrid_engine.worker import ActorHybridWorker


def test_a_job_of_another_timeout_is_refused_before_anything_is_built(job: None) -> None:
    config = HybridConfig(model=Path("nowhere"), generate_config=GenerateConfig(timeout_seconds=40))
    text = r"generate_config\.timeout_seconds: 40, but the job was joined with 30\. Pass Job\.join this value"
    joined = Job.join(30)
    with pytest.raises(ConfigError, match=text):
        ActorHybridWorker(config, job=joined)
    joined.agreement.conclude("the job goes on")
