"""Weights quantised in blocks, as published in fp8 checkpoints of DeepSeek-V3 and Qwen3.

    weight            [rows, columns]   float8_e4m3fn   w / scale, rounded to nearest
    weight_scale_inv  [ceil(rows / 128), ceil(columns / 128)]   float32
                                                        largest |w| of the block / 448

vLLM multiplies by `weight_scale_inv`. The last blocks of a dim may be smaller. Pure: this module
computes names, shapes and regions, and backends/quantised_sources.py the values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.models.packing import Shape
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.regions import Region

BLOCK_METHOD = "fp8"
"""vLLM's method, and quant_method of config.json."""

WEIGHT_DTYPE = "float8_e4m3fn"
SCALE_DTYPE = "float32"
LARGEST = 448.0
"""Largest value of `WEIGHT_DTYPE`."""

_KNOWN = {
    "quant_method": (BLOCK_METHOD,),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float"),
    "store_dtype": (None,),
}
"""Key of a quantization_config -> values that describe these weights; None: the key is absent."""

_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate", "block_sparse_moe.gate", "mlp.router")
"""Modules of a layer that choose experts. vLLM quantises some of them unless they are excluded."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Size of a block, in elements."""

    rows: int
    columns: int

    def grid(self, shape: Shape) -> Shape:
        """Return the number of blocks along each dim of a weight."""
        rows, columns = shape
        return (-(-rows // self.rows), -(-columns // self.columns))

    def touched(self, region: Region) -> Region:
        """Return the scales of all blocks that have an element in a region of a weight."""
        sizes = (self.rows, self.columns)
        bounds = zip(region.offsets, region.ends, sizes, strict=True)
        spans = [(low // size, -(-end // size)) for low, end, size in bounds]
        offsets = tuple(start for start, _ in spans)
        lengths = tuple(stop - start for start, stop in spans)
        return Region(scale_name(region.tensor), offsets, lengths)

    def weights_of(self, scales: Region, weight: str, shape: Shape) -> Region:
        """Return the region of a weight of this shape that some of its scales cover."""
        sizes = (self.rows, self.columns)
        offsets = tuple(low * size for low, size in zip(scales.offsets, sizes, strict=True))
        bounds = zip(scales.ends, sizes, shape, strict=True)
        ends = tuple(min(end * size, whole) for end, size, whole in bounds)
        lengths = tuple(end - low for low, end in zip(offsets, ends, strict=True))
        return Region(weight, offsets, lengths)


@dataclass(frozen=True, eq=False)
class BlockQuantization:
    """Canonical tensors of a model that are served in blocks.

    Attributes:
        weights: names of the quantised weights.
        blocks: size of a block.
    """

    weights: frozenset[str]
    blocks: Blocks

    def served(self, table: ModelTable) -> ModelTable:
        """Return the table with the dtypes of quantised weights, and with their scales."""
        shapes: dict[str, Shape] = {}
        dtypes = dict(table.dtypes)
        for name, shape in table.shapes.items():
            shapes[name] = shape
            if name in self.weights:
                shapes[scale_name(name)] = self.blocks.grid(shape)
                dtypes[name] = WEIGHT_DTYPE
                dtypes[scale_name(name)] = SCALE_DTYPE
        return replace(table, shapes=shapes, dtypes=dtypes)


def scale_name(weight: str) -> str:
    """Return the name of the scales of a weight in a checkpoint."""
    return f"{weight}_scale_inv"


def require_matrices(names: Collection[str], shapes: Mapping[str, Shape]) -> None:
    """Raise ConfigError naming every tensor that has no rows and columns, as fused experts."""
    violations = [
        Violation(
            "generate_config.quantization",
            f"fp8 in blocks, but {name} has shape {shapes[name]}, not rows and columns",
            "Set it to none, or list its module in modules_to_not_convert of config.json",
            code="not-a-matrix",
        )
        for name in sorted(names)
        if len(shapes[name]) != 2
    ]
    if violations:
        raise ConfigError(violations)


def block_config(hf_config: Mapping[str, Any], method: str | None) -> dict[str, Any] | None:
    """Return the quantization_config of weights that are to be sent in blocks; None if unquantised.

    Args:
        hf_config: contents of config.json.
        method: `generate_config.quantization`. Another method than `BLOCK_METHOD`, if given, takes
            precedence over config.json.

    Raises:
        ConfigError: `BLOCK_METHOD`, but config.json describes other weights.
    """
    published = hf_config.get("quantization_config")
    if method not in (None, BLOCK_METHOD):
        return None
    if not isinstance(published, Mapping):
        if method == BLOCK_METHOD and "text_config" in hf_config:
            problem = "fp8, but which layers of a model with text_config are quantised is not known"
            remedy = "Use a config.json with quantization_config, or another method"
            key = "generate_config.quantization"
            raise ConfigError([Violation(key, problem, remedy, code="other-quantization")])
        return _usual_config(hf_config) if method == BLOCK_METHOD else None
    problems = list(_problems(published))
    if not problems:
        return dict(published)
    if method is None:
        return None
    raise ConfigError(
        [
            Violation(
                "generate_config.quantization",
                f"fp8, but the model's quantization_config has {problem}",
                "Remove the quantization_config, or use another method",
                code="other-quantization",
            )
            for problem in problems
        ]
    )


def _usual_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization_config that a model without one would be published with."""
    num_layers = int(hf_config.get("num_hidden_layers") or 0)
    routers = [f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in _ROUTERS]
    return {
        "quant_method": BLOCK_METHOD,
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *routers],
    }


def blocks_in(quantization_config: Mapping[str, Any]) -> Blocks:
    """Return the size of a block, by a result of `block_config`."""
    return Blocks(*quantization_config["weight_block_size"])


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the properties of a quantization_config that are not those of this module's weights."""
    for key, known in _KNOWN.items():
        value = config.get(key)
        if value not in known:
            names = " or ".join(str(name) for name in known if name is not None)
            yield f"{key} {value!r}, not {names or 'absent'}"
    size = config.get("weight_block_size")
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(type(part) is int and part > 0 for part in size or ()):
        yield f"weight_block_size {size!r}, not two positive numbers such as [128, 128]"
