"""Makes the last section of docs/planning.md: a 70B model's switch, FSDP2 to vLLM, on 64 devices.

Run `make docs` after a change of the planner; a test compares.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hybrid_engine.config import load_config
from hybrid_engine.layouts.memory import GIB
from hybrid_engine.planning.plan import Link
from hybrid_engine.tools.plan.cluster_plan import Cluster, JobPlan, plan_job

PAGE = Path(__file__).parent / "planning.md"
LLAMA_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
RANKS = 64
KEYS = {
    "actor_config": {"fsdp": {}, "params_dtype": "float32"},
    "generate_config": {
        "compress_reshard": True,
        "infer_tensor_parallel_size": 4,
        "infer_pipeline_parallel_size": 2,
    },
}
A100 = Cluster(device_gib=80.0, link_gbps={Link.SELF: 1000.0, Link.HOST: 250.0, Link.NETWORK: 22.0})
PUBLISHED = {"weights": (120, 15), "optimizer state": (240, 30), "gradients": (60, 10)}
"""GB by a gather and after, as estimated for verl with a 70B model on eight nodes of A100."""


def texts() -> dict[Path, str]:
    """Return the whole page, of which all before the section is written by hand."""
    written = PAGE.read_text()
    return {PAGE: written[: written.index(_SECTION.partition("\n")[0])] + section()}


def section() -> str:
    """Return the section."""
    job = _job()
    model, received = job.model_nbytes, float(job.bytes.received.mean())
    numel, ranks = model // 2, job.world_size
    gathered = {"weights": 2, "optimizer state": 8, "gradients": 4}  # bytes per element
    rows = []
    for name, (before, after) in PUBLISHED.items():
        gather = gathered[name] * numel * (1 - 1 / ranks)
        ours = received if name == "weights" else 0.0
        published = f"{before} -> {after} GB, {1 - after / before:.1%} less"
        rows.append(
            f"| {name} | {published} | {_gb(gather)} | {_gb(ours)} | {1 - ours / gather:.1%} |"
        )
    held, needed, memory = (
        float(job.bytes.own.mean()),
        received + float(job.bytes.own.mean()),
        job.memory,
    )
    return _SECTION.format(
        rows="\n".join(rows),
        numel=f"{numel / 1e9:.1f}",
        model=_gb(model),
        full_tensor=_gb(float(job.gathered.mean())),
        full_tensor_less=f"{1 - received / float(job.gathered.mean()):.1%}",
        needed=_gb(needed),
        held=_gb(held),
        network=_gb(float(job.received_by_host.mean())),
        seconds=f"{job.seconds.max():.2f}",
        training=_gib(memory.state.total.max()),
        interleaved=_gib(memory.interleaved_switch.max()),
        host=_gib(job.host_nbytes.max()),
        keys=_options(KEYS),
        ranks=RANKS,
    )


def _job() -> JobPlan:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LLAMA_3_70B))
        return plan_job(
            load_config({"model": directory, **KEYS}, RANKS, own_weights=True), RANKS, A100
        )


def _options(sections: Mapping[str, Mapping[str, object]]) -> str:
    keys = (
        f"{name}.{key}={str(value).lower()}"
        for name, section in sections.items()
        for key, value in section.items()
    )
    return " \\\n    ".join(keys)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


_SECTION = """## A 70B model on 64 devices

Llama 3 70B ({numel} billion parameters, {model} in bfloat16) from FSDP2 in float32 to vLLM with TP=4 x PP=2, on eight
hosts of eight A100: the planner's figures, not a measurement. Bytes are the average that a device receives; the
published figures are estimates for such a job.

| | published | a gather, here | this plan | less |
|---|---|---|---|---|
{rows}

Weights are gathered in bfloat16; `full_tensor()` of every parameter, as in verl and TRL, gathers float32:
{full_tensor}, of which this plan saves {full_tensor_less}. Optimizer state and gradients, both in float32, go to the
memory of their host and back ({host} on each host).

A device needs {needed} of weights in vLLM, holds {held} of them in training, and receives the difference. {network}
cross the network to each host, once. The slowest device is busy for {seconds} s at the rates below. A device holds
{training} of training state; a switch takes at most {interleaved}.

```
hybrid-engine plan model=DIR {keys} \\
    --ranks {ranks} --device-gib 80 --link-gbps self=1000,host=250,network=22
```
"""


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
