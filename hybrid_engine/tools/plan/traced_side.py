"""vLLM's side of a model without a name table, traced without memory for weights.

Each position of an instance is traced in turn: vLLM constructs its model there and reads the names
of a checkpoint. All instances are alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybrid_engine.config import HybridConfig
from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.errors import ConfigError, require_none
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import SideLayout, holdings_of
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.regions import Shapes

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.positions import PlannedPosition

_OF_EXPERT = re.compile(r"\.experts\.|\.w13_|\.w2_")
"""In the name of a parameter of vLLM's experts."""

_TRACED = (
    "expert_placement_strategy",
    "enable_prefix_caching",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
)
"""Engine arguments of `generate_config.vllm` on which places of weights, or states, depend."""


def traced_positions(
    config: HybridConfig,
    table: ModelTable,
    sizes: InferenceParallelism,
    num_hosts: int,
) -> list[PlannedPosition]:
    """Return what vLLM has at each position of an instance.

    Args:
        config: checked configuration.
        table: table of the model.
        sizes: parallel sizes, with sequential ranks.
        num_hosts: number of hosts of the job.

    Raises:
        ConfigError: vLLM is not installed or refuses the configuration, or the sizes break a rule.
        ModelError: vLLM cannot construct the model without memory.
    """
    require_none(violations(sizes, table))
    try:
        from hybrid_engine.backends.vllm import InferenceSettings, Position, planned_position
    except ImportError as error:
        raise ConfigError.of(
            "model",
            f"vLLM's own loader shows the weights of {table.architecture}: {error}",
            "Install vLLM, or name a model with a name table",
            code="needs-package",
        ) from error
    # Bytes are counted unquantised, and methods need kernels of the job's devices, as many other
    # arguments do.
    arguments = config.generate_config.vllm
    traced = {name: arguments[name] for name in _TRACED if name in arguments}
    update = {"quantization": UNQUANTISED, "vllm": traced}
    generate = config.generate_config.model_copy(update=update)
    settings = InferenceSettings(str(config.model), sizes, generate, config.served_dtype)
    return [
        planned_position(
            Position(rank, sizes.world_size, num_hosts), settings, table.shapes, table.dtypes
        )
        for rank in range(sizes.ranks_per_instance)
    ]


def traced_side(
    positions: Sequence[PlannedPosition],
    shapes: Shapes,
    sizes: InferenceParallelism,
) -> SideLayout:
    """Return vLLM's part of every tensor on all ranks.

    Args:
        positions: the positions of an instance.
        shapes: shapes of the tensors in training, which may be finer.
        sizes: parallel sizes, in any order of ranks.

    Raises:
        PlanError: tensors have other shapes in training.
    """
    # [instance, replica, pipeline, tensor] -> [instance, position] -> [position, instance]: a row
    # has the ranks that hold the same.
    by_position = sizes.ranks.reshape(-1, sizes.ranks_per_instance).T
    alike: dict[int, np.ndarray] = {}
    layouts = []
    for planned, ranks in zip(positions, by_position, strict=True):
        first = int(ranks.min())
        alike[first] = np.sort(ranks)
        layouts.append(planned.layout.refined(shapes).on(first))
    whole = Layout.merge(layouts)
    held = holdings_of(whole, sizes.world_size, alike)
    elements = np.zeros((2, sizes.world_size), dtype=np.int64)
    for buffer_id, buffer in whole.buffers.items():
        ranks = alike[buffer_id.rank]
        elements[0, ranks] += buffer.numel
        if _OF_EXPERT.search(buffer_id.name):
            elements[1, ranks] += buffer.numel
    return SideLayout(
        held.num_ranks,
        held.shapes,
        held.dtypes,
        held.placed,
        elements[0],
        elements[1],
        is_offered_all=True,
    )
