"""Layer spec for --spec of pretrain_hybrid.py. Megatron's own stacks need Transformer Engine."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from hybrid_engine.trainer.megatron.hybrid_layers import stack_spec_for

SPEC = stack_spec_for(
    TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, normalization="RMSNorm"),
    transformer_engine=False,
)
