"""vLLM's models in any of its layouts, without an engine around them: groups, models, native loads, on real ranks.

A case is a model of the zoo with changes, in the groups of some settings. Nothing is computed, so a launch
goes through dozens of cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceSettings, VllmAdaptor
from hybrid_engine.backends.vllm.arguments import llm_arguments
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN, unnamed_shared_memory
from hybrid_engine.backends.vllm.process.group_placement import building_groups
from hybrid_engine.backends.vllm.process.isolation import destroy_groups, register_model_class, set_environment
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.differences import differences
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.regions import Region
from tests.hybrid_engine.backends.vllm import support
from tests.zoo.families import served_config

IN_PLACE = ("qwen3", "qwen3_moe", "deepseek_v3")


@dataclass(frozen=True)
class Case:
    """One model in one layout.

    Attributes:
        family: of `SERVED_VARIANTS`; `config`: keys of it that change.
        tp, pp, dp, ep: sizes; `order`: position -> rank.
    """

    family: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    order: tuple[int, ...] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.family} {dict(self.config) or ''} {self.layout}".replace("  ", " ")

    @property
    def model(self) -> dict[str, Any]:
        return served_config(self.family, **self.config)

    @property
    def is_in_place(self) -> bool:
        """Whether it is filled in place too: experts, MLA, and neither, each once."""
        return self.layout == "tp2 pp1 dp1 ep1" and self.family in IN_PLACE

    def is_reordered(self, other: Case) -> bool:
        """Whether `other` is this case in another order than the sequential one."""
        return self.order is None and replace(other, order=None) == self

    def settings(self, model_dir: str) -> InferenceSettings:
        return InferenceSettings(
            model_dir,
            InferenceParallelism(self.tp * self.pp * self.dp, self.tp, self.pp, self.ep, self.order),
            GenerateConfig(max_model_len=64, max_num_seqs=8),
        )

    @property
    def layout(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp} ep{self.ep} {self.order or ''}".strip()


@dataclass(frozen=True)
class Outcome:
    """What one rank has of a case.

    Attributes:
        position: of the rank in vLLM's order.
        differences: parameters with other bits than vLLM loads itself.
        digests: of every parameter.
        is_ready: whether all groups are committed.
        staged: tensors that cannot be traced.
        num_tensors: canonical ones of which it holds something.
        misplaced: tensors of which the computed layout says something else than the trace.
        padding: buffer name -> intervals.
        unread: canonical tensors of which it holds nothing.
        renewed: where addresses had to stay, as on a GPU; of some cases.
    """

    position: int
    differences: list[str]
    digests: dict[str, str]
    is_ready: bool
    staged: tuple[str, ...]
    num_tensors: int
    misplaced: list[str]
    padding: dict[str, list[tuple[int, int]]]
    unread: frozenset[str]
    renewed: Renewed | None


@dataclass(frozen=True)
class Renewed:
    """What a model computes with after two fills in place.

    Attributes:
        derived: tensors that vLLM made of weights.
        moved: tensors that are not where they were.
        differences: those with other bits than after a load of vLLM's own.
    """

    derived: list[str]
    moved: list[str]
    differences: list[str]


@dataclass
class Host:
    """What `native_parameters` needs of an engine."""

    settings: InferenceSettings
    rank: int
    adaptor: VllmAdaptor | None = None


@contextlib.contextmanager
def vllm_groups(settings: InferenceSettings) -> Iterator[Host]:
    """vLLM's process groups of these settings, made as its worker makes them."""
    rank = dist.get_rank()
    set_environment(settings, rank)
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    register_model_class(settings.model_dir)
    arguments = llm_arguments(settings, "cpu")
    del arguments["worker_cls"], arguments["load_format"]
    job = Job.join(120)
    try:
        with unnamed_shared_memory(job.agreement), building_groups(settings, job):
            config = EngineArgs(**arguments).create_engine_config()
            os.environ["VLLM_DIST_IDENT"] = os.environ[ENGINE_TOKEN]
            with set_current_vllm_config(config):
                parallel_state.init_distributed_environment(dist.get_world_size(), rank, "env://", rank, "gloo")
                parallel_state.initialize_model_parallel(settings.sizes.tensor, settings.sizes.pipeline)
        yield Host(settings, rank)
    finally:
        destroy_groups()
        job.close()


