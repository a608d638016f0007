"""GRPO of a small random GPT in one call, in the root of a checkout.

    hybrid-engine run --nproc-per-node 2 examples/one_call.py

It prints, between warnings of torch and vLLM:

    step 1: reward 0.3945, loss -0.118, grad_norm 2.812, response_tokens 6.641, 0.6 s
    step 2: reward 0.5762, loss -0.1458, grad_norm 3.94, response_tokens 6.953, 0.5 s
    ...
    step 8: reward 1, loss 0, grad_norm 0, response_tokens 8, 1.0 s
"""

from hybrid_engine import Completion
from hybrid_engine.rl import GrpoConfig, train

actor = {"tensor_model_parallel_size": 2, "params_dtype": "float32"}
actor |= {"seq_length": 16, "micro_batch_size": 16}
generate = {"infer_tensor_parallel_size": 1, "max_model_len": 16}  # two replicas
# A directory or a Hub id. Leave out random_weights where it has weights.
model = {"model": "examples/gpt_rl/model", "random_weights": True}
model |= {"actor_config": actor, "generate_config": generate}
prompts = [[first, 2, 3, 4] for first in range(8)]  # or texts, or chats


def reward(prompt: list[int], completion: Completion) -> float:
    """Return the share of even tokens, of 8."""
    return sum(token % 2 == 0 for token in completion.token_ids) / 8


config = GrpoConfig(steps=8, max_tokens=8, learning_rate=1e-2)
rows = train(model, prompts, reward, config, out="runs/even")
