"""Makes the last section of docs/planning.md: what a switch of a 70B model on 64 devices moves, FSDP2 to vLLM.

Run `make docs` after a change of the planner; a test compares.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hybrid_engine.advisor.cluster_plan import Cluster, JobPlan, plan_job
from hybrid_engine.config import load_config
from hybrid_engine.layouts.memory import GIB
from hybrid_engine.planning.plan import Link

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


def page() -> str:
    """Return the whole page, of which all before the section is written by hand."""
    written = PAGE.read_text()
    return written[: written.index(_SECTION.partition("\n")[0])] + section()


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
        rows.append(f"| {name} | {published} | {_gb(gather)} | {_gb(ours)} | {1 - ours / gather:.1%} |")
    held, needed, memory = float(job.bytes.own.mean()), received + float(job.bytes.own.mean()), job.memory
    return _SECTION.format(
        rows="\n".join(rows),
        numel=f"{numel / 1e9:.1f}",
        model=_gb(model),
        full_tensor=_gb(float(job.gathered.mean())),
        full_tensor_less=f"{1 - received / float(job.gathered.mean()):.1%}",
        needed=_gb(needed),
        held=_gb(held),
        received=_gb(received),
        most=_gb(float(job.bytes.received.max())),
        own_shard=_gb(model / ranks),
        bound=_gb(needed - model / ranks / 2),
        network=_gb(float(job.received_by_host.mean())),
        seconds=f"{job.seconds.max():.2f}",
        gather_seconds=f"{(model * 7 / 8 / 8) / 22e9:.2f}",
        training=_gib(memory.state.total.max()),
        params=_gib(memory.state.params.max()),
        inference=_gib(memory.inference.max()),
        switch=_gib(memory.switch.max()),
        interleaved=_gib(memory.interleaved_switch.max()),
        host=_gib(job.host_nbytes.max()),
        keys=_options(KEYS),
        ranks=RANKS,
    )


def _job() -> JobPlan:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LLAMA_3_70B))
        return plan_job(load_config({"model": directory, **KEYS}, RANKS, own_weights=True), RANKS, A100)


def _options(sections: Mapping[str, Mapping[str, object]]) -> str:
    keys = (
        f"{name}.{key}={str(value).lower()}" for name, section in sections.items() for key, value in section.items()
    )
    return " \\\n    ".join(keys)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


_SECTION = """## A 70B model on 64 devices

A switch of Llama 3 70B from FSDP2 over all ranks to vLLM with TP=4 x PP=2 (8 replicas), by the planner; nothing here
was measured. {numel} billion parameters, float32 while training, {model} of bfloat16 in vLLM; eight hosts of eight
A100. Bytes are those that one device receives, on average. The published figures are estimates for such a job: what a
gather moves, and the least that must move.

| | published | a gather, here | this plan | less |
|---|---|---|---|---|
{rows}

- *Weights*: a gather brings every device all of the model except its own 64th, here counted in bfloat16.
  `full_tensor()` of every parameter, as in verl and TRL, gathers float32 and casts then: {full_tensor}, of which this
  plan saves {full_tensor_less}.
- *Optimizer state* and *gradients* go to the memory of their own host and back. No device receives anything. A gather
  is counted in float32, two moments and one gradient.

A device computes with {needed} of weights in vLLM, an eighth of the model, and holds {held} of these in training. It
has {own_shard} of the model there, but half of the tensors belong to the other pipeline stage, and of a tensor cut
over TP its rows are often needed by another device of the host. So {received} must come to it on average, {most} at
most; the plan receives exactly that (`received` and `least` of `plan --json`). In any order of ranks at least {bound}
would have to come. Each host needs the whole model and has an eighth of it: the rest, {network}, crosses the network
once per host.

The slowest device is busy for {seconds} s at assumed rates (250 GB/s within a host, 22 GB/s over the network for each
device, 1000 GB/s within a device); the network alone takes {gather_seconds} s.

| bytes on one device | |
|---|---|
| parameters, gradients and two moments, float32 | {training} |
| of these parameters | {params} |
| vLLM's weights | {inference} |
| peak of a switch if all of vLLM's weights wake at once | {switch} |
| peak here, where they come bucket by bucket | {interleaved} |
| memory of a host for what leaves its eight devices | {host} |

```
hybrid-engine plan model=DIR {keys} \\
    --ranks {ranks} --device-gib 80 --link-gbps self=1000,host=250,network=22
```
"""


if __name__ == "__main__":
    PAGE.write_text(page())