def run_cases(directory: str, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Cases of one layout, each filled by records and compared with vLLM's own load of the same checkpoint; by name."""
    if not dist.is_initialized():  # the next layout's on the same ranks finds it
        dist.init_process_group("gloo")
    base = Path(directory)
    # With experts, so that vLLM makes a group for them; 12 heads are a multiple of every size here.
    host_config = served_config("qwen3_moe", num_attention_heads=12, num_key_value_heads=12)
    host_model = support.write_config(base / "host", host_config)
    with vllm_groups(cases[0].settings(host_model)) as host:
        results = {case.name: _outcome_of(case, host, base / case.name.replace("/", "-")) for case in cases}
    dist.barrier()
    return results


def _outcome_of(case: Case, host: Host, directory: Path) -> Outcome:
    weights = support.random_weights(case.model, seed=0)
    checkpoint = support.write_checkpoint(directory, case.model, weights)
    adaptor = host.adaptor = support.adaptor_of(host, checkpoint, case.model)
    filled = support.fill_by_records(adaptor, weights)
    layout = adaptor.layout()
    return Outcome(
        position=host.settings.sizes.place_of(host.rank).position,
        differences=support.differences(filled, support.native_parameters(host, checkpoint)),
        digests={name: _digest(tensor) for name, tensor in filled.items()},
        is_ready=support.is_ready(adaptor),
        staged=adaptor.staged,
        num_tensors=len(_regions(layout)),
        misplaced=_analytic_faults(case, host, layout),
        padding={
            buffer_id.name: [(extent.start, extent.stop) for extent in buffer.padding]
            for buffer_id, buffer in layout.buffers.items()
            if buffer.padding
        },
        unread=frozenset(layout.tensors) - {shard.region.tensor for shard in layout.shards},
        renewed=_renewed_in_place(case, host, checkpoint) if case.is_in_place else None,
    )


def _renewed_in_place(case: Case, host: Host, checkpoint: str) -> Renewed:
    """Fill a model whose dense layers compute with what is loaded, as on a GPU; its experts are as on a CPU: packed."""
    from vllm.model_executor.layers import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
        patch.setattr(utils.ops, "_supports_onednn", False)
        adaptor = support.adaptor_of(host, checkpoint, case.model, keeps_addresses=True)
        before = support.held(adaptor.model)
        places = {path: (tensor.data_ptr(), tensor.stride()) for path, tensor in before.items()}
        for seed in (1, 0):
            support.write_by_records(adaptor, support.random_weights(case.model, seed))
        native = support.native_model(host, checkpoint)
    found = support.held(adaptor.model)
    return Renewed(
        derived=[path for each in adaptor._processed.derivations.values() for path in each.results],
        moved=[path for path, tensor in found.items() if places.get(path) != (tensor.data_ptr(), tensor.stride())],
        differences=support.differences(found, support.held(native)),
    )


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _analytic_faults(case: Case, host: Host, traced: Layout) -> list[str]:
    """Tensors of which the computed layout says that this rank holds something else than its loader writes."""
    computed = inference_side(table_for(case.model), host.settings.sizes).layout_of(host.rank)
    ours, theirs = _regions(computed), _regions(traced)
    return [f"{name}: computed {ours.get(name)}, traced {theirs.get(name)}" for name in differences(computed, traced)]


def _regions(layout: Layout) -> dict[str, list[Region]]:
    regions: dict[str, list[Region]] = {}
    for shard in layout.shards:
        regions.setdefault(shard.region.tensor, []).append(shard.region)
    return regions
