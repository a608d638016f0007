"""Operators of vLLM's libraries that small models call: Qwen2, Qwen3, Llama, Gemma2, Qwen3-MoE,
DeepSeek.

Each function computes the same as vLLM 0.32's CUDA kernel of its name (csrc/libtorch_stable), with
the same types and the same rounding, between steps or once at the end. It is registered as the
kernel of the CPU; operators.so runs it for CUDA on the device's memory, as one kernel with the
reads and writes of the operator's schema. Caches of 8-bit numbers and quantized layers are not
supported.
"""

import math

import torch
from software_gpu_operators import register_kernels

_registered = set()


def register():
    """Register the kernels of all libraries loaded so far; called after each of them."""
    for namespace, kernels in _KERNELS.items():
        is_loaded = hasattr(getattr(torch.ops, namespace), next(iter(kernels)))
        if is_loaded and namespace not in _registered:
            _registered.add(namespace)
            register_kernels(namespace, kernels)


def _numbers(end):
    """Return 0, 1, ... on the CPU, even if CUDA is the caller's default device."""
    return torch.arange(end, device="cpu")


# -- norms
# --------------------------------------------------------------------------------------------------


def rms_norm(result, input, weight, epsilon):
    """Scale and multiply by the weight in float32, and round once."""
    result.copy_(_normalized(input, weight, epsilon))


def fused_add_rms_norm(input, residual, weight, epsilon):
    """Round the sum to the tensors' type, and normalize the rounded sum."""
    residual.add_(input)
    input.copy_(_normalized(residual, weight, epsilon))


def _normalized(input, weight, epsilon):
    wide = input.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return wide
    if weight.dim() == 2:  # A row of weights for each first index.
        weight = weight.view(weight.shape[0], *[1] * (input.dim() - 2), weight.shape[1])
    return wide * weight.float()


# -- activations
# --------------------------------------------------------------------------------------------------


def _gated(activation, is_first_activated=True):
    """Return a kernel that multiplies one half by the other's activation, rounded before."""

    def kernel(out, input):
        first, second = input.chunk(2, dim=-1)
        activated, factor = (first, second) if is_first_activated else (second, first)
        rounded = activation(activated.float()).to(input.dtype)
        out.copy_(rounded.float() * factor.float())

    return kernel


def _silu(x):
    return x / (1 + torch.exp(-x))


def _gelu(x):
    return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def silu_and_mul_with_clamp(result, input, limit, alpha=1.0, beta=0.0):
    """Clamp both halves, and add `beta` to the half that is not activated."""
    gate, up = input.chunk(2, dim=-1)
    gate = gate.float().clamp(max=limit).to(input.dtype).float()
    up = up.float().clamp(-limit, limit)
    rounded = (gate / (1 + torch.exp(-gate * alpha))).to(input.dtype)
    result.copy_(rounded.float() * (up + beta))


def relu_squared(out, input):
    """Square in float32."""
    out.copy_(input.float().relu().square())


# -- positions
# --------------------------------------------------------------------------------------------------


def rotary_embedding(
    positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False
):
    """Rotate in float32 and round once, in place."""
    cos, sin = cos_sin_cache[positions].float().unsqueeze(-2).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    for tensor in (query, key):
        if tensor is not None:
            has_heads = tensor.dim() == positions.dim() + 2
            heads = tensor if has_heads else tensor.unflatten(-1, (-1, head_size))
            _rotate(heads.narrow(-1, rope_dim_offset, cos_sin_cache.shape[1]), cos, sin, is_neox)


def _rotate(rotated, cos, sin, is_neox):
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first = rotated[..., 0::2]
        second = rotated[..., 1::2]
    x = (
        first.float()
    )  # No copy of a float32 tensor, so both results are computed before the writes.
    y = second.float()
    rotated_x = x * cos - y * sin
    rotated_y = y * cos + x * sin
    first.copy_(rotated_x)
    second.copy_(rotated_y)


