"""What an inference position holds, before there is an engine: vLLM's model without memory, in groups without members.

    own = layout_of_position(settings, job, tensors)        rank r traces position r; no rank waits for another
    ... ranks share these layouts, and choose who takes which position ...
    InferenceEngine(settings in that order, ...)            traces its position again, now with memory

vLLM makes its groups itself, but of coordinators that know who is in a group and cannot communicate. Then it
constructs the model of the position, and that model's loader is traced as an engine's is. Weights are on the meta
device; what the constructor computes with (which experts a rank has) is in host memory. Afterwards vLLM has no groups,
and remembers nothing of the model.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import arguments, internals, isolation
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.live_attention import require_positions
from hybrid_engine.backends.vllm.process_state import process_settings_kept, random_state_kept
from hybrid_engine.backends.vllm.weights.traced_model import trace_without_memory
from hybrid_engine.errors import HybridEngineError, ModelError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import torch_defaults
from hybrid_engine.records.layout import Layout

_DispatchMode: Any = internals.DISPATCH_MODE.load()
_WITHOUT_VALUES = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


def layout_of_position(
    settings: InferenceSettings,
    job: Job,
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str] | None = None,
) -> Layout:
    """What vLLM holds at the position with this rank's number, in loader layout.

    Not collective. Takes as long as vLLM needs to construct the model and to go through the names of a checkpoint, and
    host memory for rotary embeddings. The process's random state, environment and torch's settings are as before.

    Args:
        settings: an engine's, in sequential order.
        job: whose ranks take the positions.
        tensors: canonical names and shapes of the whole model.
        dtypes: canonical name -> dtype, where it is not that of the weights (`ModelTable.dtypes`).

    Raises what `InferenceEngine` raises about the settings, and ModelError or ParameterMismatchError for a model that
    cannot be constructed or traced without memory.
    """
    names = dict.fromkeys(tensors, settings.dtype) | dict(dtypes or {})
    torch_dtypes = {name: getattr(torch, dtype) for name, dtype in names.items()}
    with torch_defaults(), process_settings_kept(), random_state_kept():
        isolation.require_no_groups()
        device_type = arguments.check_settings(settings, job)
        try:
            return _traced(settings, job, tensors, torch_dtypes, device_type)
        finally:
            gc.collect()  # a model's parameters and their loaders refer to each other


def _traced(
    settings: InferenceSettings,
    job: Job,
    tensors: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    device_type: str,
) -> Layout:
    # nothing is compiled, of which weights know nothing
    config = arguments.engine_config(settings, job.rank, device_type, load_format="dummy", enforce_eager=True)
    with contextlib.ExitStack() as undo:
        undo.callback(isolation.destroy_groups)
        undo.enter_context(_rotary_embeddings_kept())
        try:
            undo.enter_context(_at_position(job, settings, config))
            reads = arguments.reads_of(config)
            with reads.checked():
                model = _model(config)
            undo.callback(_forget_layers, model)
            reads.require_known(model)
            require_positions(model, config.model_config.max_model_len)
            return trace_without_memory(model, tensors, dtypes, job.rank)
        except HybridEngineError:
            raise
        except Exception as error:
            raise ModelError(
                f"vLLM cannot construct {config.model_config.architecture} without memory, to see what each inference "
                f"position holds: {error}. Set generate_config.infer_rank_order to sequential"
            ) from error


def _model(config: Any) -> torch.nn.Module:
    with internals.DEFAULT_DTYPE.load()(config.model_config.dtype), torch.device("cpu"), _WithoutWeights():
        return internals.INITIALIZE_MODEL.load()(vllm_config=config, model_config=config.model_config)


class _WithoutWeights(_DispatchMode):
    """Puts tensors that are made without values on the meta device, as weights are; others are computed with."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        return func(*args, **kwargs)


# -- what vLLM keeps in its modules ------------------------------------------------------------------------------------


def _forget_layers(model: torch.nn.Module) -> None:
    """Take what vLLM notes of layers for reloading them: for layers that it quantises it would keep them for ever."""
    notes = internals.RELOADING_NOTES.load()
    for module in model.modules():
        notes.pop(module, None)


@contextlib.contextmanager
def _at_position(job: Job, settings: InferenceSettings, config: Any) -> Iterator[None]:
    """Within this context vLLM has this configuration; from here on, until they are destroyed, a position's groups."""
    from vllm.config import set_current_vllm_config

    parallel_state, seat = internals.PARALLEL_STATE.load(), _seat_class(job.rank)
    with set_current_vllm_config(config), internals.MAKE_GROUP.replaced(lambda _: seat):
        parallel_state._WORLD, parallel_state._NODE_COUNT = seat([[*range(job.world_size)]]), len(set(job.hosts))
        parallel_state.initialize_model_parallel(settings.sizes.tensor, settings.sizes.pipeline, backend="gloo")
        yield


def _seat_class(position: int) -> Any:
    parallel_state = internals.PARALLEL_STATE.load()

    class Seat(parallel_state.GroupCoordinator):  # type: ignore[name-defined]
        """A position's place in that one of some groups that it is in."""

        def __init__(self, group_ranks: list[list[int]], *_: Any, group_name: str = "world", **__: Any) -> None:
            (self.ranks,) = (ranks for ranks in group_ranks if position in ranks)
            self.group_ranks, self.world_size, self.unique_name = group_ranks, len(self.ranks), group_name
            self.rank, self.rank_in_group = position, self.ranks.index(position)
            self.local_rank, self.device_index, self.device = 0, 0, torch.device("cpu")
            self.use_device_communicator = self.use_custom_op_call = self.use_cpu_custom_send_recv = False
            self.device_communicator = self.mq_broadcaster = None
            # it has a rank and a size, which models ask for, and nothing to communicate by: whoever tries, raises
            group = dist.ProcessGroup(dist.HashStore(), self.rank_in_group, self.world_size)
            self.cpu_group = self.device_group = group

        def destroy(self) -> None:
            """There is nothing to end."""

    return Seat


@contextlib.contextmanager
def _rotary_embeddings_kept() -> Iterator[None]:
    """Within this context vLLM makes its own; afterwards it knows those from before alone."""
    known = internals.ROPES.load()
    before = dict(known)
    known.clear()
    try:
        yield
    finally:
        known.clear()
        known.update(before)
