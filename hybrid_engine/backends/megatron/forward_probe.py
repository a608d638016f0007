"""Forward passes of any Megatron model without side effects (port `Probed`), and their helpers.

A probe needs the model's chunks, their process groups and Megatron's own schedule, but not its
trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.megatron_config import described_config
from hybrid_engine.backends.training_side import Modules
from hybrid_engine.compute_check.probes import (
    ProbeAnswer,
    ProbeLimits,
    attributes_set,
    following_log_probs,
)
from hybrid_engine.compute_check.routes import LayerRoutes, RouteWatch
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.torch_internals import TensorDict
from megatron_patches.refused_fields import FUNCTION_FIELDS, UNREAD_BY_LATENT_ATTENTION

_TRAINING_CALLBACKS = ("timers", "param_sync_func", "grad_sync_func", "no_sync_func")
"""Fields of the configuration through which a schedule calls the training loop."""


def probe_limits(chunks: Modules, table: ModelTable) -> ProbeLimits:
    """Return the token batches that `probe` accepts."""
    model = unwrap_model(chunks[0])
    config = model.config
    cp_size = parallel_state.get_context_parallel_world_size()
    refusal = ""
    if cp_size > 1:
        refusal = f"the trainer splits sequences over {cp_size} context parallel ranks"
    # Rotary embeddings have no longest sequence; learned ones have a row per position.
    has_learned_positions = model.position_embedding_type == "learned_absolute"
    return ProbeLimits(
        refusal,
        model.max_sequence_length if has_learned_positions else None,
        config.tensor_model_parallel_size if config.sequence_parallel else 1,
        table.dims.vocab_size,
    )


@torch.no_grad()
def probe(
    chunks: Modules,
    vocab_size: int,
    tokens: torch.Tensor,
    num_experts: int = 0,
) -> ProbeAnswer:
    """Return the log-probabilities of `tokens` [B, L] on every pipeline stage, and the routes.

    All data parallel ranks compute all tokens. Collective.
    """
    rows = [row[None] for row in tokens.to(model_device())]
    is_interleaved = len(chunks) > 1
    if is_interleaved:
        # An interleaved schedule requires a multiple of the number of stages: repeat rows, and drop
        # the repeated results. 2 rows in 3 stages: row 0 once more.
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        rows += islice(cycle(rows), -len(rows) % num_stages)
    models = unwrap_model(list(chunks))
    run_schedule = get_forward_backward_func()
    watch = RouteWatch(num_experts)
    modules = (module for chunk in chunks for module in chunk.modules())
    with (
        # Without dropout, additional losses and calls of the training loop.
        attributes_set(modules, training=False),
        attributes_set(_configs_of(models), **dict.fromkeys(_TRAINING_CALLBACKS)),
        without_multi_token_prediction(models),
        watch,
    ):
        results = run_schedule(
            forward_step_func=_forward_step(models, vocab_size),
            data_iterator=[iter(rows) for _ in chunks] if is_interleaved else iter(rows),
            model=list(chunks) if is_interleaved else chunks[0],
            num_microbatches=len(rows),
            seq_length=tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    log_probs = [result["log_probs"] for result in results][: len(tokens)]
    shape = (tokens.shape[0], tokens.shape[1] - 1)
    dtype = next(models[0].parameters()).dtype
    return ProbeAnswer(
        from_last_stage(log_probs, shape).cpu(), dtype, _routes(watch.routes, models, tokens)
    )


def _routes(
    calls: Sequence[LayerRoutes],
    models: Sequence[Any],
    tokens: torch.Tensor,
) -> list[LayerRoutes]:
    """Return the routes of each layer of the whole model, of this rank's part of the tokens.

    Empty with pipeline stages, which have different layers.

    Args:
        calls: routes of every call of a router: of all layers for a sequence, then for the next.
        models: this rank's chunks.
        tokens: [B, L] token ids.
    """
    num_sequences, length = tokens.shape
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 or len(calls) % num_sequences:
        return []
    numbers = torch.arange(tokens.numel()).view(num_sequences, length)
    if models[0].config.sequence_parallel:
        num_ranks = parallel_state.get_tensor_model_parallel_world_size()
        # Sequence parallel ranks route consecutive parts of each sequence, of equal lengths:
        # `ProbeLimits` makes the length a multiple of the ranks.
        numbers = numbers.chunk(num_ranks, 1)[parallel_state.get_tensor_model_parallel_rank()]
    num_layers = len(calls) // num_sequences
    layers = []
    for layer in range(num_layers):
        # Calls are s0l0 s0l1 s1l0 s1l1 for 2 sequences and 2 layers: every second one is a layer's.
        rows = calls[layer::num_layers]
        experts = torch.cat([row.experts for row in rows])
        scores = torch.cat([row.scores for row in rows if row.scores is not None])
        layers.append(LayerRoutes(experts, scores, numbers.flatten()))
    return layers


def _forward_step(
    models: Modules,
    vocab_size: int,
) -> Callable[[Iterator[torch.Tensor], torch.nn.Module], Any]:
    needs_mask = not masks_by_itself(models)

    def forward_step(iterator: Iterator[torch.Tensor], chunk: torch.nn.Module) -> Any:
        tokens = next(iterator)
        model = unwrap_model(chunk)

        # Megatron calls this "loss function" on the last stage only.
        def result(output: torch.Tensor) -> tuple[torch.Tensor, TensorDict]:
            # Whole logits may be shorter than the padded vocabulary (`hide_padding`).
            is_split = output.shape[-1] == model.output_layer.output_size_per_partition
            logits = gather_from_tensor_model_parallel_region(output) if is_split else output
            log_probs = following_log_probs(logits, tokens, vocab_size)
            return log_probs.sum(), {"log_probs": log_probs}

        positions, mask = causal_inputs(tokens)
        output = chunk(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask if needs_mask else None,
            labels=None,
        )
        return output, result

    return forward_step


def hide_padding(chunks: Modules, vocab_size: int) -> None:
    """Give tokens that pad the vocabulary probability 0 from now on, as vLLM does.

    Their logits become -inf, or are removed if the layer returns gathered logits.
    """

    def hook(
        layer: Any,
        _inputs: Any,
        outputs: tuple[torch.Tensor, Any],
    ) -> tuple[torch.Tensor, Any]:
        logits, bias = outputs
        local_size = layer.output_size_per_partition
        # Gathered logits: autograd refuses writes to them in place.
        if logits.shape[-1] != local_size:
            return logits[..., :vocab_size], bias
        # 100 tokens padded to 128 on 2 ranks: rank 1 has tokens 64 to 127, of which 36 are real.
        first_token = parallel_state.get_tensor_model_parallel_rank() * local_size
        num_real = max(0, vocab_size - first_token)
        if num_real < local_size:
            logits[..., num_real:] = float("-inf")
        return logits, bias

    for model in unwrap_model(list(chunks)):
        if model.post_process:
            model.output_layer.register_forward_hook(hook)


@contextmanager
def without_multi_token_prediction(models: Sequence[Any]) -> Iterator[None]:
    """Run the decoder without its MTP layers.

    They only serve a loss, and Megatron cannot run them without labels.
    """
    with (
        attributes_set(_configs_of(models), mtp_num_layers=None),
        attributes_set(models, mtp_process=False),
    ):
        yield


def _configs_of(models: Sequence[Any]) -> list[Any]:
    """Return the distinct configurations; Megatron's scripts create one for each chunk."""
    return list({id(model.config): model.config for model in models}.values())


