"""Checks of a model that report every reason why it cannot be read or driven.

They run before anything is changed. vLLM is built from the model's config, so the config must
describe the computation of the model:

    model.config  ->  built again by transformers, without memory  ->  compared module by module

A config that was changed after the model was built differs, and so does a model whose modules were
changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from packaging.version import Version
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from hybrid_engine.backends.fsdp.attention import settings_left_out
from hybrid_engine.backends.fsdp.internals import StridedShard, initialize_module, model_of_modules
from hybrid_engine.backends.fsdp.names import computing_modules, transformers_model
from hybrid_engine.backends.training_side import dtype_name
from hybrid_engine.compute_check.fingerprint import settings_of
from hybrid_engine.errors import (
    DependencyError,
    ModelError,
    Violation,
    Violations,
    clipped,
)
from hybrid_engine.models.derived import meta_copy_of
from hybrid_engine.ranks.torch_internals import Tensors

TESTED_TORCH = Version("2.11.0")

_OTHER_WRAPPERS = (FullyShardedDataParallel, DistributedDataParallel, DataParallel)
_READABLE_PLACEMENTS = (Shard, Replicate, StridedShard)
_CHOSEN_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Kinds of rotary scaling whose frequencies transformers chooses by the length of a sequence."""


def require_torch(version: str = torch.__version__) -> None:
    """Raise DependencyError if torch is older than the version that FSDP2 was tested with."""
    # Of the release alone, so that nightly builds of the tested version count as tested.
    if Version(version).release < TESTED_TORCH.release:
        raise DependencyError(
            f"torch {version} is installed, but sharded models were tested with {TESTED_TORCH} "
            f"and later: pip install 'torch>={TESTED_TORCH}'",
            code="torch-too-old",
        )


def require_drivable(model: torch.nn.Module, num_ranks: int) -> None:
    """Check a model that the engine shards, or one that the user has sharded over `num_ranks`.

    Raises:
        ModelError: it cannot be sharded, or it is sharded and cannot be read, on all ranks.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        require_sharded(model)
        # Ranks outside of the model's mesh would have other weights.
        used: set[int] = set()
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                used.update(parameter.device_mesh.mesh.flatten().tolist())
        if len(used) < num_ranks:
            listed = ", ".join(map(str, sorted(used)))
            raise ModelError(
                f"the model is sharded over ranks {listed} of {num_ranks}: use a mesh of all "
                "ranks; for replicas, one with the two dims (replicas, shards)",
                code="not-on-all-ranks",
            )
        return
    require_whole(model, "sharded")


def untrainable(model: torch.nn.Module) -> Violations:
    """Yield every reason why this package's trainer cannot train a model."""
    named = dict(model.named_parameters())
    trained = [name for name in named if named[name].requires_grad]
    coarse = [name for name in trained if named[name].dtype is not torch.float32]
    mixed = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "parameter_name") or len(getattr(module, "lora_embedding_A", ()))
    ]
    if not isinstance(transformers_model(model), PreTrainedModel):
        yield Violation(
            "model",
            f"is a {type(model).__name__}",
            "Pass a causal LM of transformers",
            code="wrong-value",
        )
    if any(isinstance(parameter, DTensor) for parameter in named.values()):
        yield Violation(
            "model",
            "is sharded",
            "Pass it as it was: actor_config.fsdp shards it",
            code="already-sharded",
        )
    if not trained:
        yield Violation(
            "model",
            "has no parameter that requires a gradient",
            "Pass one of get_peft_model, or of PeftModel.from_pretrained(..., is_trainable=True)",
            code="nothing-is-trained",
        )
    if coarse:
        yield Violation(
            "model",
            f"trains {len(coarse)} parameters that are not float32, first {coarse[:1]}",
            "Load it in float32, with actor_config.fsdp.mixed_precision, or train adapters, which "
            "PEFT keeps in float32",
            code="not-float32",
        )
    # FSDP gathers for the forward pass of a module, which these adapters lack.
    if mixed and len({parameter.dtype for parameter in named.values()}) > 1:
        yield Violation(
            "model",
            f"has adapters of another dtype, first {mixed[:1]}",
            "Load it in float32, or adapt linear layers alone",
            code="several-dtypes",
        )


