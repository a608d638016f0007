"""Stage 2: does a vLLM of its own, which loads the checkpoint that the engines saved, say what they said?

python -m hybrid_engine.verification.gpu.fresh_checks JOB RESULTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hybrid_engine.assembly import inference_settings
from hybrid_engine.backends.vllm import Sampling
from hybrid_engine.backends.vllm.fresh_engine import fresh_completions
from hybrid_engine.verification.gpu.checks import CannotCheckError, Check, Planned, judged, run_checks
from hybrid_engine.verification.gpu.small_job import MAX_TOKENS, SmallJob, differences


def compared(job: SmallJob) -> Iterator[Check]:
    """Greedy completions with the same weights; the kernels are the same, so is every token."""
    if not job.answers.is_file():
        raise CannotCheckError("the engines left no completions: see above")
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    settings = inference_settings(job.config(), 1)
    found = fresh_completions(settings, str(job.checkpoint), job.prompts(), sampling)
    note = differences(json.loads(job.answers.read_text()), found)
    figure = f"{len(found)} of {MAX_TOKENS} tokens"
    yield judged(_name(job), not note, figure, note=note)


def _name(job: SmallJob) -> str:
    return f"{job.mode}: completions as of a fresh vLLM"


def main(job: str, results: str) -> None:
    """Run the check in this process."""
    told = SmallJob(**json.loads(job))
    run_checks([Planned(_name(told), partial(compared, told))], Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