# -- embeddings and sampling
# -----------------------------------------------------------------------------------------


def vocab_parallel_embedding(
    out,
    input_ids,
    weight,
    org_vocab_start_index,
    org_vocab_end_index,
    num_org_vocab_padding,
    added_vocab_start_index,
    added_vocab_end_index,
):
    """Look up the rows of this rank's ids, and zeros for other ids."""
    is_original = (input_ids >= org_vocab_start_index) & (input_ids < org_vocab_end_index)
    is_added = (input_ids >= added_vocab_start_index) & (input_ids < added_vocab_end_index)
    first_added = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    added_rows = input_ids - added_vocab_start_index + first_added
    is_local = is_original | is_added
    rows = torch.where(
        is_original, input_ids - org_vocab_start_index, torch.where(is_added, added_rows, 0)
    )
    out.copy_(torch.where(is_local.unsqueeze(-1), weight[rows.long()], 0))


def apply_repetition_penalties_(logits, prompt_mask, output_mask, repetition_penalties):
    """Make repeated tokens less likely."""
    penalties = repetition_penalties.unsqueeze(1)
    penalized = torch.where(logits > 0, logits / penalties, logits * penalties)
    logits.copy_(torch.where(prompt_mask | output_mask, penalized, logits))


# -- caches of keys and values
# -----------------------------------------------------------------------------------------


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    """Store the keys and values of new tokens; a slot below 0 is padding."""
    _refuse_8_bits(kv_cache_dtype)
    tokens, blocks, offsets = _slots(slot_mapping, key_cache.shape[1])
    key_cache[blocks, offsets] = key[tokens].to(key_cache.dtype)
    value_cache[blocks, offsets] = value[tokens].to(value_cache.dtype)


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """Store the latent and the rotated part of new tokens side by side."""
    _refuse_8_bits(kv_cache_dtype)
    tokens, blocks, offsets = _slots(slot_mapping, kv_cache.shape[1])
    kv_cache[blocks, offsets] = torch.cat((kv_c[tokens], k_pe[tokens]), dim=-1).to(kv_cache.dtype)


def _slots(slot_mapping, block_size):
    tokens = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[tokens]
    return tokens, slots // block_size, slots % block_size


def _refuse_8_bits(kv_cache_dtype):
    if kv_cache_dtype.startswith(("fp8", "int8", "nvfp4")):
        raise NotImplementedError(f"the software GPU has no cache of type {kv_cache_dtype}")


def gather_and_maybe_dequant_cache(
    src_cache,
    dst,
    block_table,
    cu_seq_lens,
    token_to_seq,
    num_tokens,
    kv_cache_dtype,
    scale,
    seq_starts,
):
    """Copy the cached tokens of all sequences into one tensor."""
    _refuse_8_bits(kv_cache_dtype)
    sequences = token_to_seq[:num_tokens].long()
    dst[:num_tokens] = _cached(src_cache, block_table, cu_seq_lens, sequences, seq_starts).to(
        dst.dtype
    )


def cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts):
    """Copy the cached tokens of the first `batch_size` sequences into one tensor, unchanged."""
    lengths = cu_seq_lens[1 : batch_size + 1] - cu_seq_lens[:batch_size]
    sequences = torch.repeat_interleave(_numbers(batch_size), lengths.long())
    dst[: len(sequences)] = _cached(src_cache, block_table, cu_seq_lens, sequences, seq_starts)