def weights_dtype(weights: Tensors, wire_dtype: str | None) -> str:
    """Return the dtype in which a model stores its weights.

    Args:
        weights: name -> tensor; buffers are ignored.
        wire_dtype: dtype in which weights are sent, if it differs from theirs. A float32 model may
            store some of its weights in it.

    Raises:
        ModelError: there are several dtypes, so vLLM's compute dtype is ambiguous.
    """
    names_by_dtype: dict[str, list[str]] = {}
    for name, tensor in weights.items():
        if isinstance(tensor, torch.nn.Parameter):
            names_by_dtype.setdefault(dtype_name(tensor), []).append(name)
    if len(names_by_dtype) == 1:
        return next(iter(names_by_dtype))
    # Weights that are sent in bfloat16 lose nothing if some are stored in it.
    if wire_dtype is not None and names_by_dtype.keys() == {"float32", wire_dtype}:
        return "float32"
    listed = "; ".join(
        f"{len(names)} in {dtype}, first {names[0]}" for dtype, names in names_by_dtype.items()
    )
    raise ModelError(
        f"the weights have several dtypes ({listed}): convert the model by "
        "model.to(torch.float32) before it is sharded, or set compress_reshard to send both "
        "float32 and bfloat16 weights in bfloat16",
        code="several-dtypes",
    )


def require_sharded(model: torch.nn.Module) -> None:
    """Raise ModelError listing every reason why a sharded model cannot be read."""
    problems = list(_common_problems(model))
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        for name, parameter in model.named_parameters():
            if (problem := _sharding_problem(parameter)) is not None:
                problems.append(f"{name}: {problem}")
    else:
        problems.append(
            "the model is not sharded: call torch.distributed.fsdp.fully_shard on its layers and "
            "on the model"
        )
    _refuse("the sharded model cannot be read", problems)


def require_whole(model: torch.nn.Module, use: str = "read") -> None:
    """Raise ModelError listing every reason why a model that is not sharded cannot be used."""
    problems = list(_common_problems(model))
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        problems.append(
            f"{len(on_meta)} parameters are on the meta device, first {on_meta[0]}; shard the "
            "model yourself, then call to_empty and load the weights"
        )
    _refuse(f"the model cannot be {use}", problems)


def _refuse(heading: str, problems: list[str]) -> None:
    """Raise ModelError with one problem per line, if there are any; a single one needs no line."""
    if problems:
        separator = "\n  " if len(problems) > 1 else " "
        raise ModelError(separator.join([f"{heading}:", *problems]), code="unusable-model")


def _common_problems(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, _OTHER_WRAPPERS):
            wrapper = type(module).__name__
            yield (
                f"{name or 'the model'} is wrapped by {wrapper}; pass the model itself, and use "
                "fully_shard"
            )
    for name, parameter in model.named_parameters():
        # Quantized weights are stored as integers, or as floats of 8 bits.
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            dtype = dtype_name(parameter)
            yield f"{name}: stored as {dtype}; load the model without quantization"


def _sharding_problem(parameter: torch.nn.Parameter) -> str | None:
    """Return the reason why this rank's part of a parameter cannot be read, or None."""
    if not isinstance(parameter, DTensor):
        return "not sharded; call fully_shard on the whole model as well, before building an engine"
    for placement in parameter.placements:
        if not isinstance(placement, _READABLE_PLACEMENTS):
            return f"unsupported placement {type(placement).__name__}; use Shard or Replicate"
    if parameter.is_meta:
        return "on the meta device; allocate it first (to_empty), then load the weights"
    device = parameter.to_local().device.type
    if device != parameter.device_mesh.device_type:
        return f"on {device}; remove CPUOffloadPolicy, because a switch offloads parameters itself"
    if not _is_box(parameter):
        placements = tuple(parameter.placements)
        return f"ranks hold no boxes of it, placements {placements}; split it evenly over all ranks"
    return None


def _is_box(parameter: DTensor) -> bool:
    """Return whether each rank's part is one box, as `__create_chunk_list__` describes it.

    The part of a strided shard is a box if its stride, `split_factor` parts, results from the later
    mesh dims: these split the dim first (tensor parallelism), and FSDP2 split the parts again.
    """
    # Dim -> number of parts by the mesh dims after the current one. Example: on a mesh (fsdp: 2,
    # tp: 4) rows are split by tp first, and FSDP2 splits these 4 parts. Its placement has
    # split_factor 4, and each rank holds one half of one part.
    num_parts = dict.fromkeys(range(parameter.dim()), 1)
    splits = [*zip(parameter.placements, parameter.device_mesh.shape, strict=True)]
    for placement, size in reversed(splits):
        if (
            isinstance(placement, StridedShard)
            and placement.split_factor != num_parts[placement.dim]
        ):
            return False
        if isinstance(placement, (Shard, StridedShard)):
            num_parts[placement.dim] *= size
    (chunk,) = parameter.__create_chunk_list__()
    # torch computes the chunk as if the part were one box; another size shows that it is not.
    return tuple(chunk.sizes) == tuple(parameter.to_local().shape)


