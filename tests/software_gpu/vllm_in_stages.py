"""vLLM with two pipeline stages and then with two replicas, in the default configuration, on two
ranks.

python -m tests.software_gpu.vllm_in_stages MODEL OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hybrid_engine.errors import StateError
from tests.gpu.sizes import MEMORY_SHARE, sizes_of
from tests.zoo import workers

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
LAYOUTS = {"stages": {"infer_pipeline_parallel_size": 2}, "replicas": {}}


def main(model: Path, out: Path) -> None:
    """Write the completions of each layout, and its error for scoring a prompt."""
    observed = {}
    for name, layout in LAYOUTS.items():
        keys = {"gpu_memory_utilization": MEMORY_SHARE, "enforce_eager": True, **layout}
        generate = {**keys, "vllm": dict(sizes_of("cuda").vllm)}
        worker = workers.build_worker(model, {"tensor_model_parallel_size": 2}, generate)
        with worker.rollout_context():
            answers = worker.generate_sequences(PROMPTS, workers.GREEDY)
            observed[name] = {
                "tokens": [list(answer[0].token_ids) for answer in answers],
                "refusal": "",
            }
            try:
                worker.inference.prompt_logprobs(PROMPTS)
            except StateError as error:
                observed[name]["refusal"] = str(error)
        worker.shutdown()
    out.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(observed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
