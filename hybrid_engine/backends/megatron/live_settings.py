"""What a Megatron model that somebody else has built says of itself, and whether it can be driven."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model

from hybrid_engine.errors import Violation
from hybrid_engine.layouts.parallelism import TrainParallelism, sizes_of
from megatron_patches.errors import UnsupportedOptimizerError
from megatron_patches.optimizers import optimizer_members

_GROUPS = {
    "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size,
    "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size,
    "context_parallel_size": parallel_state.get_context_parallel_world_size,
    "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size,
    "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size,
}
"""Keys of `actor_config` whose value is the size of a group."""

_OF_DDP = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def unusable_chunks(chunks: Sequence[Any], optimizer: Any) -> Iterator[Violation]:
    """Arguments that are not a Megatron model in DDP, and optimizers that cannot be driven."""
    if not chunks:
        yield Violation("model_chunks", "is empty", "Pass the model chunks of this rank")
    for index, chunk in enumerate(chunks):
        key, kind = f"model_chunks[{index}]", type(chunk).__name__
        inside = unwrap_model(chunk) if isinstance(chunk, torch.nn.Module) else chunk
        if not isinstance(inside, LanguageModule):
            remedy = "Pass a GPTModel or HybridModel of megatron-core, wrapped in its DistributedDataParallel"
            yield Violation(key, f"is a {kind} around a {type(inside).__name__}", remedy)
        elif optimizer is not None and not isinstance(chunk, DistributedDataParallel):
            remedy = "Wrap it in megatron.core.distributed.DistributedDataParallel, or pass optimizer=None to read only"
            yield Violation(key, f"is a {kind} without DDP, and there is an optimizer", remedy)
    if not parallel_state.model_parallel_is_initialized():
        remedy = "Call megatron.core.parallel_state.initialize_model_parallel() first"
        yield Violation("model_chunks", "Megatron has no process groups", remedy)
    if optimizer is not None:
        try:
            optimizer_members(optimizer)
        except UnsupportedOptimizerError as error:
            yield Violation("optimizer", str(error), "Make it with megatron.core.optimizer.get_megatron_optimizer()")


def in_ddp(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether all are wrapped in Megatron's DDP."""
    return all(isinstance(chunk, DistributedDataParallel) for chunk in chunks)


def world_size() -> int:
    """Number of ranks."""
    return torch.distributed.get_world_size()


def config_of(chunk: torch.nn.Module) -> TransformerConfig:
    """Megatron's configuration of the model."""
    config: TransformerConfig = unwrap_model(chunk).config
    return config


def own_class(chunk: torch.nn.Module) -> str | None:
    """The class of the model where it is none of megatron-core's."""
    kind = type(unwrap_model(chunk))
    return None if kind.__module__.startswith("megatron.core.") else f"{kind.__module__}.{kind.__qualname__}"


def actor_values(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """`actor_config` as these chunks and Megatron's process groups have it."""
    model, config = unwrap_model(chunks[0]), config_of(chunks[0])
    values = {size.key: getattr(config, size.model, size.default) for size in sizes_of(TrainParallelism) if size.model}
    values |= {key: size_of_group() for key, size_of_group in _GROUPS.items()}
    if config.num_moe_experts is None:
        values["expert_tensor_parallel_size"] = None
    layout = values["pipeline_model_parallel_layout"]
    values["pipeline_model_parallel_layout"] = None if layout is None else str(layout)
    has_own_count = layout is None and len(chunks) > 1
    values["virtual_pipeline_model_parallel_size"] = len(chunks) if has_own_count else None
    values["hybrid_layer_pattern"] = getattr(model, "hybrid_layer_pattern", None)
    values["sequence_parallel"] = config.sequence_parallel
    values["params_dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    ddp = getattr(chunks[0], "ddp_config", None)
    return values | {name: getattr(ddp, name) for name in _OF_DDP if ddp is not None}


def model_arguments(chunk: torch.nn.Module) -> Namespace:
    """What the model was built with beside its configuration, by the names of Megatron's arguments."""
    model = unwrap_model(chunk)
    return Namespace(
        position_embedding_type=model.position_embedding_type,
        max_position_embeddings=model.max_sequence_length,
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
        mtp_num_layers=model.config.mtp_num_layers,
        rotary_frequencies=rotary_frequencies(model),
        hybrid_layer_pattern=getattr(model, "hybrid_layer_pattern", None),
        padded_vocab_size=model.vocab_size,
    )


def rotary_frequencies(model: Any) -> torch.Tensor | None:
    """In radians per token, as the next forward pass will use them; None where a model has none that can be read."""
    rotary = getattr(model, "rotary_pos_emb", None)
    # the angles of the second token: interpolation is not in `inv_freq`
    return rotary.get_freqs_non_repeated(2)[1] if isinstance(rotary, RotaryEmbedding) else None
