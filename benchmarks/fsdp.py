"""Resharding from FSDP2 to vLLM, compared with the method of verl and TRL and with a plain copy.

    python -m benchmarks.fsdp --json FILE [--runs 5] [--only TEXT]

ours          fill by the engine: from released memory to all parameters in vLLM's loader layout
full_tensor   every rank gathers each parameter whole (`DTensor.full_tensor()`), casts it, and
              passes it to vLLM's `load_weights`; packed experts are split by precomputed views, to
              the advantage of this method
floor         plain copy of the same number of elements between processes, with the same conversion

The benchmark checks that both methods write the same bits. Seconds exclude vLLM's repacking.
Training parameters are in float32, those of vLLM in bfloat16, on CPU and gloo.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.resharding.cases import MODELS
from benchmarks.resharding.floor import Floor
from benchmarks.resharding.loading import IntoLoader, timed
from benchmarks.resharding.measuring import Clock, Contender, Digests, gather, measure
from benchmarks.resharding.ours import Ours
from hybrid_engine import HybridEngine
from hybrid_engine.switch.states import State

BUDGET = 60.0
"""Seconds for all runs of a contender."""


@dataclass(frozen=True)
class Case:
    """A model, its number of ranks, and the parallel sizes of vLLM."""

    model: str
    ranks: int
    infer: dict[str, int]

    @property
    def name(self) -> str:
        sizes = ",".join(
            f"{key.removesuffix('_size')}={value}" for key, value in self.infer.items()
        )
        return f"{self.model}: fsdp={self.ranks} -> {sizes} on {self.ranks}"


CASES = (
    Case("qwen2.5-0.5b", 2, {"tp_size": 2}),
    Case("qwen2.5-0.5b", 4, {"tp_size": 2, "dp_size": 2}),
    Case("qwen3-moe-2304", 2, {"tp_size": 2}),
)
TINY_CASE = Case("tiny", 2, {"tp_size": 2})
"""For tests of the script: `--only tiny`."""


class FullTensor(IntoLoader):
    """Gathers every parameter whole on every rank, one after the other."""

    def __init__(self, engine: HybridEngine) -> None:
        super().__init__(engine)
        weights = engine.train.weights
        self._tensors = weights.tensors.tensors
        self._views: dict[str, list[str]] = {name: [] for name in self._tensors}
        for name, packed in weights.packed.items():
            self._views[packed.parameter].append(name)
        self._packed = weights.packed

    def run(self, clock: Clock) -> None:
        self._target.allocate(clock)
        with clock.phase("load_weights"):
            self._target.load(timed(self._weights(), clock, "full_tensor"))
        self._target.commit(clock)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, names in self._views.items():
            tensor: Any = self._tensors[parameter].detach()
            # parameters that FSDP2 does not shard are plain tensors
            if hasattr(tensor, "full_tensor"):
                tensor = tensor.full_tensor()
            whole = tensor.to(torch.bfloat16)
            for name in names:
                view = self._packed[name].view
                yield name, whole.as_strided(view.shape, view.strides, view.offset)


def main() -> None:
    """Run the cases; print and write their figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed runs per contender (default: 5)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    rows = []
    candidates = (*CASES, TINY_CASE) if arguments.only else CASES
    cases = [case for case in candidates if arguments.only in case.name]
    if not cases:
        sys.exit(f"no case's name contains {arguments.only!r}")
    for case in cases:
        job = {**asdict(case), "runs": arguments.runs}
        rows.append(figures_of_ranks("benchmarks.fsdp", job, case.ranks, 900))
        print(rows[-1], flush=True)
    write_figures(arguments.json, rows)


def run_rank(values: dict[str, Any]) -> None:
    """Run a case on one rank; rank 0 writes its figures."""
    case = Case(values["model"], values["ranks"], values["infer"])
    engine = HybridEngine(
        model=random_model(MODELS[case.model]),
        rollout_config={**case.infer, "max_model_len": 64, "max_num_seqs": 4},
        train_config={"fsdp_config": {}},
        compress_reshard=True,
    )
    for _ in range(2):  # the first switch also plans
        report = engine.sharding.enter(State.INFER)
        engine.sharding.enter(State.TRAIN)
    assert report is not None
    contenders: dict[str, Contender] = {
        "ours": Ours(engine),
        "full_tensor": FullTensor(engine),
        "floor": Floor(engine, torch.float32, torch.bfloat16),
    }
    row: dict[str, Any] = {"case": case.name}
    digests: dict[str, Digests] = {}
    for name, contender in contenders.items():
        timing, digests[name] = measure(contender, values["runs"], BUDGET)
        row |= {f"{name}_seconds": timing.seconds, f"{name}_runs": timing.num_runs}
        contender.close()
    is_same = len(digests["ours"]) > 0 and digests["ours"] == digests["full_tensor"]
    row |= {
        "same_bits": all(gather(is_same)),
        "full_tensor_ratio": row["full_tensor_seconds"] / row["ours_seconds"],
        "floor_ratio": row["ours_seconds"] / row["floor_seconds"],
        "bytes_received": sum(gather(report.bytes_received)),
        "bytes_least": sum(gather(report.bytes_least)),
    }
    if dist.get_rank() == 0:
        Path(values["out"]).write_text(json.dumps(row))
    engine.shutdown()


def random_model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build a frozen transformers model with random weights of a fixed seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {key: value for key, value in config.items() if key != "torch_dtype"}
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**sizes), dtype=dtype
    )
    return model.requires_grad_(False)


if __name__ == "__main__":
    main_or_rank(main, run_rank)
