"""GRPO of a small random GPT in one call, in the root of a checkout.

    hybrid-engine run --nproc-per-node 2 examples/one_call.py

It prints a line per step; the reward, the share of even tokens, rises from 0.39 to 1.
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
