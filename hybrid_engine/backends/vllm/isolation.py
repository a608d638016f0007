"""Builds vLLM in a process, on process groups and on a host that belong to somebody else.

vLLM counts ranks in order: instance, replica, stage, shard. Another order is applied where it makes its groups
(`building_groups`): the numbers in the lists it computes are positions, and each is replaced by the global rank that
takes the position. All else vLLM derives from its groups, but for the data parallel rank, which comes from RANK in the
environment. Where vLLM only makes a configuration, `rank_in_instance` is enough.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.errors import ConfigError, StateError, UnknownModelError, Violation
from hybrid_engine.messages import decode, encode
from hybrid_engine.ranks.groups import told_by
from hybrid_engine.ranks.job import Job


def set_environment(settings: InferenceSettings, rank: int) -> None:
    """Set what vLLM reads from the environment, where the user has not: call before vLLM is first imported."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(settings.sizes.world_size),
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def check_world(settings: InferenceSettings, job: Job) -> None:
    """Raise ConfigError unless the job has the size that the settings need, and vLLM would find its rank."""
    violations = []
    sizes = settings.sizes
    if sizes.world_size != job.world_size:
        key = "infer_tensor_parallel_size x infer_pipeline_parallel_size x replicas"
        product = f"{sizes.tensor} x {sizes.pipeline} x {sizes.data} = {sizes.world_size}"
        remedy = "Let their product be the number of ranks (InferenceParallelism.world_size)"
        violations.append(Violation(key, f"{product}, but the job has {job.world_size} ranks", remedy))
    if os.environ.get("RANK", str(job.rank)) != str(job.rank):
        problem = f"{os.environ['RANK']}, but this is rank {job.rank} of {job.world_size} in the process group"
        violations.append(Violation("RANK", problem, f"Launch with torchrun, or set it to {job.rank}"))
    order = sizes.ranks.ravel().tolist()
    if order != sorted(order) and not can_list_ranks(dist.new_group):
        problem = f"the ranks are listed as {order}, and this torch's new_group sorts them"
        remedy = "Set generate_config.infer_rank_order: sequential, or install torch 2.13"
        violations.append(Violation("infer_rank_order", problem, remedy))
    if not job.world.is_default:
        remedy = "Join the job without a world of its own, in torch's default process group"
        violations.append(Violation("Job.join(world=...)", "vLLM's groups are of the default group's ranks", remedy))
    if violations:
        raise ConfigError(violations)


def register_model_class(model_dir: str) -> None:
    """Register the model's class itself: by name, vLLM would import itself again in a subprocess to look at it.

    Raises ConfigError without a config.json and UnknownModelError when vLLM has no such architecture.
    """
    from vllm import ModelRegistry

    path = Path(model_dir, "config.json")
    if not path.is_file():
        problem = f"{model_dir} has no config.json"
        raise ConfigError([Violation("model_dir", problem, "Give a directory with the Hugging Face config")])
    architectures = json.loads(path.read_text()).get("architectures") or []
    known = [name for name in architectures if name in ModelRegistry.models]
    if not known:
        raise UnknownModelError(
            f"{path}: this vLLM has no model for architectures {architectures}; it names "
            "them as transformers does, e.g. LlamaForCausalLM"
        )
    for name in known:
        registered = ModelRegistry.models[name]
        if hasattr(registered, "module_name"):
            ModelRegistry.register_model(name, registered.load_model_cls())


def forget_models() -> None:
    """Drop what vLLM remembers of models by their address in memory, where another model may come to lie.

    Call it whenever a model was freed or a new one was made: a stage of a pipeline would take the layers that a former
    model lacked for its own.
    """
    internals.MISSING_LAYERS.load().clear()


def forget_import_frames() -> None:
    """Let go of the frames that errors hold which vLLM's modules have kept since they were imported.

    A module keeps the error of an import of its own that failed (that of torchcodec, say). The error holds the frames
    of all who led to that import, with whatever their variables refer to: the trainer, the engine.
    """
    for each in gc.get_objects():
        if issubclass(type(each), BaseException) and any(map(_is_vllm_module, _frames_of(each))):
            each.__traceback__ = None