def from_last_stage(
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return `parts` of the last pipeline stage, joined along dim 0, on every stage. Collective.

    Args:
        parts: tensors to join; empty on all stages but the last.
        shape, dtype: of the result.
    """
    if parts:
        result = torch.cat(list(parts)).contiguous()
    else:
        result = torch.empty(tuple(shape), dtype=dtype, device=model_device())
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return result
    torch.distributed.broadcast(
        result,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return result


def own_settings(config: Any, table: ModelTable) -> Mapping[str, Any]:
    """Return Megatron's settings that change the computed function and differ from the table's.

    A derived table has no settings to compare with.
    """
    if table.is_derived:
        return {}
    described = described_config(table)
    unread = UNREAD_BY_LATENT_ATTENTION if config.multi_latent_attention else ()
    settings = {}
    for name in FUNCTION_FIELDS:
        value = getattr(config, name, None)
        is_comparable = isinstance(value, bool | int | float | str)
        if name not in unread and is_comparable and value != getattr(described, name, None):
            settings[f"TransformerConfig.{name}"] = value
    return settings


def model_device() -> torch.device:
    """Return the current CUDA device, or the CPU on a machine without CUDA."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def causal_inputs(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return position ids [B, S] and the causal mask [1, 1, S, S] of tokens [B, S]."""
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    return positions, causal_mask(length, tokens.device)


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """Return a mask [1, 1, length, length], True if a query (dim 2) must not see a key (dim 3)."""
    future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return future[None, None]


def core_attentions(chunks: Modules) -> list[torch.nn.Module]:
    """Return the modules of these chunks that apply the attention mask."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [module.core_attention for module in modules if isinstance(module, Attention)]


def masks_by_itself(chunks: Modules) -> bool:
    """Return True if attention is Transformer Engine's, which is causal without a mask."""
    # Modules without a core attention, as in a stage of other layers, still reveal their library.
    modules = core_attentions(chunks) or [module for chunk in chunks for module in chunk.modules()]
    return any(map(is_of_transformer_engine, modules))


def is_of_transformer_engine(module: torch.nn.Module) -> bool:
    """Return True if a class of the module is Transformer Engine's."""
    # By name, because the classes cannot be imported without the package.
    return any("transformer_engine" in base.__module__ for base in type(module).__mro__)
