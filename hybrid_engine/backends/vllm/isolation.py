"""Isolation of vLLM in a process whose process groups and environment belong to the caller.

vLLM numbers ranks in the order instance, replica, stage, shard. Another order is applied when it
makes its groups (`building_groups`): the numbers in the lists it computes are positions, and each
is replaced by the global rank at that position. vLLM derives everything else from its groups,
except the data parallel rank, which comes from RANK in the environment. If vLLM only makes a
configuration, `rank_in_instance` is enough.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings
from hybrid_engine.backends.vllm.private_names import Function, around
from hybrid_engine.backends.vllm.version import require_vllm
from hybrid_engine.errors import (
    ConfigError,
    ModelError,
    StateError,
    Violation,
    Violations,
    require_none,
    shortened,
)
from hybrid_engine.messages import decode, encode
from hybrid_engine.ranks.groups import broadcast_bytes
from hybrid_engine.ranks.job import Job


def set_environment(settings: InferenceSettings, rank: int) -> None:
    """Set the variables that vLLM reads, unless the user has; call before vLLM's first import."""
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
        # A value that the user has set wins.
        os.environ.setdefault(key, value)


def check_world(settings: InferenceSettings, job: Job) -> None:
    """Raise ConfigError unless the job fits the settings and vLLM would read this rank's number."""
    require_none(_misfits(settings, job))


def _misfits(settings: InferenceSettings, job: Job) -> Violations:
    sizes = settings.sizes
    if sizes.world_size != job.world_size:
        product = f"{sizes.tensor} x {sizes.pipeline} x {sizes.data} = {sizes.world_size}"
        yield Violation(
            "infer_tensor_parallel_size x infer_pipeline_parallel_size x replicas",
            f"{product}, but the job has {job.world_size} ranks",
            "Let their product be the number of ranks (InferenceParallelism.world_size)",
            code="wrong-world-size",
        )
    rank = os.environ.get("RANK", str(job.rank))
    if rank != str(job.rank):
        yield Violation(
            "RANK",
            f"{rank}, but this is rank {job.rank} of {job.world_size} in the process group",
            f"Launch with torchrun, or set it to {job.rank}",
            code="wrong-rank",
        )
    order = sizes.ranks.ravel().tolist()
    if order != sorted(order) and not can_list_ranks(dist.new_group):
        yield Violation(
            "infer_rank_order",
            f"the ranks are listed as {order}, and this torch's new_group sorts them",
            "Set generate_config.infer_rank_order: sequential, or install torch 2.13",
            code="torch-sorts-ranks",
        )
    if not job.world.is_default:
        yield Violation(
            "Job.join(world=...)",
            "vLLM's groups consist of ranks of the default group",
            "Join the job without `world`, in torch's default process group",
            code="not-the-default-group",
        )


def register_model_class(model_dir: str) -> None:
    """Register the model's class with vLLM, which would inspect it in a subprocess otherwise.

    That subprocess would import all of vLLM again.

    Raises ConfigError without a config.json, for an architecture that vLLM does not have, and
    without a package that the class imports, as torchvision for images.
    """
    from vllm import ModelRegistry

    path = Path(model_dir, "config.json")
    if not path.is_file():
        raise ConfigError.of(
            "model_dir",
            f"{model_dir} has no config.json",
            "Give a directory with the Hugging Face config",
            code="no-config-json",
        )
    architectures = json.loads(path.read_text()).get("architectures") or []
    known = [name for name in architectures if name in ModelRegistry.models]
    if not known:
        raise ConfigError.of(
            "model",
            f"vLLM {require_vllm()} has no class for {shortened(architectures)}",
            "Choose a model that vLLM loads",
            code="unknown-architecture",
        )
    for name in known:
        registered = ModelRegistry.models[name]
        if hasattr(registered, "module_name"):
            try:
                model_class = registered.load_model_cls()
            except ModuleNotFoundError as error:
                raise ConfigError.of(
                    "model",
                    f"vLLM's class of {name} needs {error.name}, which is not installed",
                    f"Install {error.name} for the installed torch: docs/models.md",
                    code="needs-package",
                ) from error
            ModelRegistry.register_model(name, _with_separate_decoder(model_class))


