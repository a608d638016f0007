"""Layouts of inference positions before an engine exists: vLLM's model without memory or peers.

    layout = layout_of_position(settings, job, tensors)     rank r traces position r; no rank waits
    ... ranks share these layouts, and assign positions to ranks ...
    InferenceEngine(settings in that order, ...)            traces its position again, with memory

vLLM makes its groups itself, but of coordinators that know the members of a group and cannot
communicate. Then it constructs the model of the position, whose loader is traced as an engine's is.
Weights are on the meta device; tensors that the constructor computes with (the experts of a rank)
are in host memory. Afterwards vLLM has no groups and keeps nothing of the model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import arguments, internals, isolation
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings, OwnDtypes
from hybrid_engine.backends.vllm.live_layers import require_positions
from hybrid_engine.backends.vllm.process_state import process_settings_kept, random_state_kept
from hybrid_engine.backends.vllm.weights.postload import is_quantised
from hybrid_engine.backends.vllm.weights.traced_model import (
    matrices_of_modules,
    trace_without_memory,
)
from hybrid_engine.backends.vllm.weights.tracing import dtypes_of
from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.errors import HybridEngineError, ModelError, StateError
from hybrid_engine.layouts.kv_cache import LayerCache
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TorchDispatchMode, torch_defaults
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.regions import Shapes

Result = TypeVar("Result")

_SEQUENTIAL = "Set generate_config.infer_rank_order to sequential"
_WITHOUT_VALUES = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


@dataclass(frozen=True)
class Position:
    """A position of vLLM's ranks in a job.

    Attributes:
        rank: its number in sequential order.
        world_size: number of ranks of the job.
        num_hosts: number of hosts of the job.
    """

    rank: int
    world_size: int
    num_hosts: int


@dataclass(frozen=True)
class PlannedPosition:
    """Weights and caches that vLLM has at a position.

    Attributes:
        layout: its weights.
        caches: what its layers cache.
        max_model_len: tokens of the longest sequence.
    """

    layout: Layout
    caches: tuple[LayerCache, ...]
    max_model_len: int


def layout_of_position(
    settings: InferenceSettings,
    job: Job,
    tensors: Shapes,
    dtypes: OwnDtypes = None,
) -> Layout:
    """Return the layout that vLLM has at the position with this rank's number, before processing.

    Not collective. Takes the time that vLLM needs to construct the model and to iterate over the
    names of a checkpoint, and host memory for rotary embeddings. The process's random state,
    environment and torch settings are restored.

    Args:
        settings: settings of an engine, in sequential order.
        job: job whose ranks take the positions.
        tensors: canonical names and shapes of the whole model.
        dtypes: canonical name -> dtype, if it differs from that of the weights
            (`ModelTable.dtypes`).

    Raises the errors of `InferenceEngine` about the settings, and ModelError or
    ParameterMismatchError for a model that cannot be constructed or traced without memory.
    """
    position = _position_of(job)
    trace = _tracer(position, settings, tensors, dtypes)
    return _read_at(position, settings, trace, _SEQUENTIAL, job)


def planned_position(
    position: Position,
    settings: InferenceSettings,
    tensors: Shapes,
    dtypes: OwnDtypes = None,
) -> PlannedPosition:
    """Return what vLLM has at a position of a job that does not run, in this process alone.

    Arguments and errors as in `layout_of_position`.

    Raises StateError if the process is a rank of a job.
    """
    if dist.is_initialized():
        raise StateError(
            "this process is a rank of a job: plan in a process without process groups",
            code="process-group-exists",
        )
    trace = _tracer(position, settings, tensors, dtypes)

    def planned(model: torch.nn.Module) -> PlannedPosition:
        return PlannedPosition(trace(model), *_kv_caches())

    store = internals.FAKE_GROUP()
    # vLLM reads its rank and the number of ranks from the default group.
    dist.init_process_group("fake", rank=position.rank, world_size=position.world_size, store=store)
    try:
        return _read_at(
            position,
            settings,
            planned,
            "Compare its config.json with the published one; else it cannot be planned",
        )
    finally:
        dist.destroy_process_group()


def quantised_at_position(
    settings: InferenceSettings,
    job: Job,
    tensors: Shapes,
    dtypes: OwnDtypes,
) -> list[list[str]]:
    """Return the weights that vLLM holds in 8 or 4 bits at this rank's position, as far as fused.

    These are the layers that its method quantises: the model and its config decide, not names. An
    unquantised model of the same position shows which weights are loaded into these layers. Like
    `layout_of_position` otherwise, also in its arguments and errors.
    """
    torch_dtypes = dtypes_of(tensors, getattr(torch, settings.dtype), dtypes)
    position = _position_of(job)
    generate = settings.generate.model_copy(update={"quantization": UNQUANTISED})
    plain = replace(settings, quantization_config=None, generate=generate)

    def quantised_modules(model: torch.nn.Module) -> set[str]:
        return {name for name, module in model.named_modules() if is_quantised(module)}

    matrices = partial(matrices_of_modules, tensors=tensors, dtypes=torch_dtypes)
    remedy = "Use other parallel sizes, or set generate_config.quantization to none"
    modules = _read_at(position, settings, quantised_modules, remedy, job)
    weights = _read_at(position, plain, matrices, remedy, job)
    return [names for module in sorted(modules & weights.keys()) for names in weights[module]]


def _position_of(job: Job) -> Position:
    return Position(job.rank, job.world_size, len(set(job.hosts)))


def _tracer(
    position: Position,
    settings: InferenceSettings,
    tensors: Shapes,
    dtypes: OwnDtypes,
) -> Callable[[torch.nn.Module], Layout]:
    torch_dtypes = dtypes_of(tensors, getattr(torch, settings.dtype), dtypes)
    return partial(trace_without_memory, tensors=tensors, dtypes=torch_dtypes, rank=position.rank)


def _kv_caches() -> tuple[tuple[LayerCache, ...], int]:
    """Return the caches of the layers of vLLM's current configuration, and its `max_model_len`.

    vLLM pads states and cuts tokens into blocks, which adds less than a block to each.
    """
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    specs = internals.CACHE_SPECS
    caches = []
    for layer in config.compilation_config.static_forward_context.values():
        # Some layers have no cache, such as experts, and some use another layer's.
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(config) if hasattr(layer, "get_kv_cache_spec") else None
        if spec is None:
            continue
        if not isinstance(spec, specs.AttentionSpec):
            caches.append(LayerCache(state=spec.max_memory_usage_bytes(config)))
            continue
        window = None
        if isinstance(spec, specs.SlidingWindowSpec):
            window = spec.sliding_window
        elif isinstance(spec, specs.ChunkedLocalAttentionSpec):
            window = spec.attention_chunk_size
        caches.append(LayerCache(-(-spec.page_size_bytes // spec.block_size), window))
    return tuple(caches), config.model_config.max_model_len


def _read_at(
    position: Position,
    settings: InferenceSettings,
    read: Callable[[torch.nn.Module], Result],
    remedy: str,
    job: Job | None = None,
) -> Result:
    """Return the result of `read` of vLLM's model on the meta device, at a position.

    Args:
        remedy: remedy if the model cannot be constructed.
        job: job for which the settings are checked; None: without one.
    """
    with torch_defaults(), process_settings_kept(), random_state_kept():
        isolation.require_no_groups()
        if job is None:
            device_type = arguments.check_without_job(settings, position.rank)
        else:
            device_type = arguments.check_settings(settings, job)
        try:
            return _traced(position, settings, read, remedy, device_type)
        finally:
            gc.collect()  # a model's parameters and their loaders refer to each other


def _traced(
    position: Position,
    settings: InferenceSettings,
    read: Callable[[torch.nn.Module], Result],
    remedy: str,
    device_type: str,
) -> Result:
    # Eager, because compilation takes time and does not change the weights.
    config = arguments.engine_config(
        settings,
        position.rank,
        device_type,
        load_format="dummy",
        enforce_eager=True,
    )
    with ExitStack() as undo:
        undo.callback(isolation.destroy_groups)
        undo.enter_context(_rotary_embeddings_kept())
        try:
            undo.enter_context(_at_position(position, settings, config))
            reads = arguments.reads_of(config)
            with reads.checked():
                model = _model(config)
            undo.callback(_forget_layers, model)
            reads.require_known(model)
            require_positions(model, config.model_config.max_model_len)
            return read(model)
        except HybridEngineError:
            raise
        except Exception as error:
            if isinstance(error, AssertionError):
                remedy = (
                    "vLLM's class of the model requires that in any order of ranks: compare "
                    "config.json with the published one"
                )
            raise ModelError(
                f"vLLM cannot construct {config.model_config.architecture} without memory, which "
                f"shows the weights of each inference position: {error}. {remedy}",
                code="not-constructible",
            ) from error


def _model(config: Any) -> torch.nn.Module:
    default_dtype = internals.DEFAULT_DTYPE
    initialize_model = internals.INITIALIZE_MODEL
    with default_dtype(config.model_config.dtype), torch.device("cpu"), _WithoutWeights():
        return initialize_model(vllm_config=config, model_config=config.model_config)


class _WithoutWeights(TorchDispatchMode):
    """A dispatch mode that moves uninitialised tensors, as weights are, to the meta device.

    Tensors with values stay real, because constructors compute with them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        return func(*args, **kwargs)


