"""Count the tokens of each expert over the micro-batches of a step, in a model in bfloat16."""

import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the same with torch.compile

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: "cpu"

config = TransformerConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=1,
    num_moe_experts=2,
    moe_router_topk=1,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="none",
    use_cpu_initialization=True,
    bf16=True,
    params_dtype=torch.bfloat16,
)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
Float16Module(config, router)

# In each of 400 micro-batches, 55 tokens choose expert 0 and 45 expert 1.
logits = torch.tensor([[1.0, 0.0]] * 55 + [[0.0, 1.0]] * 45)[:, None]
for _ in range(400):
    router.routing(logits)
counted = router.local_tokens_per_expert.tolist()
bias = get_updated_expert_bias(router.local_tokens_per_expert, torch.zeros(2), 0.001)
print(f"tokens counted: {counted}, expected: [22000, 18000]")
print(f"updated bias: {bias.tolist()}, expected: [-0.001, 0.001]")
sys.exit(int(counted != [22000, 18000] or bias.sign().tolist() != [-1, 1]))