def _with_separate_decoder(model_class: type) -> type:
    """Return a transformers-based model's class that keeps transformers' decoder class unmodified.

    vLLM makes transformers' decoder class compile itself. The trainer's decoder in the same process
    has that class: it would be called without the hooks of its module, and through attributes that
    only vLLM's decoder has. The returned class gives the decoder a separate class. Any other model
    class is returned as it is.
    """
    if not hasattr(model_class, internals.DECORATE_DECODER):
        return model_class
    decorate = getattr(model_class, internals.DECORATE_DECODER)

    def note(model: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        model.__dict__.setdefault("_decorations", []).append((cls, args, kwargs))

    # vLLM inspects the names of these parameters.
    def build(model: Any, *, vllm_config: Any, prefix: str = "") -> None:
        model_class.__init__(model, vllm_config=vllm_config, prefix=prefix)  # type: ignore[misc]
        for cls, args, kwargs in model.__dict__.pop("_decorations", ()):
            # The decoder is built already, so its constructor does nothing, and only the code that
            # decoration adds to it runs.
            attributes = {"__init__": lambda *_, **__: None, "__module__": cls.__module__}
            separate = type(cls.__name__, (cls,), attributes)
            decorate(model, separate, *args, **kwargs)
            decoders = [module for module in model.modules() if type(module) is cls]
            if not decoders:
                raise ModelError(
                    f"vLLM's {model_class.__name__} has no {cls.__name__}, which it should compile",
                    code="no-decoder",
                )
            for decoder in decoders:
                decoder.__class__ = separate
                decoder.__init__(vllm_config=vllm_config)

    attributes = {
        "__init__": build,
        "__module__": model_class.__module__,
        internals.DECORATE_DECODER: note,
    }
    return type(model_class.__name__, (model_class,), attributes)


def forget_models() -> None:
    """Clear vLLM's record of missing layers, which it keys by the memory address of a model.

    Call it whenever a model was freed or made: another model may get the address, and a pipeline
    stage would then treat layers as missing that only the former model lacked.
    """
    internals.MISSING_LAYERS.clear()


def forget_import_frames() -> None:
    """Drop the tracebacks of import errors that vLLM's modules keep.

    A module keeps the error of a failed import (torchcodec's, for example). The error holds the
    frames of all callers up to that import, with everything their variables refer to: the trainer,
    the engine.
    """
    for candidate in gc.get_objects():
        # By type: `isinstance` would call __class__ of proxies.
        if not issubclass(type(candidate), BaseException):
            continue
        if candidate.__traceback__ is None:
            continue
        # The frame in which the error was caught, and its callers.
        for frame, _ in traceback.walk_stack(candidate.__traceback__.tb_frame):
            name = frame.f_globals.get("__name__", "")
            if frame.f_code.co_name == "<module>" and name.partition(".")[0] == "vllm":
                candidate.__traceback__ = None
                break


def require_no_groups() -> None:
    """Raise StateError if vLLM has process groups in this process: it supports one engine's."""
    if internals.PARALLEL_STATE._WORLD is not None:
        raise StateError(
            "vLLM runs in this process already: "
            "shut down the engine or the worker that has it first",
            code="vllm-is-running",
        )


def destroy_groups() -> None:
    """End vLLM's process groups. vLLM's own function also ends the default group, the caller's."""
    forget_models()
    disable_envs_cache = internals.DISABLE_ENVS_CACHE
    disable_envs_cache()
    parallel_state = internals.PARALLEL_STATE
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        # Its device and CPU groups, not the default group.
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None


# -- places in groups ------------------------------------------------------------------------------


@contextlib.contextmanager
def rank_in_instance(settings: InferenceSettings, rank: int) -> Iterator[None]:
    """Set RANK, in this context, to the number within an instance, as vLLM interprets it.

    There may be several instances. Needed whenever vLLM makes groups or a configuration.
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
    """Make vLLM, in this context, build its groups for this rank's place, on the job's device.

    The groups keep their order afterwards.
    """
    # vLLM takes the GPU of this number. It may differ from torchrun's, because a process may see
    # only one GPU.
    device = {} if job.device.index is None else {"LOCAL_RANK": str(job.device.index)}
    order = settings.sizes.ranks.ravel().tolist()

    def make_ordered_group(
        make_group: Function,
        group_ranks: list[list[int]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # A queue takes 24 MiB of shared memory; see cpu/shm_cleanup.py.
        kwargs["use_message_queue_broadcaster"] = False
        ordered = [[order[position] for position in group] for group in group_ranks]
        with internals.NEW_GROUP.replaced(group_in_listed_order):
            group = make_group(ordered, *args, **kwargs)
        if group.rank_in_group != dist.get_rank(group.device_group):
            raise StateError(
                f"vLLM's group of ranks {group.ranks} is a process group in another order: "
                "rank_order needs groups that new_group made: unset "
                "VLLM_DISTRIBUTED_USE_SPLIT_GROUP, or set generate_config.infer_rank_order: "
                "sequential",
                code="wrong-group-order",
            )
        return group

    with (
        rank_in_instance(settings, job.rank),
        _in_environment(**device),
        internals.MAKE_GROUP.replaced(around(make_ordered_group)),
        internals.REGISTER_GRAPH_BUFFERS.replaced(lambda original: register_graph_buffers),
    ):
        yield


def can_list_ranks(new_group: Function) -> bool:
    """Return whether torch's `new_group` can keep the order of ranks; torch 2.11's sorts them."""
    return "sort_ranks" in inspect.signature(new_group).parameters


def group_in_listed_order(new_group: Function) -> Function:
    """Return torch's `new_group` without sorting; if it always sorts, ranks are sorted already."""
    return (
        functools.partial(new_group, sort_ranks=False) if can_list_ranks(new_group) else new_group
    )


def register_graph_buffers(communicator: Any) -> None:
    """Register the buffers of captured graphs with vLLM's custom all-reduce, in the group's order.

    Collective. vLLM calls this on CUDA, at the end of each graph's capture.
    """
    ops = internals.CUSTOM_OPS
    ranks = dist.get_process_group_ranks(communicator.group)
    message = encode(ops.get_graph_buffer_ipc_meta(communicator._ptr))
    # A broadcast per rank, on the CPU: no gather is possible while graphs are captured.
    received = [
        decode(broadcast_bytes(rank, message, communicator.group), tuple[list[int], list[int]])
        for rank in ranks
    ]
    # One list of handles and one of offsets per rank, in the group's order.
    handles, offsets = zip(*received, strict=True)
    ops.register_graph_buffers(communicator._ptr, list(handles), list(offsets))