def _is_vllm_module(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").partition(".")[0] == "vllm"


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frame where it was caught, and its callers."""
    frame = error.__traceback__.tb_frame if error.__traceback__ is not None else None
    while frame is not None:
        yield frame
        frame = frame.f_back


def require_no_groups() -> None:
    """Raise StateError where vLLM has process groups in this process already: it has room for one engine's."""
    if internals.PARALLEL_STATE.load()._WORLD is not None:
        raise StateError("vLLM runs in this process already: shut down the engine or the worker that has it first")


def destroy_groups() -> None:
    """End vLLM's process groups; its own way of doing this also ends the default group, which is the caller's."""
    forget_models()
    internals.DISABLE_ENVS_CACHE.load()()
    parallel_state = internals.PARALLEL_STATE.load()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None


# -- places in groups -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rank_in_instance(settings: InferenceSettings, rank: int) -> Iterator[None]:
    """Within this context RANK is what vLLM takes it for, a number within one instance, of which there may be several.

    Needed wherever vLLM makes groups or a configuration.
    """
    position = settings.sizes.place_of(rank).position % settings.sizes.ranks_per_instance
    with _in_environment(RANK=str(position)):
        yield


@contextlib.contextmanager
def _in_environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def building_groups(settings: InferenceSettings, job: Job) -> Iterator[None]:
    """Within this context vLLM's groups are those of this rank's place, and keep their order afterwards; its
    device is the job's."""
    # vLLM takes the GPU of this number, which need not be torchrun's: a process may see its own GPU only
    device = {} if job.device.index is None else {"LOCAL_RANK": str(job.device.index)}
    order = settings.sizes.ranks.ravel().tolist()

    def build(make_group: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_group)
        def make_ordered_group(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            kwargs["use_message_queue_broadcaster"] = False  # 24 MiB of shared memory each; see cpu/shm_cleanup.py
            with internals.NEW_GROUP.replaced(group_in_listed_order):
                group = make_group([[order[position] for position in group] for group in group_ranks], *args, **kwargs)
            if group.rank_in_group != dist.get_rank(group.device_group):
                raise StateError(
                    f"vLLM's group of ranks {group.ranks} is a process group in another order: rank_order needs groups "
                    "that new_group made: unset VLLM_DISTRIBUTED_USE_SPLIT_GROUP, or set "
                    "generate_config.infer_rank_order: sequential"
                )
            return group

        return make_ordered_group

    with (
        rank_in_instance(settings, job.rank),
        _in_environment(**device),
        internals.MAKE_GROUP.replaced(build),
        internals.REGISTER_GRAPH_BUFFERS.replaced(lambda original: register_graph_buffers),
    ):
        yield


def can_list_ranks(new_group: Callable[..., Any]) -> bool:
    """Whether torch's `new_group` can be told not to sort ranks; torch 2.11's cannot."""
    return "sort_ranks" in inspect.signature(new_group).parameters


def group_in_listed_order(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """torch's `new_group`, told not to sort the ranks, where it can be told; elsewhere they are listed in order."""
    return functools.partial(new_group, sort_ranks=False) if can_list_ranks(new_group) else new_group


def register_graph_buffers(communicator: Any) -> None:
    """Tell vLLM's custom all-reduce, for each rank of its group in the group's order, what captured graphs reduce.

    Collective. On CUDA, at the end of each graph's capture.
    """
    ops = internals.CUSTOM_OPS.load()
    ranks = dist.get_process_group_ranks(communicator.group)
    own = encode(ops.get_graph_buffer_ipc_meta(communicator._ptr))
    # one after the other, on the CPU: nothing is gathered while graphs are captured
    told = [decode(told_by(rank, own, communicator.group), tuple[list[int], list[int]]) for rank in ranks]
    handles, offsets = zip(*told, strict=True)
    ops.register_graph_buffers(communicator._ptr, list(handles), list(offsets))