def _cached(src_cache, block_table, cu_seq_lens, sequences, seq_starts):
    positions = _numbers(len(sequences)) - cu_seq_lens[sequences]
    if seq_starts is not None:
        positions = positions + seq_starts[sequences]
    blocks = block_table[sequences, positions // src_cache.shape[1]]
    return src_cache[blocks.long(), positions % src_cache.shape[1]]


def concat_mla_q(ql_nope, q_pe, q_out):
    """Put both parts of the queries side by side."""
    q_out.copy_(torch.cat((ql_nope, q_pe), dim=-1))


# -- attention
# --------------------------------------------------------------------------------------------------


def merge_attn_states(
    output,
    output_lse,
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    prefill_tokens_with_context,
    output_scale=None,
):
    """Combine attention over two parts of the keys, in float32; tokens without a prefix take the
    suffix alone.

    Outputs are [tokens, heads, size] and logarithms of sums of exponentials [heads, tokens].
    """
    if output_scale is not None:
        raise NotImplementedError("the software GPU has no attention output of 8 bits")
    num_merged = (
        output.shape[0] if prefill_tokens_with_context is None else prefill_tokens_with_context
    )
    has_prefix = (_numbers(output.shape[0]) < num_merged).unsqueeze(0)
    prefix = _no_infinity(prefix_lse)
    suffix = _no_infinity(suffix_lse)
    largest = torch.maximum(prefix, suffix)
    is_empty = torch.isinf(largest)
    prefix_part = torch.exp(prefix - largest)
    suffix_part = torch.exp(suffix - largest)
    total = prefix_part + suffix_part
    merged = prefix_output.float() * _per_head(prefix_part / total)
    merged = merged + suffix_output.float() * _per_head(suffix_part / total)
    merged = torch.where(_per_head(is_empty), prefix_output.float(), merged)
    lse = torch.where(is_empty, largest, torch.log(total) + largest)
    output.copy_(torch.where(_per_head(has_prefix), merged, suffix_output.float()))
    if output_lse is not None:
        output_lse.copy_(torch.where(has_prefix, lse, suffix_lse))


def _no_infinity(lse):
    """Replace infinities of either sign by -inf, the logarithm of a sum over no keys."""
    return torch.where(torch.isinf(lse), -math.inf, lse)


def _per_head(of_heads):
    return of_heads.t().unsqueeze(-1)


# -- experts
# --------------------------------------------------------------------------------------------------


def topk_softmax(
    topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, bias, is_padding
):
    """Choose experts by their probabilities."""
    scores = torch.softmax(gating_output.float(), dim=-1)
    _choose(
        topk_weights, topk_indices, token_expert_indices, scores, renormalize, bias, 1.0, is_padding
    )


def topk_sigmoid(
    topk_weights,
    topk_indices,
    token_expert_indices,
    gating_output,
    renormalize,
    bias,
    scaling_factor,
    is_padding,
):
    """Choose experts by independent scores."""
    scores = torch.sigmoid(gating_output.float())
    _choose(
        topk_weights,
        topk_indices,
        token_expert_indices,
        scores,
        renormalize,
        bias,
        scaling_factor,
        is_padding,
    )


def _choose(weights, indices, token_expert_indices, scores, renormalize, bias, factor, is_padding):
    scores = torch.where(torch.isfinite(scores), scores, 0.0)
    chosen = _largest(scores if bias is None else scores + bias.float(), weights.shape[1])
    chosen_scores = scores.gather(-1, chosen)
    scale = torch.full((len(scores), 1), factor, device="cpu")
    if renormalize:
        total = chosen_scores.sum(-1, keepdim=True)
        scale = scale / torch.where(total > 0, total, 1.0)
    weights.copy_(chosen_scores * scale)
    if is_padding is not None:
        chosen = torch.where(is_padding.bool().unsqueeze(-1), scores.shape[1], chosen)
    indices.copy_(chosen)
    num_rows, num_chosen = indices.shape
    token_expert_indices.copy_(_numbers(num_chosen) * num_rows + _numbers(num_rows).unsqueeze(-1))


def _largest(scores, num):
    """Return the indices of the largest scores, in their order if equal."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :num]


def grouped_topk(
    scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
):
    """Choose groups by the sum of their two best experts, then experts within these groups."""
    num_tokens, num_experts = scores.shape
    unbiased = torch.sigmoid(scores.float()) if scoring_func == 1 else scores.float()
    biased = unbiased + bias.float()
    by_group = biased.view(num_tokens, n_group, -1)
    group_scores = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
    is_chosen = torch.zeros(num_tokens, n_group, dtype=torch.bool, device="cpu")
    is_chosen.scatter_(1, _largest(group_scores, topk_group), True)
    biased = torch.where(is_chosen.unsqueeze(-1), by_group, -math.inf).view(num_tokens, num_experts)
    chosen = _largest(biased, topk)
    weights = unbiased.gather(-1, chosen)
    scale = torch.full((num_tokens, 1), routed_scaling_factor, device="cpu")
    if renormalize:
        scale = scale / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, chosen.int()


def moe_align_block_size(
    topk_ids,
    num_experts,
    block_size,
    sorted_token_ids,
    experts_ids,
    num_tokens_post_pad,
    maybe_expert_map,
    scatter_idx=None,
):
    """Sort this rank's routes by expert and pad those of each expert to whole blocks."""
    routes = topk_ids.flatten().long()
    is_valid = (routes >= 0) & (routes < num_experts)
    experts = torch.where(is_valid, routes, 0)
    if maybe_expert_map is not None:
        experts = maybe_expert_map[experts].long()
    experts = torch.where(is_valid, experts, -1)
    sorted_token_ids.fill_(routes.numel())
    experts_ids.fill_(-1)
    num_padded = 0
    for expert in range(num_experts):
        expert_routes = (experts == expert).nonzero().flatten()
        num_blocks = -(-len(expert_routes) // block_size)
        sorted_token_ids[num_padded : num_padded + len(expert_routes)] = expert_routes.int()
        experts_ids[num_padded // block_size :][:num_blocks] = expert
        num_padded += num_blocks * block_size
    num_tokens_post_pad.fill_(num_padded)
    if scatter_idx is not None:
        numbers = _numbers(routes.numel()).int()
        scatter_idx.view(-1).copy_(torch.where(experts >= 0, numbers, -1))


def moe_sum(input, output, topk_ids=None, expert_map=None):
    """Sum over the local experts of each token, in float32."""
    wide = input.float()
    if topk_ids is not None:
        is_local = topk_ids >= 0
        if expert_map is not None:
            is_local &= expert_map[topk_ids.clamp(min=0).long()] >= 0
        wide = torch.where(is_local.unsqueeze(-1), wide, 0.0)
    total = torch.zeros_like(wide[:, 0])
    for expert in range(wide.shape[1]):  # In the kernel's order.
        total += wide[:, expert]
    output.copy_(total)


_KERNELS = {
    "_C": {
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "silu_and_mul": _gated(_silu),
        "mul_and_silu": _gated(_silu, is_first_activated=False),
        "gelu_and_mul": _gated(_gelu),
        "gelu_tanh_and_mul": _gated(_gelu_tanh),
        "silu_and_mul_with_clamp": silu_and_mul_with_clamp,
        "relu_squared": relu_squared,
        "rotary_embedding": rotary_embedding,
        "vocab_parallel_embedding": vocab_parallel_embedding,
        "apply_repetition_penalties_": apply_repetition_penalties_,
        "merge_attn_states": merge_attn_states,
    },
    "_C_cache_ops": {
        "reshape_and_cache_flash": reshape_and_cache_flash,
        "concat_and_cache_mla": concat_and_cache_mla,
        "gather_and_maybe_dequant_cache": gather_and_maybe_dequant_cache,
        "cp_gather_cache": cp_gather_cache,
        "concat_mla_q": concat_mla_q,
    },
    "_moe_C": {
        "topk_softmax": topk_softmax,
        "topk_sigmoid": topk_sigmoid,
        "grouped_topk": grouped_topk,
        "moe_align_block_size": moe_align_block_size,
        "moe_sum": moe_sum,
    },
}