# -- state that vLLM keeps in its modules ----------------------------------------------------------


def _forget_layers(model: torch.nn.Module) -> None:
    """Remove vLLM's notes on layers for reloading, which keep layers that it quantises alive."""
    notes = internals.RELOADING_NOTES
    for module in model.modules():
        notes.pop(module, None)


@contextmanager
def _at_position(position: Position, settings: InferenceSettings, config: Any) -> Iterator[None]:
    """Set vLLM's current configuration in this context, and make this position's groups.

    The groups stay until they are destroyed.
    """
    from vllm.config import set_current_vllm_config

    parallel_state = internals.PARALLEL_STATE
    seat = _seat_class(position.rank)
    sizes = settings.sizes
    with set_current_vllm_config(config), internals.MAKE_GROUP.replaced(lambda _: seat):
        parallel_state._WORLD = seat([list(range(position.world_size))])
        parallel_state._NODE_COUNT = position.num_hosts
        parallel_state.initialize_model_parallel(sizes.tensor, sizes.pipeline, backend="gloo")
        yield


def _seat_class(position: int) -> Any:
    parallel_state = internals.PARALLEL_STATE

    class Seat(parallel_state.GroupCoordinator):  # type: ignore[name-defined]
        """A coordinator of the group that contains the position; it cannot communicate."""

        def __init__(
            self,
            group_ranks: list[list[int]],
            *_: Any,
            group_name: str = "world",
            **__: Any,
        ) -> None:
            (self.ranks,) = (ranks for ranks in group_ranks if position in ranks)
            self.group_ranks = group_ranks
            self.world_size = len(self.ranks)
            self.unique_name = group_name
            self.rank = position
            self.rank_in_group = self.ranks.index(position)
            self.local_rank = 0
            self.device_index = 0
            self.device = torch.device("cpu")
            self.use_device_communicator = False
            self.use_custom_op_call = False
            self.use_cpu_custom_send_recv = False
            self.device_communicator = None
            self.mq_broadcaster = None
            # Models read its rank and its size. Without a backend any communication raises.
            group = dist.ProcessGroup(dist.HashStore(), self.rank_in_group, self.world_size)
            self.cpu_group = group
            self.device_group = group

        def destroy(self) -> None:
            """Do nothing; there is no communicator to end."""

    return Seat


@contextmanager
def _rotary_embeddings_kept() -> Iterator[None]:
    """Empty vLLM's cache of rotary embeddings in this context, and restore it at the end."""
    known = internals.ROPES
    before = dict(known)
    known.clear()
    try:
        yield
    finally:
        known.clear()
        known.update(before)
