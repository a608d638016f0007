"""Route a batch with padding by a router that balances its experts by a bias."""

import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the same with torch.compile

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: "cpu"

TOP_K, NUM_TOKENS, NUM_PADDING = 2, 6, 2
config = TransformerConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=1,
    num_moe_experts=4,
    moe_router_topk=TOP_K,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="none",
    use_cpu_initialization=True,
)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())

is_padding = torch.arange(NUM_TOKENS) >= NUM_TOKENS - NUM_PADDING
counted: object
try:
    router.routing(torch.randn(NUM_TOKENS, 1, 4), padding_mask=is_padding[:, None])
    counted = int(router.local_tokens_per_expert.sum())
except RuntimeError as error:
    counted = f"RuntimeError: {error}"
expected = TOP_K * (NUM_TOKENS - NUM_PADDING)
print(f"choices of experts counted: {counted}, expected: {expected}")
sys.exit(int(counted != expected))
