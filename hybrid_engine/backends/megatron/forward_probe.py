"""Forward passes of any Megatron model that leave no trace (port `Probed`); and vLLM's vocabulary for all others.

Probes need its chunks, their process groups and Megatron's own schedule, whoever trains it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.megatron_config import described_config
from hybrid_engine.models.table import ModelTable
from hybrid_engine.probes import ProbeAnswer, ProbeLimits, attributes_set, following_log_probs
from megatron_patches.review import FUNCTION_FIELDS, UNREAD_BY_LATENT_ATTENTION

_SILENT = ("timers", "param_sync_func", "grad_sync_func", "no_sync_func")
"""Fields of the configuration by which a schedule calls the training loop's own machinery."""


def probe_limits(chunks: Sequence[torch.nn.Module], table: ModelTable) -> ProbeLimits:
    model = unwrap_model(chunks[0])
    config, refusal = model.config, ""
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        refusal = f"the trainer splits sequences over {size} context parallel ranks"
    return ProbeLimits(
        refusal,
        model.max_sequence_length if model.position_embedding_type == "learned_absolute" else None,
        config.tensor_model_parallel_size if config.sequence_parallel else 1,
        table.dims.vocab_size,
    )


@torch.no_grad()
def probe(chunks: Sequence[torch.nn.Module], vocab_size: int, tokens: torch.Tensor) -> ProbeAnswer:
    """Log-probabilities of `tokens` [B, L] on every pipeline stage; all data parallel ranks compute all. Collective."""
    rows = [row[None] for row in tokens.to(model_device())]
    # an interleaved schedule wants a multiple of the stages: rows come again, and what they give is left out
    rows *= -(-parallel_state.get_pipeline_model_parallel_world_size() // len(rows)) if len(chunks) > 1 else 1
    models = unwrap_model(list(chunks))
    with _as_for_reading(chunks, models):
        found = get_forward_backward_func()(
            forward_step_func=_forward_step(models, vocab_size),
            data_iterator=[iter(rows) for _ in chunks] if len(chunks) > 1 else iter(rows),
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(rows),
            seq_length=tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    shape = (tokens.shape[0], tokens.shape[1] - 1)
    dtype = next(models[0].parameters()).dtype
    return ProbeAnswer(from_last_stage([each["log_probs"] for each in found][: len(tokens)], shape).cpu(), dtype)


def _forward_step(
    models: Sequence[torch.nn.Module], vocab_size: int
) -> Callable[[Iterator[torch.Tensor], torch.nn.Module], Any]:
    needs_mask = not masks_by_itself(models)

    def forward_step(iterator: Iterator[torch.Tensor], chunk: torch.nn.Module) -> Any:
        tokens, model = next(iterator), unwrap_model(chunk)

        def result(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            is_split = output.shape[-1] < model.vocab_size
            logits = gather_from_tensor_model_parallel_region(output) if is_split else output
            log_probs = following_log_probs(logits, tokens, vocab_size)
            return log_probs.sum(), {"log_probs": log_probs}

        positions, mask = causal_inputs(tokens)
        return chunk(
            input_ids=tokens, position_ids=positions, attention_mask=mask if needs_mask else None, labels=None
        ), result

    return forward_step


def hide_padding(chunks: Sequence[torch.nn.Module], vocab_size: int) -> None:
    """From now on tokens that pad the vocabulary have probability 0, as in vLLM: their logits are -inf, or left out of
    those that were gathered."""

    def hook(layer: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = outputs
        local_size = layer.output_size_per_partition
        if logits.shape[-1] != local_size:  # gathered, which autograd lets nobody write to
            return logits[..., :vocab_size], bias
        num_real = max(0, vocab_size - parallel_state.get_tensor_model_parallel_rank() * local_size)
        if num_real < local_size:
            logits[..., num_real:] = float("-inf")
        return logits, bias

    for model in unwrap_model(list(chunks)):
        if model.post_process:
            model.output_layer.register_forward_hook(hook)


@contextlib.contextmanager
def _as_for_reading(chunks: Sequence[torch.nn.Module], models: Sequence[Any]) -> Iterator[None]:
    """No dropout, no losses beside the decoder's, no part of the training loop; all flags are back afterwards."""
    modules = (module for chunk in chunks for module in chunk.modules())
    silent = attributes_set(_configs_of(models), **dict.fromkeys(_SILENT))
    with attributes_set(modules, training=False), silent, without_multi_token_prediction(models):
        yield


@contextlib.contextmanager
def without_multi_token_prediction(models: Sequence[Any]) -> Iterator[None]:
    """Run the decoder alone: the MTP layers only serve a loss, and Megatron cannot run them without labels."""
    with attributes_set(_configs_of(models), mtp_num_layers=None), attributes_set(models, mtp_process=False):
        yield


def _configs_of(models: Sequence[Any]) -> list[Any]:
    """Megatron's scripts make one for each chunk."""
    return list({id(model.config): model.config for model in models}.values())


def from_last_stage(
    parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`parts`, which only the last pipeline stage has, joined along dim 0 to this shape, on every stage."""
    empty = torch.empty(tuple(shape), dtype=dtype, device=model_device())
    result = torch.cat(list(parts)).contiguous() if parts else empty
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return result
    torch.distributed.broadcast(
        result,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return result


def own_settings(config: Any, table: ModelTable) -> Mapping[str, Any]:
    """Fields of Megatron's configuration that change what is computed, and are not what the table asks for."""
    described = described_config(table)
    unread = UNREAD_BY_LATENT_ATTENTION if config.multi_latent_attention else ()
    return {
        f"TransformerConfig.{name}": value
        for name in FUNCTION_FIELDS
        if name not in unread
        and isinstance(value := getattr(config, name, None), bool | int | float | str)
        and value != getattr(described, name, None)
    }


def model_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def causal_inputs(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For tokens [B, S]: position ids [B, S], and the attention mask [1, 1, S, S], True where a token may not look."""
    length, device = tokens.shape[1], tokens.device
    return torch.arange(length, device=device).expand_as(tokens), causal_mask(length, device)


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """[1, 1, length, length], True where a token (dim 2) may not look (dim 3)."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]


def core_attentions(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The parts of these chunks that mask."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [module.core_attention for module in modules if isinstance(module, Attention)]


def masks_by_itself(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether attention is Transformer Engine's, which is causal without a mask."""
    modules = core_attentions(chunks) or [module for chunk in chunks for module in chunk.modules()]
    return any(map(is_of_transformer_engine, modules))


def is_of_transformer_engine(module: torch.nn.Module) -> bool:
    """By name: without the package its classes cannot be asked for."""
    return any("transformer_engine" in each.__module__ for each in type(module).__mro__)
