"""Group "cpu": megatron-core on CPU tensors and gloo, without CUDA or apex.

Applied together with group "without_te".

Covers everything that `GPTModel` with the local layer spec needs to train: dense and MoE, TP, PP,
VPP, EP, sequence parallel, both optimizers, fp32 and bf16. The caller passes
``use_cpu_initialization=True`` and turns fusions off. Gloo (torch 2.13) supports every collective
that megatron calls, coalesced and in bf16 also, except gathers and scatters of uneven parts (MoE
with tp > 1). `cuda_names` builds these from others.

Features that depend on CUDA raise CpuUnsupportedError: CUDA graphs, fp8, megatron's own CPU
offloading.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_patches.cpu import cuda_names
from megatron_patches.errors import CpuUnsupportedError
from megatron_patches.patch import Function, Patch, around

_CORE = "megatron.core"
_ALWAYS = "megatron-core selects its device instead of naming CUDA"


def _cpu_patch(
    name: str, target: str, reason: str, build: Callable[[Any], Any], **more: Any
) -> Patch:
    options = {"remove_when": _ALWAYS, **more}
    return Patch(f"cpu.{name}", "cpu", target, reason, build=build, **options)


@around
def _get_rng_state(
    original: Function, device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    """Return the CPU generator's state."""
    _refuse_graph_safe(graph_safe)
    return torch.get_rng_state()


@around
def _set_rng_state(
    original: Function, new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False
) -> None:
    """Set the CPU generator's state."""
    _refuse_graph_safe(graph_safe)
    torch.set_rng_state(new_state)


def _refuse_graph_safe(graph_safe: bool) -> None:
    if graph_safe:
        raise CpuUnsupportedError(
            "a graph-safe RNG state requires CUDA graphs; turn use_cudagraphable_rng off on CPU"
        )


@around
def _no_nccl_options(original: Function, pg_name: str, nccl_comm_cfgs: dict[str, Any]) -> None:
    """Return None, because gloo has none of NCCL's options."""


@around
def _new_norm(
    original: Callable[..., torch.nn.Module], cls: type, config: Any, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    if not config.sequence_parallel:
        return original(cls, config, *args, **kwargs)
    # The original refuses sequence parallel. Build the norm without it, then mark its parameters
    # as Megatron marks norms.
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = original(cls, plain, *args, **kwargs)
    parameters: Iterator[Any] = norm.parameters()
    for parameter in parameters:
        parameter.sequence_parallel = True
    return norm


@around
def _move_to_cpu(
    original: Function, tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@around
def _keep_output_while_sent(
    original: Function, out: Any, deallocate_pipeline_outputs: bool = False
) -> None:
    # The original calls this function for each output in a list or a dict.
    if isinstance(out, torch.Tensor) and deallocate_pipeline_outputs:
        sent: Any = out
        # Keeps the memory that `out` drops and gloo still reads.
        sent.kept_for_sending = out.data
    original(out, deallocate_pipeline_outputs)


_CUDA_SPELLED = (
    "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    "optimizer.optimizer:MegatronOptimizer.restore_from_cpu",
    "optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    "optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
    "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    "optimizer.grad_scaler:DynamicGradScaler.load_state_dict",
    "models.common.language_module.language_module"
    ":LanguageModule.setup_embeddings_and_output_layer",
    "models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
    "tensor_parallel.data:broadcast_data",
    "utils:check_param_hashes_across_dp_replicas",
)

_COMPILED = (
    "activations:quick_gelu",
    "activations:squared_relu",
    "activations:fast_gelu",
    "transformer.attention:Attention._apply_output_gate",
    "transformer.torch_norm:L2Norm._norm",
    "transformer.utils:erf_gelu",
    "transformer.utils:gelu_impl",
)
"""Functions that megatron-core compiles on import."""


def _spelling_patch(target: str) -> Patch:
    name = target.replace(":", ".").rsplit(".", 2)
    return _cpu_patch(
        f"spelling.{name[-2]}.{name[-1]}",
        f"{_CORE}.{target}",
        "calls tensor.cuda() or compares tensor.type() with torch.cuda names",
        cuda_names.under_cuda_spelling,
    )


PATCHES: tuple[Patch, ...] = (
    _cpu_patch(
        "torch",
        "megatron.*:torch",
        "names CUDA in torch.cuda and in factories with device='cuda'; for megatron's modules "
        "alone these are redirected to CPU",
        cuda_names.torch_on_cpu,
    ),
    _cpu_patch(
        "rng.get",
        f"{_CORE}.tensor_parallel.random:_get_cuda_rng_state",
        "reads a CUDA generator; on CPU dropout draws from the CPU generator",
        _get_rng_state,
    ),
    _cpu_patch(
        "rng.set",
        f"{_CORE}.tensor_parallel.random:_set_cuda_rng_state",
        "waits for CUDA to be initialised, which never happens on CPU",
        _set_rng_state,
    ),
    _cpu_patch(
        "nccl_options",
        f"{_CORE}.parallel_state:get_nccl_options",
        "builds ProcessGroupNCCL options, a class that a CPU torch does not have",
        _no_nccl_options,
    ),
    _cpu_patch(
        "sequence_parallel_norm",
        f"{_CORE}.transformer.torch_norm:WrappedTorchNorm.__new__",
        "refuses sequence parallel, which only needs marks on the weights, so that their gradients "
        "are summed over TP",
        _new_norm,
        remove_when="WrappedTorchNorm accepts sequence_parallel",
    ),
    _cpu_patch(
        "split_sizes",
        f"{_CORE}.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        "converts split sizes to numpy only if they are on CUDA; all_to_all_single does not accept "
        "tensors as sizes",
        _move_to_cpu,
    ),
    _cpu_patch(
        "pipeline_outputs",
        f"{_CORE}.pipeline_parallel.schedules:deallocate_output_tensor",
        "frees outputs that are still being sent: CUDA keeps their memory until then, but gloo "
        "sends the new contents",
        _keep_output_while_sent,
        remove_when="interleaved schedules wait for a send before they free the output",
    ),
    *(_spelling_patch(target) for target in _CUDA_SPELLED),
    *(
        _cpu_patch(
            f"eager.{target.replace(':', '.').rsplit('.', 1)[-1].lstrip('_')}",
            f"{_CORE}.{target}",
            "is compiled for speed on import; compiling on CPU costs minutes and a C++ compiler",
            # the function inside a ``torch.compile`` wrapper
            lambda original: getattr(original, "_torchdynamo_orig_callable", original),
            remove_when="megatron-core decides on call, not on import, whether to compile",
        )
        for target in _COMPILED
    ),
)