def require_configured(model: torch.nn.Module) -> None:
    """Check that a transformers model computes as its config describes.

    Compares numbers, flags and strings of its modules, its activations, and buffers that no
    checkpoint has, such as rotary frequencies. Its attention implementation must support every
    setting of the config. Allocates no memory for weights, and leaves the random number generators
    unchanged.

    Raises:
        ModelError: listing every difference.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        configured = meta_copy_of(model)
        # vLLM's values, not those of transformers' classes, are what the live model must have.
        set_epsilon_of_norms(configured)
        owners = model_of_modules(configured)
        modules = computing_modules(model)
        modules_by_difference: dict[str, list[str]] = {}
        for name, module in configured.named_modules():
            live = modules.get(name)
            if live is None:
                continue
            differences = [
                *_attribute_differences(live, module),
                *_buffer_differences(live, module, owners[module]),
            ]
            for difference in differences:
                modules_by_difference.setdefault(difference, []).append(name or "the model")
        implementation = getattr(model.config, "_attn_implementation", None)
        left_out = settings_left_out(configured, implementation)
    # Layers usually differ alike, so modules with the same difference share a line.
    lines = []
    for difference, names in modules_by_difference.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{names[0]}{more}: {difference} in model.config")
    for name, value in left_out.items():
        lines.append(
            f"attention by {implementation!r} leaves out {name} {value}: load the model with "
            "attn_implementation='eager', or call model.set_attn_implementation('eager')"
        )
    if lines:
        heading = (
            "the model computes otherwise than model.config says, from which vLLM is built. "
            "Set model.config to the values of the model, or build the model from it:"
        )
        raise ModelError("\n  ".join([heading, *lines]), code="differs-from-config")


def set_epsilon_of_norms(model: torch.nn.Module) -> None:
    """Give all norms the config's epsilon, as vLLM does.

    transformers gives the norms within DeepSeek's attention 1e-6, the default of their class.
    """
    epsilon = getattr(model.config, "rms_norm_eps", None)
    if epsilon is None:
        return
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            vars(module)["variance_epsilon"] = epsilon


def _attribute_differences(
    live: torch.nn.Module,
    configured: torch.nn.Module,
) -> Iterator[str]:
    """Describe differing numbers, flags and strings of two modules, and classes of activations."""
    # The config determines these; tensors and functions are compared by other checks.
    for key, value in settings_of(configured).items():
        live_value = vars(live).get(key, value)
        if live_value != value:
            yield f"{key} is {clipped(repr(live_value))}, but {clipped(repr(value))}"
    # A module without children and parameters is an activation, whose class is its function, or a
    # dropout, which does nothing in inference.
    if not any(configured.children()) and next(configured.parameters(), None) is None:
        is_same = type(live) is type(configured)
        if not is_same and not isinstance(configured, torch.nn.Dropout):
            yield f"its class is {type(live).__name__}, but {type(configured).__name__}"


def _buffer_differences(
    live: torch.nn.Module,
    configured: torch.nn.Module,
    model: torch.nn.Module,
) -> Iterator[str]:
    """Describe differing floating-point buffers of two modules.

    Args:
        live: the module of the user's model.
        configured: its counterpart on the meta device. It is given memory.
        model: transformers model that `configured` belongs to.
    """
    # A switch delivers persistent buffers, as it does weights.
    in_checkpoint = configured.state_dict(keep_vars=True).keys()
    names = [
        name
        for name, buffer in configured.named_buffers(recurse=False)
        if buffer.is_floating_point() and name not in in_checkpoint
    ]
    kinds = getattr(live, "rope_type", None)
    if _CHOSEN_BY_LENGTH.intersection(kinds.values() if isinstance(kinds, dict) else (kinds,)):
        return  # a forward pass sets them, and leaves those of its length
    # Buffers of a module with weights depend on the weights.
    if not names or next(configured.parameters(recurse=False), None) is not None:
        return
    configured.to_empty(device="cpu", recurse=False)
    for name in names:
        # NaN marks values that the initialization leaves unset.
        configured.get_buffer(name).fill_(torch.nan)
    initialize_module(model, configured)
    live_buffers = dict(live.named_buffers(recurse=False))
    for name in names:
        expected = configured.get_buffer(name)
        buffer = live_buffers.get(name)
        if buffer is None or buffer.is_meta or expected.isnan().any():
            continue
        values = buffer.detach().to("cpu", expected.dtype)
        # Relative only: high rotary frequencies are near 1, low ones near 1e-6, and both must
        # agree.
        if values.shape == expected.shape and torch.allclose(values, expected, 1e-5, 0.0):
            continue
        shown = _last_values(values)
        if buffer.dtype is not expected.dtype:
            shown += f" in {buffer.dtype}, which .to() has rounded; loading in that dtype does not"
        yield f"{name} is {shown}, but {_last_values(expected)}"


def _last_values(values: torch.Tensor) -> str:
    """Return the last three elements as text; rotary frequencies all begin with 1."""
    last = values.flatten()[-3:].tolist()
    return f"[… {', '.join(f'{value:g}' for value in last)}]"
